package apiserver

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
	"keelson.dev/keelson/controlplane/registry"
)

// defaultRole is the label of default roles and bindings; its value is "rbac-defaults".
const defaultRole = "kubernetes.io/bootstrapping"

// autoUpdate is the annotation that prevents changes to a default role or binding if its value is
// "false".
const autoUpdate = "rbac.authorization.kubernetes.io/autoupdate"

// reconcileRole creates a default role or binding, or adds the rules and subjects that it lacks, as
// Kubernetes does at every start. Additions by users stay. With autoUpdate "false", everything
// stays unchanged. Other components such as the aggregation controller write roles concurrently.
// After a conflict it reads the role from the store and tries again.
func (s *Server) reconcileRole(ctx context.Context, fence uint64, want api.Object) error {
	kind, err := s.kindOf(want)
	if err != nil {
		return err
	}
	found, ok := s.known.Get(ctx, kind.Resource, "", want.GetName())
	for range roleAttempts {
		err = s.completeDefault(ctx, fence, want.DeepCopyObject().(api.Object), found, ok)
		if !apierrors.IsConflict(err) || registry.IsLeadershipEnded(err) || ctx.Err() != nil {
			return err
		}
		r := &api.Request{User: itself(), Verb: api.VerbGet, Kind: kind, Name: want.GetName()}
		var gone error
		found, gone = s.cfg.Registry.Get(ctx, r)
		if ok = gone == nil; !ok && !apierrors.IsNotFound(gone) {
			return fmt.Errorf("reading %s %s again: %w", kind.GVK.Kind, want.GetName(), gone)
		}
	}
	return err
}

// roleAttempts is how often reconcileRole tries to write a default role in case of conflicts.
const roleAttempts = 5

// completeDefault creates want, or adds to found the rules or subjects of want that it lacks. ok
// reports whether found exists.
func (s *Server) completeDefault(ctx context.Context, fence uint64, want, found api.Object, ok bool) error {
	if !ok {
		if err := s.write(ctx, fence, api.VerbCreate, want); err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	}
	if found.GetAnnotations()[autoUpdate] == "false" {
		return nil
	}
	var next api.Object
	switch want := want.(type) {
	case *rbacv1.ClusterRole:
		next = completeRole(found.(*rbacv1.ClusterRole), want)
	case *rbacv1.ClusterRoleBinding:
		have := found.(*rbacv1.ClusterRoleBinding)
		if have.RoleRef != want.RoleRef { // the role reference is immutable
			if err := s.write(ctx, fence, api.VerbDelete, have); err != nil && !apierrors.IsNotFound(err) {
				return err
			}
			want.Subjects = completeSubjects(have.Subjects, want.Subjects)
			return s.write(ctx, fence, api.VerbCreate, want)
		}
		next = completeBinding(have, want)
	}
	if next == nil {
		return nil
	}
	return s.write(ctx, fence, api.VerbUpdate, next)
}

// retire deletes a default role or binding of an earlier release. It keeps the object if an
// administrator created it or set autoUpdate to "false".
func (s *Server) retire(ctx context.Context, fence uint64, resource, name string) error {
	found, ok := s.known.Get(ctx, resource, "", name)
	if !ok || found.GetLabels()[defaultRole] != "rbac-defaults" || found.GetAnnotations()[autoUpdate] == "false" {
		return nil
	}
	if err := s.write(ctx, fence, api.VerbDelete, found); err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	return nil
}

// completeRole returns have with the missing rules, selectors, labels and annotations of want; nil
// if nothing is missing.
func completeRole(have, want *rbacv1.ClusterRole) api.Object {
	_, missing := validation.Covers(have.Rules, want.Rules)
	if have.AggregationRule != nil {
		missing = nil // the aggregation controller sets its rules
	}
	selectors := completeSelectors(have.AggregationRule, want.AggregationRule)
	labels, annotations := withAll(want.Labels, have.Labels), withAll(want.Annotations, have.Annotations)
	if len(missing) == 0 && selectors == nil && maps.Equal(labels, have.Labels) && maps.Equal(annotations, have.Annotations) {
		return nil
	}
	next := have.DeepCopy()
	next.Labels, next.Annotations, next.Rules = labels, annotations, append(next.Rules, missing...)
	if selectors != nil {
		next.AggregationRule = selectors
	}
	return next
}

// completeSelectors returns have with the missing selectors of want; nil if nothing is missing.
func completeSelectors(have, want *rbacv1.AggregationRule) *rbacv1.AggregationRule {
	if want == nil {
		return nil
	}
	next, changed := have.DeepCopy(), have == nil
	if next == nil {
		next = &rbacv1.AggregationRule{}
	}
	for _, s := range want.ClusterRoleSelectors {
		if !slices.ContainsFunc(next.ClusterRoleSelectors, func(h metav1.LabelSelector) bool { return reflect.DeepEqual(h, s) }) {
			next.ClusterRoleSelectors, changed = append(next.ClusterRoleSelectors, s), true
		}
	}
	if !changed {
		return nil
	}
	return next
}

// keepAddedRules upgrades clusters in which the role whole was not aggregated yet. It copies the
// rules of whole to a new role part, which whole then aggregates, so that rules added by users
// stay.
func (s *Server) keepAddedRules(ctx context.Context, fence uint64, whole, part string) error {
	found, ok := s.known.Get(ctx, "clusterroles", "", whole)
	if !ok {
		return nil
	}
	have, ok := found.(*rbacv1.ClusterRole)
	if !ok || have.AggregationRule != nil || have.Annotations[autoUpdate] == "false" {
		return nil
	}
	if _, there := s.known.Get(ctx, "clusterroles", "", part); there {
		return nil
	}
	err := s.write(ctx, fence, api.VerbCreate, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: part}, Rules: have.Rules})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// completeBinding returns have with the missing subjects, labels and annotations of want; nil if
// nothing is missing.
func completeBinding(have, want *rbacv1.ClusterRoleBinding) api.Object {
	subjects := completeSubjects(have.Subjects, want.Subjects)
	labels, annotations := withAll(want.Labels, have.Labels), withAll(want.Annotations, have.Annotations)
	if len(subjects) == len(have.Subjects) && maps.Equal(labels, have.Labels) && maps.Equal(annotations, have.Annotations) {
		return nil
	}
	next := have.DeepCopy()
	next.Labels, next.Annotations, next.Subjects = labels, annotations, subjects
	return next
}

func completeSubjects(have, want []rbacv1.Subject) []rbacv1.Subject {
	out := slices.Clone(have)
	for _, s := range want {
		if !slices.Contains(out, s) {
			out = append(out, s)
		}
	}
	return out
}
