package bootstrap

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/auth/rbac/validation"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/internal/retry"
)

// BootstrappingLabel is the label of default roles and bindings; its value is "rbac-defaults".
const BootstrappingLabel = "kubernetes.io/bootstrapping"

// AutoUpdateAnnotation is the annotation of a default role or binding. If its value is "false",
// bootstrap does not change the object.
const AutoUpdateAnnotation = "rbac.authorization.kubernetes.io/autoupdate"

// reconcileRole creates a default role or binding, or adds the rules and subjects that it lacks, as
// Kubernetes does at every start. Additions by users stay. With AutoUpdateAnnotation "false", it
// changes nothing. Other components, such as the aggregation controller, write roles concurrently.
// After a conflict, reconcileRole therefore reads the role from the store and tries again.
func (s *Setup) reconcileRole(ctx context.Context, fence uint64, wanted api.Object) error {
	kind, err := s.servedKindOf(wanted)
	if err != nil {
		return err
	}
	found, ok := s.config.Cluster.Get(ctx, kind.Resource, "", wanted.GetName())
	return retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		err = s.completeDefault(ctx, fence, wanted.DeepCopyObject().(api.Object), found, ok)
		if !apierrors.IsConflict(err) || storeerrors.IsLeadershipEnded(err) || ctx.Err() != nil {
			return false, err
		}
		r := &api.Request{User: api.APIServerUser(), Verb: api.VerbGet, Kind: kind, Name: wanted.GetName()}
		var gone error
		found, gone = s.config.Registry.GetObject(ctx, r)
		if ok = gone == nil; !ok && !apierrors.IsNotFound(gone) {
			return false, fmt.Errorf("reading %s %s again: %w", kind.GVK.Kind, wanted.GetName(), gone)
		}
		return true, err
	})
}

// completeDefault creates wanted, or adds to current the rules or subjects of wanted that it lacks.
// ok reports whether current exists.
func (s *Setup) completeDefault(ctx context.Context, fence uint64, wanted, current api.Object, ok bool) error {
	if !ok {
		if err := s.writeObject(ctx, fence, api.VerbCreate, wanted); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	}
	if current.GetAnnotations()[AutoUpdateAnnotation] == "false" {
		return nil
	}
	var next api.Object
	switch want := wanted.(type) {
	case *rbacv1.ClusterRole:
		next = completeRole(current.(*rbacv1.ClusterRole), want)
	case *rbacv1.ClusterRoleBinding:
		have := current.(*rbacv1.ClusterRoleBinding)
		if have.RoleRef != want.RoleRef { // the role reference is immutable
			if err := s.writeObject(ctx, fence, api.VerbDelete, have); err != nil && !apierrors.IsNotFound(err) {
				return err
			}
			want.Subjects = completeSubjects(have.Subjects, want.Subjects)
			return s.writeObject(ctx, fence, api.VerbCreate, want)
		}
		next = completeBinding(have, want)
	}
	if next == nil {
		return nil
	}
	return s.writeObject(ctx, fence, api.VerbUpdate, next)
}

// retireDefault deletes a default role or binding of an earlier release. It keeps the object if an
// administrator created it or set AutoUpdateAnnotation to "false".
func (s *Setup) retireDefault(ctx context.Context, fence uint64, resource, name string) error {
	found, ok := s.config.Cluster.Get(ctx, resource, "", name)
	if !ok || found.GetLabels()[BootstrappingLabel] != "rbac-defaults" ||
		found.GetAnnotations()[AutoUpdateAnnotation] == "false" {
		return nil
	}
	if err := s.writeObject(ctx, fence, api.VerbDelete, found); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return nil
}

// completeRole returns current with the missing rules, selectors, labels and annotations of wanted;
// nil if nothing is missing.
func completeRole(current, wanted *rbacv1.ClusterRole) api.Object {
	_, missing := validation.Covers(current.Rules, wanted.Rules)
	if current.AggregationRule != nil {
		missing = nil // the aggregation controller sets its rules
	}
	selectors := completeSelectors(current.AggregationRule, wanted.AggregationRule)
	labels, annotations := mergeLabels(wanted.Labels, current.Labels),
		mergeLabels(wanted.Annotations, current.Annotations)
	if len(missing) == 0 && selectors == nil && maps.Equal(labels, current.Labels) &&
		maps.Equal(annotations, current.Annotations) {
		return nil
	}
	next := current.DeepCopy()
	next.Labels, next.Annotations, next.Rules = labels, annotations, append(next.Rules, missing...)
	if selectors != nil {
		next.AggregationRule = selectors
	}
	return next
}

// completeSelectors returns current with the missing selectors of wanted; nil if nothing is
// missing.
func completeSelectors(current, wanted *rbacv1.AggregationRule) *rbacv1.AggregationRule {
	if wanted == nil {
		return nil
	}
	next, changed := current.DeepCopy(), current == nil
	if next == nil {
		next = &rbacv1.AggregationRule{}
	}
	for _, s := range wanted.ClusterRoleSelectors {
		if !slices.ContainsFunc(next.ClusterRoleSelectors, func(h metav1.LabelSelector) bool {
			return reflect.DeepEqual(h, s)
		}) {
			next.ClusterRoleSelectors, changed = append(next.ClusterRoleSelectors, s), true
		}
	}
	if !changed {
		return nil
	}
	return next
}

// keepAddedRules upgrades clusters of releases in which the role aggregate was not aggregated. It
// copies the rules of aggregate to a new role part, which aggregate then includes by aggregation.
// Rules that users have added therefore stay.
func (s *Setup) keepAddedRules(ctx context.Context, fence uint64, aggregate, part string) error {
	found, ok := s.config.Cluster.Get(ctx, "clusterroles", "", aggregate)
	if !ok {
		return nil
	}
	have, ok := found.(*rbacv1.ClusterRole)
	if !ok || have.AggregationRule != nil || have.Annotations[AutoUpdateAnnotation] == "false" {
		return nil
	}
	if _, there := s.config.Cluster.Get(ctx, "clusterroles", "", part); there {
		return nil
	}
	err := s.writeObject(ctx, fence, api.VerbCreate,
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: part}, Rules: have.Rules})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// completeBinding returns current with the missing subjects, labels and annotations of wanted; nil
// if nothing is missing.
func completeBinding(current, wanted *rbacv1.ClusterRoleBinding) api.Object {
	subjects := completeSubjects(current.Subjects, wanted.Subjects)
	labels, annotations := mergeLabels(wanted.Labels, current.Labels),
		mergeLabels(wanted.Annotations, current.Annotations)
	if len(subjects) == len(current.Subjects) && maps.Equal(labels, current.Labels) &&
		maps.Equal(annotations, current.Annotations) {
		return nil
	}
	next := current.DeepCopy()
	next.Labels, next.Annotations, next.Subjects = labels, annotations, subjects
	return next
}

func completeSubjects(current, wanted []rbacv1.Subject) []rbacv1.Subject {
	out := slices.Clone(current)
	for _, s := range wanted {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
