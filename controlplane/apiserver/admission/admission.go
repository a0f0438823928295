// Package admission is stages 3 and 5 of the pipeline: plugins that may change
// an object, then plugins that may only refuse it. Each plugin is a function of
// the request, the object and what stands in the cluster; they hold no state.
package admission

import (
	"context"
	"errors"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Plugin judges one write. old is nil on create, obj is nil on delete; a mutating
// plugin may change obj. Errors are *apierrors.StatusError.
type Plugin struct {
	Name  string
	Admit func(ctx context.Context, r *api.Request, obj, old api.Object) error
}

// Cluster is what plugins may look at: this replica's cache, asking the store
// where the cache has not got the object.
type Cluster interface {
	// Get returns a shared object; ok is false when there is none.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// List returns the shared objects of a namespace ("" = all): those of now when fresh, else those of the cache.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// Config is what the plugins are made of.
type Config struct {
	Cluster     Cluster
	ServiceCIDR netip.Prefix
	NodePorts   [2]int
	// LostNodeToleration is how long pods that say nothing about it tolerate that their node is lost or not ready.
	LostNodeToleration time.Duration
	Clock              func() time.Time
	// Authorized says whether the request's user may do something else as well.
	Authorized func(ctx context.Context, u api.User, verb api.Verb, resource, subresource, namespace, name string) bool
	// AllocateIP and AllocatePort pick free values for the object in admission (registry.AllocateClusterIP, AllocateNodePort).
	AllocateIP   func(ctx context.Context, cidr netip.Prefix) (netip.Addr, error)
	AllocatePort func(ctx context.Context, low, high int, protocols ...string) (int32, error)
	// Bind binds a pod to a node, or says why it cannot be.
	Bind func(r *api.Request, pod *corev1.Pod, old *corev1.Pod, node string) error
	// NodeOf says whose agent a user is.
	NodeOf func(u api.User) (string, bool)
	// PodSecurity holds pods to the standards of their namespaces.
	PodSecurity func(ctx context.Context, r *api.Request, obj, old api.Object) error
	// Escalation guards the RBAC kinds.
	Escalation func(ctx context.Context, r *api.Request, obj, old api.Object) error
}

// Mutating lists the plugins of stage 3 in their order.
func Mutating(c Config) []Plugin {
	return []Plugin{
		{"Defaulting", defaulting},
		{"NamespaceLifecycle", namespaceLifecycle(c.Cluster)},
		{"ServiceAccount", serviceAccount(c.Cluster)},
		{"DefaultTolerationSeconds", defaultTolerationSeconds(c.LostNodeToleration)},
		{"Priority", priority(c.Cluster)},
		{"DefaultStorageClass", defaultStorageClass(c.Cluster)},
		{"ServiceAllocation", serviceAllocation(c)},
		{"BindByWrite", bindByWrite(c)},
	}
}

// Validating lists the plugins of stage 5.
func Validating(c Config) []Plugin {
	return []Plugin{
		{"MirrorPods", mirrorPods(c.Cluster)},
		{"NodeRestriction", nodeRestriction(c)},
		{"PersistentVolumeClaimResize", claimGrowth(c.Cluster)},
		{"ClusterRecords", clusterRecords},
		{"PodSecurity", c.PodSecurity},
		{"RBACEscalation", c.Escalation},
	}
}

// defaulting fills in what the user left out.
func defaulting(_ context.Context, r *api.Request, obj, _ api.Object) error {
	if r.Subresource != "" {
		return nil // a facet leaves the rest as it is stored, which has its defaults
	}
	if obj != nil && r.Kind.Default != nil {
		r.Kind.Default(obj)
	}
	return nil
}

// is says whether a request is about a resource of the core group.
func is(r *api.Request, resource string) bool {
	return r.Kind.GVK.Group == "" && r.Kind.Resource == resource
}

// creates says whether a request creates such an object (not a subresource of it).
func creates(r *api.Request, obj, old api.Object) bool {
	return obj != nil && old == nil && r.Subresource == ""
}

// forbid is a plugin's refusal.
func forbid(r *api.Request, obj api.Object, why error) *apierrors.StatusError {
	name := r.Name
	if name == "" && obj != nil {
		if name = obj.GetName(); name == "" {
			name = obj.GetGenerateName()
		}
	}
	return apierrors.NewForbidden(r.Kind.GroupResource(), name, why)
}

// notFound is Kubernetes' error for a missing object of the core group.
func notFound(resource, name string) *apierrors.StatusError {
	return apierrors.NewNotFound(schema.GroupResource{Resource: resource}, name)
}

func asStatus(err error) *apierrors.StatusError {
	var s *apierrors.StatusError
	if errors.As(err, &s) {
		return s
	}
	return apierrors.NewInternalError(err)
}
