// Package builtin contains the built-in admission plugins and their order.
package builtin

import (
	"context"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/noderestriction"
	"keelson.dev/keelson/controlplane/apiserver/admission/objectlimits"
	"keelson.dev/keelson/controlplane/apiserver/admission/services"
)

// Config contains the dependencies and settings of the plugins.
type Config struct {
	Cluster admission.Cluster
	Kinds   *api.Kinds
	// ListHeld lists the objects of a namespace from a cache that has reached resourceVersion
	// (watchcache.Reader.Held). The caller must not change the objects.
	ListHeld func(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error)
	Clock    func() time.Time
	// LostNodeToleration is the tolerationSeconds for the taints not-ready and unreachable of pods
	// that do not tolerate these taints themselves.
	LostNodeToleration time.Duration
	// Plugins lists the enabled optional plugins (see Choose).
	Plugins []string
	Access  Access

	Services services.Config
	Nodes    noderestriction.Config
	Limits   objectlimits.Config

	// Bind adds everything to a write that binding the unbound pod old to a node requires. It
	// returns an error if the pod cannot be bound.
	Bind func(a *admission.Attempt, old *corev1.Pod) error
	// RequireNodeFeatures returns an error, which names feature, while the feature level of the
	// cluster is too low for pods that require features of their node. nil means that the level is
	// never too low.
	RequireNodeFeatures func(ctx context.Context, feature string) error
	// PodSecurity enforces the Pod Security Standards of namespaces.
	PodSecurity func(ctx context.Context, a *admission.Attempt) error
	// Definitions validates CustomResourceDefinitions. It rejects the creation of a custom resource
	// if its definition is being deleted.
	Definitions func(ctx context.Context, a *admission.Attempt) error
	// Escalation prevents privilege escalation by writes of RBAC objects.
	Escalation func(ctx context.Context, a *admission.Attempt) error
}

// Access contains the authorization checks of plugins.
type Access struct {
	// Authorized reports whether the user u may also perform another request, which the further
	// parameters describe.
	Authorized func(ctx context.Context, u api.User, verb api.Verb, resource, subresource, namespace, name string) bool
	// Signer reports whether a user has the verb approve, sign or attest on a certificate signer.
	Signer func(ctx context.Context, u api.User, verb, signer string) bool
	// Allowed reports whether the user may perform the verb on a resource, which need not be served
	// by this server. If not, it also returns the reason.
	Allowed func(ctx context.Context, u api.User, verb string, gvr schema.GroupVersionResource,
		subresource, namespace, name string) (bool, string)
	// AggregatedResources returns the resources with which aggregated API servers serve a kind,
	// with group and version and without subresources; nil if no such server serves the kind.
	AggregatedResources func(ctx context.Context, gvk schema.GroupVersionKind) []metav1.APIResource
}

// Mutating returns the phase of the built-in mutating plugins, in their order.
func Mutating(c Config) admission.Phase {
	var namespaces *api.Kind
	if c.Kinds != nil {
		namespaces = c.Kinds.ByType(&corev1.Namespace{})
	}
	return admission.Phase{Name: "built-in", Plugins: c.enabledPlugins([]admission.Plugin{
		{Name: "NamespaceLifecycle", Admit: namespaceLifecycle(c.Cluster, namespaces)},
		{Name: "LimitRanger", Admit: newLimitRanger(c).setDefaultResources},
		{Name: "ServiceAccount", Admit: serviceAccount(c.Cluster)},
		{Name: "TaintNodesByCondition", Admit: taintNewNode},
		{Name: "DefaultTolerationSeconds", Admit: defaultTolerationSeconds(c.LostNodeToleration)},
		{Name: "Priority", Admit: podPriority(c.Cluster)},
		{Name: PodTolerationRestriction, Admit: podTolerations(c.Cluster)},
		{Name: ExtendedResourceToleration, Admit: extendedResourceToleration},
		{Name: "DefaultStorageClass", Admit: defaultStorageClass(c.Cluster)},
		{Name: "StorageObjectInUseProtection", Admit: storageObjectInUse},
		{Name: "PodGroupProtection", Admit: podGroupProtection},
		{Name: "RuntimeClass", Admit: runtimeClass(c.Cluster)},
		{Name: "DefaultIngressClass", Admit: defaultIngressClass(c.Cluster)},
		{Name: "ServiceAllocation", Admit: services.AllocateAddresses(c.Services)},
		{Name: "BindByWrite", Admit: bindByWrite(c)},
		{Name: "CertificateRequester", Admit: certificateRequester(c.Clock)},
		{Name: "DeviceTaintTimes", Admit: deviceTaintTimes(c.Clock)},
		{Name: "ResourceQuota", Admit: newQuotaPlugin(c).clearStatusOnScopeChange},
	})}
}

