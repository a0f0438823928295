// Package admission is what judges attempts: plugins that may change what is asked, then plugins that may only refuse
// it. Each is a function of the attempt and of what stands in the cluster; they hold no state. What else they want to
// be true, or written, at the commit they ask of the attempt.
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

// Attempt is what a plugin judges; the registry makes it.
type Attempt = api.Attempt

// Plugin judges one attempt. A mutating plugin may change a.Object; what nobody may set has no effect. Errors are
// *apierrors.StatusError.
type Plugin struct {
	Name  string
	Admit func(ctx context.Context, a *Attempt) error
}

// Cluster is what plugins may look at: this replica's cache, asking the store
// where the cache has not got the object.
type Cluster interface {
	// Get returns a shared object; ok is false when none exists.
	Get(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// Newest is Get of the store as it is now, for who would else refuse what an acknowledged change allows.
	Newest(ctx context.Context, resource, namespace, name string) (o api.Object, ok bool)
	// List returns the shared objects of a namespace ("" = all): those of now when fresh, else those of the cache.
	List(ctx context.Context, resource, namespace string, fresh bool) ([]api.Object, error)
}

// Config is what the plugins are made of.
type Config struct {
	Cluster Cluster
	Kinds   *api.Kinds
	// Held lists the shared objects of a namespace as the cache has them at a resourceVersion or later (registry.Held).
	Held func(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error)
	// ServiceCIDR and that of the other family, where there is one, are what the cluster was made with.
	ServiceCIDR, SecondServiceCIDR netip.Prefix
	// PodCIDRs are where pods have their addresses.
	PodCIDRs  []netip.Prefix
	NodePorts [2]int
	// ExternalIPRanges are the addresses that Services may name in spec.externalIPs; empty = all that the cluster does not
	// use itself.
	ExternalIPRanges []netip.Prefix
	// ReplicaAddresses returns every address and TCP port on which a replica of the control plane listens; nil = not known.
	ReplicaAddresses func() []netip.AddrPort
	// PodAddresses returns the judge of the addresses that nodes report for pods; nil, or a nil Index: all of them count.
	PodAddresses func() *podaddress.Index
	// AddressRefused is called when a node's report about a Pod or a Node is refused for an address; nil = it is not called.
	// The object may be shared.
	AddressRefused func(about api.Object, why error)
	// LostNodeToleration is how long pods that say nothing about it tolerate that their node is lost or not ready.
	LostNodeToleration time.Duration
	Clock              func() time.Time
	// Authorized says whether the request's user may do something else as well.
	Authorized func(ctx context.Context, u api.User, verb api.Verb, resource, subresource, namespace, name string) bool
	// Signer says whether a user has a right on a signer of certificates: to approve, sign or attest.
	Signer func(ctx context.Context, u api.User, verb, signer string) bool
	// Allowed is Authorized for any resource, and says why not.
	Allowed func(ctx context.Context, u api.User, verb string, gvr schema.GroupVersionResource, subresource, namespace, name string) (bool, string)
	// AggregatedResources returns the resources of a kind that a server in the cluster serves, with group and version and
	// without subresources; nil = none.
	AggregatedResources func(ctx context.Context, gvk schema.GroupVersionKind) []metav1.APIResource
	// Plugins are those that run on request (Choose).
	Plugins []string
	// AllocateIP and AllocatePort pick free values for the object of an attempt (registry.AllocateClusterIP, AllocateNodePort).
	AllocateIP   func(a *Attempt, cidr netip.Prefix) (netip.Addr, error)
	AllocatePort func(a *Attempt, low, high int, protocols ...string) (int32, error)
	// Bind finishes a write that binds the pod old, or says why it cannot be bound.
	Bind func(a *Attempt, old *corev1.Pod) error
	// NodeOf says whose agent a user is.
	NodeOf func(u api.User) (string, bool)
	// PodsOf returns the shared pods bound to a node, as this replica knows them.
	PodsOf func(node string) []*corev1.Pod
	// PodSecurity holds pods to the standards of their namespaces.
	PodSecurity func(ctx context.Context, a *Attempt) error
	// Definitions judges custom resource definitions, and what is made of those that end.
	Definitions func(ctx context.Context, a *Attempt) error
	// Escalation guards the RBAC kinds.
	Escalation func(ctx context.Context, a *Attempt) error
}

// Mutating lists the mutating plugins that are built in, in their order.
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

// Validating lists the validating plugins that are built in.
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
		{"NodeEventBound", bounds.admitEvents}, // the last: it counts for an hour what nobody refuses
	})}
}

// chosen leaves out what runs on request and was not asked for.
func (c Config) chosen(all []Plugin) []Plugin {
	return slices.DeleteFunc(all, func(p Plugin) bool {
		return slices.Contains(OnRequest, p.Name) && !slices.Contains(c.Plugins, p.Name)
	})
}

// forbid is a plugin's refusal.
func forbid(a *Attempt, obj api.Object, why error) *apierrors.StatusError {
	name := a.Request.Name
	if name == "" && obj != nil {
		if name = obj.GetName(); name == "" {
			name = obj.GetGenerateName()
		}
	}
	return apierrors.NewForbidden(a.Kind.GroupResource(), name, why)
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
