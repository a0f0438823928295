package apiserver

import (
	"context"
	"maps"
	"slices"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-helpers/auth/rbac/validation"

	"keelson.dev/keelson/controlplane/api"
)

// autoUpdate is the annotation by which an administrator keeps a default role as it is: "false".
const autoUpdate = "rbac.authorization.kubernetes.io/autoupdate"

// reconcileRole creates a default role or binding, or adds to it the rights and subjects that it lacks, as Kubernetes
// does at every start. What somebody added stays; autoUpdate "false" keeps everything as it is.
func (s *Server) reconcileRole(ctx context.Context, fence uint64, want api.Object) error {
	kind, err := s.kindOf(want)
	if err != nil {
		return err
	}
	found, ok := s.known.Get(ctx, kind.Resource, "", want.GetName())
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
		if have.RoleRef != want.RoleRef { // this cannot be changed
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

// completeRole is have with the rights of want that it lacks; nil when it lacks nothing.
func completeRole(have, want *rbacv1.ClusterRole) api.Object {
	_, missing := validation.Covers(have.Rules, want.Rules)
	if have.AggregationRule != nil {
		missing = nil // its rules are those of other roles
	}
	labels, annotations := withAll(want.Labels, have.Labels), withAll(want.Annotations, have.Annotations)
	if len(missing) == 0 && maps.Equal(labels, have.Labels) && maps.Equal(annotations, have.Annotations) {
		return nil
	}
	next := have.DeepCopy()
	next.Labels, next.Annotations, next.Rules = labels, annotations, append(next.Rules, missing...)
	return next
}

// completeBinding is have with the subjects of want that it lacks; nil when it lacks nothing.
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
