package apiserver

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/authz"
)

// itself is the identity under which the apiserver writes.
func itself() api.User {
	return api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
}

// EnsureBootstrap creates what every cluster has from the start, where missing: the system namespaces and priority
// classes, the default roles and bindings, to which it also adds what they lack, and the flow schemas. The leader calls it; fence is the
// term of its leadership, 0 for none. What cannot be written keeps nothing else from being written.
func (s *Server) EnsureBootstrap(ctx context.Context, fence uint64) error {
	// What somebody has changed is not taken for what it was before.
	if err := s.cfg.Registry.CaughtUp(ctx); err != nil {
		return err
	}
	errs := []error{s.EnsureSystemObjects(ctx, fence)}
	for whole, part := range authz.Aggregated {
		errs = append(errs, s.keepAddedRules(ctx, fence, whole, part))
	}
	for _, o := range authz.BootstrapObjects() {
		errs = append(errs, s.reconcileRole(ctx, fence, o))
	}
	for _, name := range authz.Retired {
		errs = append(errs, s.retire(ctx, fence, "clusterrolebindings", name), s.retire(ctx, fence, "clusterroles", name))
	}
	errs = append(errs, s.EnsureFlowControl(ctx, fence))
	return errors.Join(errs...)
}

// EnsureSystemObjects creates the system namespaces and priority classes where they are missing.
func (s *Server) EnsureSystemObjects(ctx context.Context, fence uint64) error {
	var all []api.Object
	for _, name := range []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease} {
		all = append(all, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	var errs []error
	for _, o := range append(all, admission.SystemPriorityClasses()...) {
		errs = append(errs, s.ensure(ctx, fence, o))
	}
	return errors.Join(errs...)
}

// kindOf finds the kind of a Go object.
func (s *Server) kindOf(o api.Object) (*api.Kind, error) {
	gvks, _, err := s.cfg.Scheme.ObjectKinds(o)
	if err != nil {
		return nil, err
	}
	for _, gvk := range gvks {
		if k := s.cfg.Kinds.ByGVK(gvk); k != nil {
			return k, nil
		}
	}
	return nil, nil
}

// ensure creates an object unless it is there. A kind that is not served needs none.
func (s *Server) ensure(ctx context.Context, fence uint64, o api.Object) error {
	kind, err := s.kindOf(o)
	if kind == nil || err != nil {
		return err
	}
	if _, ok := s.known.Get(ctx, kind.Resource, o.GetNamespace(), o.GetName()); ok {
		return nil
	}
	if err := s.write(ctx, fence, api.VerbCreate, o); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

// write creates, updates or deletes o as the apiserver itself, in the term of the leadership that asks for it. A
// deletion hits the object with o's UID only.
func (s *Server) write(ctx context.Context, fence uint64, verb api.Verb, o api.Object) error {
	kind, err := s.kindOf(o)
	if err != nil {
		return err
	}
	r := &api.Request{User: itself(), Verb: verb, Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName(), Fence: fence}
	if verb == api.VerbDelete {
		uid := o.GetUID()
		r.Delete.Preconditions = &metav1.Preconditions{UID: &uid}
	} else {
		r.Object = o
	}
	if _, err := s.chain.Do(ctx, r); err != nil {
		return fmt.Errorf("%s of %s %s: %w", verb, kind.GVK.Kind, types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}, err)
	}
	return nil
}
