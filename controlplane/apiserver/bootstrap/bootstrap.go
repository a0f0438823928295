// Package bootstrap creates and repairs the objects that every cluster has: namespaces, priority
// classes, roles, flow schemas, Services of the API and of DNS, the default storage class, and the
// APIServices of the group versions that this server serves itself.
package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/builtin"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/registry"
)

// Config contains the dependencies of a Setup.
type Config struct {
	Backend  api.Backend // performs the writes
	Cluster  Cluster
	Registry *registry.Registry
	Kinds    *api.Kinds
	Scheme   *runtime.Scheme
	// APIServices returns the APIServices in this replica's cache.
	APIServices func(ctx context.Context) []*apiregistrationv1.APIService
	ProxyCAs    *ProxyCAs // nil = no authentication ConfigMap is published
	Clock       func() time.Time
}

// Cluster reads objects of the cluster. The caller must not change them.
type Cluster interface {
	// Get returns an object from this replica's cache, or from the store if the cache does not have
	// it.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// GetStored returns an object from the store.
	GetStored(ctx context.Context, resource, namespace, name string) (api.Object, error)
	// List returns the objects of a namespace ("" = all namespaces). It reads the store if fresh is
	// true, and otherwise the cache.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// ProxyCAs are the CAs with which aggregated API servers verify client certificates, as PEM.
type ProxyCAs struct {
	FrontProxy func() []byte // CA of the client certificate that this API server presents
	Client     func() []byte // CA of users' client certificates
}

// Setup creates and repairs the objects that the API server itself maintains. The leader calls its
// methods; they may be called concurrently.
type Setup struct{ config Config }

// New returns a Setup with the dependencies c. It writes nothing.
func New(c Config) *Setup { return &Setup{config: c} }

// EnsureBootstrap creates the objects that every cluster has, if they are missing: system
// namespaces and priority classes, default roles and bindings, flow schemas and priority levels.
// Existing default roles and bindings get the rules and subjects that they lack. The leader calls
// it; fence is the term of its leadership, 0 for none. A failed write does not prevent the others.
func (s *Setup) EnsureBootstrap(ctx context.Context, fence uint64) error {
	// The cache must be current, so that an object that a user has changed is not compared in an
	// old state.
	if err := s.config.Registry.CaughtUp(ctx); err != nil {
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
		errs = append(errs, s.retireDefault(ctx, fence, "clusterrolebindings", name),
			s.retireDefault(ctx, fence, "clusterroles", name))
	}
	errs = append(errs, s.EnsureFlowControl(ctx, fence))
	return errors.Join(errs...)
}

// EnsureSystemObjects creates the system namespaces and priority classes that are missing. fence is
// the term of the leadership, 0 for none.
func (s *Setup) EnsureSystemObjects(ctx context.Context, fence uint64) error {
	var all []api.Object
	for _, name := range []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic,
		corev1.NamespaceNodeLease} {
		all = append(all, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	var errs []error
	for _, o := range append(all, builtin.SystemPriorityClasses()...) {
		errs = append(errs, s.ensureObject(ctx, fence, o))
	}
	return errors.Join(errs...)
}

// servedKindOf returns the served kind of a Go object; nil if its kind is not served.
func (s *Setup) servedKindOf(o api.Object) (*api.Kind, error) {
	gvks, _, err := s.config.Scheme.ObjectKinds(o)
	if err != nil {
		return nil, err
	}
	for _, gvk := range gvks {
		if k := s.config.Kinds.ByGVK(gvk); k != nil {
			return k, nil
		}
	}
	return nil, nil
}

// ensureObject creates an object if it does not exist. It does nothing if the kind is not served.
func (s *Setup) ensureObject(ctx context.Context, fence uint64, o api.Object) error {
	kind, err := s.servedKindOf(o)
	if kind == nil || err != nil {
		return err
	}
	if _, ok := s.config.Cluster.Get(ctx, kind.Resource, o.GetNamespace(), o.GetName()); ok {
		return nil
	}
	if err := s.writeObject(ctx, fence, api.VerbCreate, o); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}

// writeObject creates, updates or deletes o as the user of the API server itself. fence is the term
// of the leadership, 0 for none. A deletion has o's UID as a precondition.
func (s *Setup) writeObject(ctx context.Context, fence uint64, verb api.Verb, o api.Object) error {
	kind, err := s.servedKindOf(o)
	if err != nil {
		return err
	}
	r := &api.Request{User: api.APIServerUser(), Verb: verb, Kind: kind, Namespace: o.GetNamespace(),
		Name: o.GetName(), Internal: api.InternalOptions{Fence: fence}}
	if verb == api.VerbDelete {
		uid := o.GetUID()
		r.Delete.Preconditions = &metav1.Preconditions{UID: &uid}
	} else {
		r.Object = o
	}
	if _, err := s.config.Backend.Do(ctx, r); err != nil {
		return fmt.Errorf("%s of %s %s: %w", verb, kind.GVK.Kind,
			types.NamespacedName{Namespace: o.GetNamespace(), Name: o.GetName()}, err)
	}
	return nil
}
