// Package admission contains the built-in admission plugins: mutating plugins, which may change the
// object of a request, and validating plugins, which may only reject the request. Plugins are
// functions of the attempt and of objects in the cluster. They add preconditions and further writes
// to the commit of the attempt.
package admission

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
)

// Attempt is a write or connect request under admission. The registry creates it.
type Attempt = api.Attempt

// Plugin admits or rejects an attempt. A mutating plugin may change a.Object; changes of fields
// that no client may set have no effect. Errors are *apierrors.StatusError.
type Plugin struct {
	Name  string
	Admit func(ctx context.Context, a *Attempt) error
}

// Cluster reads the objects on which plugins depend, from this replica's cache. An object that is
// not cached is read from the store.
type Cluster interface {
	// Get returns a shared object; ok is false when it does not exist.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// Newest is like Get, but always reads the store. Plugins use it before they reject a request
	// because of an object that may have changed recently.
	Newest(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// List returns the shared objects of a namespace ("" = all), from the store if fresh is set and
	// otherwise from the cache.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// Config contains the dependencies and settings of the plugins.
type Config struct {
	Cluster Cluster
	Kinds   *api.Kinds
	// Held lists the shared objects of a namespace from a cache that has reached resourceVersion
	// (registry.Held).
	Held func(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error)
	// ServiceCIDR and the optional SecondServiceCIDR, of the other IP family, are the Service
	// ranges with which the cluster was created.
	ServiceCIDR, SecondServiceCIDR netip.Prefix
	// PodCIDRs are the ranges of pod addresses.
	PodCIDRs  []netip.Prefix
	NodePorts [2]int
	// ExternalIPRanges are the addresses that Services may list in spec.externalIPs. Empty means
	// all addresses that the cluster does not use itself.
	ExternalIPRanges []netip.Prefix
	// ReplicaAddresses returns each address and TCP port on which a control plane replica listens;
	// nil = unknown.
	ReplicaAddresses func() []netip.AddrPort
	// PodAddresses returns the index that checks the addresses that nodes report for pods. Without
	// the function or the index, all addresses are accepted.
	PodAddresses func() *podaddress.Index
	// AddressRefused is called when a node's report about a Pod or Node is rejected because of an
	// address; nil = no call. The object may be shared.
	AddressRefused func(about api.Object, why error)
	// LostNodeToleration is how long a pod without its own tolerations tolerates the taints
	// not-ready and unreachable.
	LostNodeToleration time.Duration
	Clock              func() time.Time
	// Authorized reports whether the user u may perform another request as well.
	Authorized func(ctx context.Context, u api.User, verb api.Verb, resource, subresource, namespace, name string) bool
	// Signer reports whether a user has the verb approve, sign or attest on a certificate signer.
	Signer func(ctx context.Context, u api.User, verb, signer string) bool
	// Allowed reports whether the user may perform the verb on any resource, and the reason if not.
	Allowed func(ctx context.Context, u api.User, verb string, gvr schema.GroupVersionResource, subresource, namespace, name string) (bool, string)
	// AggregatedResources returns the resources of a kind that an aggregated API server serves,
	// with group and version and without subresources; nil = none.
	AggregatedResources func(ctx context.Context, gvk schema.GroupVersionKind) []metav1.APIResource
	// Plugins lists the optional plugins that run (see Choose).
	Plugins []string
	// AllocateIP and AllocatePort choose free values for the object of an attempt
	// (registry.AllocateClusterIP, AllocateNodePort).
	AllocateIP   func(a *Attempt, cidr netip.Prefix) (netip.Addr, error)
	AllocatePort func(a *Attempt, low, high int, protocols ...string) (int32, error)
	// Bind completes a write that binds the pod old to a node. It returns an error if the pod
	// cannot be bound.
	Bind func(a *Attempt, old *corev1.Pod) error
	// NodeOf returns the node name of a user that is a node agent.
	NodeOf func(u api.User) (string, bool)
	// PodsOf returns the pods that are bound to a node, from this replica's cache. They are shared.
	PodsOf func(node string) []*corev1.Pod
	// PodSecurity enforces the Pod Security Standards of namespaces.
	PodSecurity func(ctx context.Context, a *Attempt) error
	// Definitions validates CustomResourceDefinitions. It rejects the creation of a custom resource
	// if its definition is being deleted.
	Definitions func(ctx context.Context, a *Attempt) error
	// Escalation prevents privilege escalation by writes of RBAC objects.
	Escalation func(ctx context.Context, a *Attempt) error
}

// Mutating returns the phase of the built-in mutating plugins, in their order.
func Mutating(c Config) Phase {
	var namespaces *api.Kind
	if c.Kinds != nil {
		namespaces = c.Kinds.ByType(&corev1.Namespace{})
	}
	return Phase{Name: "built-in", Plugins: c.chosen([]Plugin{
		{"NamespaceLifecycle", namespaceLifecycle(c.Cluster, namespaces)},
		{"LimitRanger", newLimits(c).fill},
		{"ServiceAccount", serviceAccount(c.Cluster)},
		{"TaintNodesByCondition", taintNewNode},
		{"DefaultTolerationSeconds", defaultTolerationSeconds(c.LostNodeToleration)},
		{"Priority", priority(c.Cluster)},
		{PodTolerationRestriction, podTolerations(c.Cluster)},
		{ExtendedResourceToleration, extendedResourceToleration},
		{"DefaultStorageClass", defaultStorageClass(c.Cluster)},
		{"StorageObjectInUseProtection", storageObjectInUse},
		{"PodGroupProtection", podGroupProtection},
		{"RuntimeClass", runtimeClass(c.Cluster)},
		{"DefaultIngressClass", defaultIngressClass(c.Cluster)},
		{"ServiceAllocation", serviceAllocation(c)},
		{"BindByWrite", bindByWrite(c)},
		{"CertificateRequester", certificateRequester(c.Clock)},
		{"DeviceTaintTimes", deviceTaintTimes(c.Clock)},
		{"ResourceQuota", newQuotas(c).forget},
	})}
}

// Validating returns the phase of the built-in validating plugins, in their order.
func Validating(c Config) Phase {
	bounds := newNodeBounds(c)
	return Phase{Name: "built-in", Plugins: c.chosen([]Plugin{
		{"LimitRanger", newLimits(c).hold},
		{"MirrorPods", mirrorPods(c.Cluster)},
		{"NodeRestriction", nodeRestriction(c)},
		{"NodeBounds", bounds.admit},
		{"ServiceAddresses", serviceAddresses(c)},
		{DenyServiceExternalIPs, denyExternalIPs},
		{"ExternalAddresses", externalAddresses(c)},
		{"LoadBalancerPools", balancerPools(c)},
		{"PersistentVolumeClaimResize", claimGrowth(c.Cluster)},
		{"Priority", oneDefaultPriority(c.Cluster)},
		{"PodGroupWorkloadExists", podGroupWorkloadExists(c.Cluster)},
		{"RuntimeClass", runtimeOverhead(c.Cluster)},
		{PodTolerationRestriction, allowedTolerations(c.Cluster)},
		{OwnerReferences, ownerReferences(c)},
		{"ClusterRecords", clusterRecords},
		{"PodSecurity", c.PodSecurity},
		{"RBACEscalation", c.Escalation},
		{"PolicyParams", policyParams(c)},
		{"CustomResourceDefinitions", c.Definitions},
		{"CertificateSigners", signerRights(c)},
		{"CertificateSubjectRestriction", certificateSubject},
		{"DeviceAdmins", deviceAdmins(c.Cluster)},
		{"UndecidedRequests", undecidedRequests(c.Cluster, mostUndecided)},
		{"EventBound", newEventBound(c.Cluster, c.Clock).admit},
		{"NodeEventBound", bounds.admitEvents}, // must be last: it counts admitted events for an hour
	})}
}

// chosen removes the optional plugins that c.Plugins does not enable.
func (c Config) chosen(all []Plugin) []Plugin {
	return slices.DeleteFunc(all, func(p Plugin) bool {
		return slices.Contains(OnRequest, p.Name) && !slices.Contains(c.Plugins, p.Name)
	})
}

// forbid returns the 403 error with which a plugin rejects an attempt.
func forbid(a *Attempt, obj api.Object, why error) *apierrors.StatusError {
	name := a.Request.Name
	if name == "" && obj != nil {
		if name = obj.GetName(); name == "" {
			name = obj.GetGenerateName()
		}
	}
	return apierrors.NewForbidden(a.Kind.GroupResource(), name, why)
}

// notFound returns the 404 error for a missing object of the core group.
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