// Validating returns the phase of the built-in validating plugins, in their order.
func Validating(c Config) admission.Phase {
	bounds := objectlimits.NewNodeBounds(c.Limits)
	return admission.Phase{Name: "built-in", Plugins: c.enabledPlugins([]admission.Plugin{
		{Name: "LimitRanger", Admit: newLimitRanger(c).enforceLimits},
		{Name: "MirrorPods", Admit: noderestriction.CheckMirrorPods(c.Cluster)},
		{Name: "NodeRestriction", Admit: noderestriction.Restrict(c.Nodes)},
		{Name: "NodeBounds", Admit: bounds.CheckWrite},
		{Name: "NodeDeclaredFeatureValidator", Admit: nodeFeatures(c)},
		{Name: "ServiceAddresses", Admit: services.ReserveAddresses(c.Services)},
		{Name: DenyServiceExternalIPs, Admit: services.DenyExternalIPs},
		{Name: "ExternalAddresses", Admit: services.CheckExternalAddresses(c.Services)},
		{Name: "LoadBalancerPools", Admit: services.CheckBalancerPools(c.Services)},
		{Name: "PersistentVolumeClaimResize", Admit: claimGrowth(c.Cluster)},
		{Name: "Priority", Admit: oneDefaultPriority(c.Cluster)},
		{Name: "PodGroupWorkloadExists", Admit: podGroupWorkloadExists(c.Cluster)},
		{Name: "RuntimeClass", Admit: runtimeOverhead(c.Cluster)},
		{Name: PodTolerationRestriction, Admit: allowedTolerations(c.Cluster)},
		{Name: OwnerReferences, Admit: ownerReferences(c)},
		{Name: "ClusterRecords", Admit: clusterRecords},
		{Name: "PodSecurity", Admit: c.PodSecurity},
		{Name: "RBACEscalation", Admit: c.Escalation},
		{Name: "PolicyParams", Admit: policyParams(c)},
		{Name: "CustomResourceDefinitions", Admit: c.Definitions},
		{Name: "CertificateSigners", Admit: signerRights(c)},
		{Name: "CertificateSubjectRestriction", Admit: certificateSubject},
		{Name: "DeviceAdmins", Admit: deviceAdmins(c.Cluster)},
		{Name: "UndecidedRequests", Admit: objectlimits.LimitUndecidedRequests(c.Cluster, objectlimits.MaxUndecided)},
		{Name: "EventBound", Admit: objectlimits.NewEventBound(c.Cluster, c.Clock).CheckCreate},
		{Name: "NodeEventBound", Admit: bounds.CheckEvent}, // must be last: it counts admitted events for an hour
	})}
}

// enabledPlugins removes the optional plugins that c.Plugins does not enable.
func (c Config) enabledPlugins(plugins []admission.Plugin) []admission.Plugin {
	return slices.DeleteFunc(plugins, func(p admission.Plugin) bool {
		return slices.Contains(OnRequest, p.Name) && !slices.Contains(c.Plugins, p.Name)
	})
}
