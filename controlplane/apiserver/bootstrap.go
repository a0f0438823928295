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

// itself returns the user as which the apiserver writes.
func itself() api.User {
	return api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
}

// EnsureBootstrap creates the objects that every cluster has, if they are missing: system
// namespaces and priority classes, default roles and bindings, flow schemas and priority levels.
// Default roles and bindings also get the rules and subjects that they lack. The leader calls it;
// fence is the term of its leadership, 0 for none. A failed write does not prevent the others.
func (s *Server) EnsureBootstrap(ctx context.Context, fence uint64) error {
	// The cache must be current, so that an object that a user has changed is not compared in an
	// old state.
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

// EnsureSystemObjects creates the system namespaces and priority classes that are missing. fence is
// the term of the leadership, 0 for none.
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

// kindOf returns the served kind of a Go object, nil if its kind is not served.
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

// ensure creates an object if it does not exist. It does nothing if the kind is not served.
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

// write creates, updates or deletes o as the apiserver itself. fence is the term of the leadership,
// 0 for none. A deletion has o's UID as a precondition.
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
