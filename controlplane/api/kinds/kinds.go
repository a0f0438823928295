// Package kinds is the table of the built-in kinds: for each its names, defaulting, validation,
// printer columns, field selectors and subresources. Everything here is a pure function of its
// arguments. Error texts and columns are those of Kubernetes, so that Kubernetes clients show the
// same output.
package kinds

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	answers "keelson.dev/keelson/controlplane/api/fields"
	"keelson.dev/keelson/controlplane/api/kinds/admissionregistration"
	"keelson.dev/keelson/controlplane/api/kinds/apiextensions"
	"keelson.dev/keelson/controlplane/api/kinds/apiregistration"
	"keelson.dev/keelson/controlplane/api/kinds/apps"
	"keelson.dev/keelson/controlplane/api/kinds/authentication"
	"keelson.dev/keelson/controlplane/api/kinds/authorization"
	"keelson.dev/keelson/controlplane/api/kinds/certificates"
	"keelson.dev/keelson/controlplane/api/kinds/coordination"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/discovery"
	"keelson.dev/keelson/controlplane/api/kinds/events"
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
	"keelson.dev/keelson/controlplane/api/kinds/flowcontrol"
	"keelson.dev/keelson/controlplane/api/kinds/metrics"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/api/kinds/node"
	"keelson.dev/keelson/controlplane/api/kinds/policy"
	"keelson.dev/keelson/controlplane/api/kinds/rbac"
	"keelson.dev/keelson/controlplane/api/kinds/resource"
	"keelson.dev/keelson/controlplane/api/kinds/scheduling"
	"keelson.dev/keelson/controlplane/api/kinds/storage"
)

// All returns the table of every built-in kind. The options apply to all of them.
func All(with ...Option) *api.Kinds {
	o := &expressions.Options{}
	for _, set := range with {
		set(o)
	}
	coreEvents := core.EventKind()
	return api.NewKinds(stored(answered(slices.Concat([]*api.Kind{
		core.NamespaceKind(), core.NodeKind(), podspec.PodKind(), core.ServiceKind(), core.EndpointsKind(),
		core.ConfigMapKind(), core.SecretKind(), core.ServiceAccountKind(), coreEvents, events.NewEventKind(coreEvents),
		core.PersistentVolumeKind(), core.PersistentVolumeClaimKind(),
		apps.DeploymentKind(), apps.ReplicaSetKind(),
		discovery.EndpointSliceKind(), coordination.LeaseKind(),
		networking.IngressKind(), networking.IngressClassKind(), networking.NetworkPolicyKind(), networking.ServiceCIDRKind(), networking.IPAddressKind(), node.RuntimeClassKind(),
		storage.StorageClassKind(), storage.CSIDriverKind(), storage.CSINodeKind(), storage.VolumeAttachmentKind(),
		storage.CSIStorageCapacityKind(), storage.VolumeAttributesClassKind(),
		admissionregistration.ValidatingWebhookKind(o), admissionregistration.MutatingWebhookKind(o), admissionregistration.ValidatingPolicyKind(o), admissionregistration.ValidatingPolicyBindingKind(),
		admissionregistration.MutatingPolicyKind(o), admissionregistration.MutatingPolicyBindingKind(),
		certificates.CertificateSigningRequestKind(), certificates.ClusterTrustBundleKind(),
		flowcontrol.FlowSchemaKind(), flowcontrol.PriorityLevelKind(),
		resource.DeviceClassKind(o), resource.ResourceClaimKind(o), resource.ResourceClaimTemplateKind(o), resource.ResourceSliceKind(),
		scheduling.PriorityClassKind(), scheduling.WorkloadKind(), scheduling.PodGroupKind(), policy.PodDisruptionBudgetKind(),
		rbac.RoleKind(), rbac.ClusterRoleKind(), rbac.RoleBindingKind(), rbac.ClusterRoleBindingKind(), apiregistration.APIServiceKind(),
		apiextensions.CustomResourceDefinitionKind(),
		authentication.TokenReviewKind(), authentication.SelfSubjectReviewKind(),
		authorization.SubjectAccessReviewKind(), authorization.SelfSubjectAccessReviewKind(),
		authorization.LocalSubjectAccessReviewKind(), authorization.SelfSubjectRulesReviewKind(),
		core.ComponentStatusKind(), core.BindingKind(), metrics.NodeMetricsKind(), metrics.PodMetricsKind(),
	}, workloads())...)...)...)
}

// stored sets the hub version of each kind that needs no conversion. It must be called when the
// kinds are complete.
func stored(all ...*api.Kind) []*api.Kind {
	for _, k := range all {
		if k.Storage != nil && k.Conversion == nil {
			k.Storage.Hub = api.Version{GVK: k.GVK, New: k.New, Shallow: k.Ops.Shallow, Default: k.Default, Light: k.Storage.Hub.Light}
		}
	}
	return all
}

// answered sets how the fields of each kind and of its subresource bodies are treated
// (Kind.Answers). It also sets the kind's deprecation warning and its warning functions.
func answered(all ...*api.Kind) []*api.Kind {
	table := answers.Load()
	for _, k := range all {
		k.Answers = table.For(k.New())
		k.Deprecated = deprecation(k)
		k.Warnings, k.CreateWarnings = ObjectWarnings, NewObjectWarnings
		for _, s := range k.Subresources {
			if s.New != nil {
				s.Answers = table.For(s.New())
			}
		}
	}
	return all
}

// KubernetesMinor is the version of Kubernetes, 1.KubernetesMinor, that these kinds correspond to.
const KubernetesMinor = 37

// deprecation returns Kubernetes' warning for a deprecated kind; "" if the kind is not deprecated.
func deprecation(k *api.Kind) string {
	old, ok := k.New().(interface{ APILifecycleDeprecated() (major, minor int) })
	if !ok {
		return ""
	}
	major, minor := old.APILifecycleDeprecated()
	if major > 1 || minor > KubernetesMinor {
		return "" // deprecated only in a later version
	}
	text := fmt.Sprintf("%s %s is deprecated in v%d.%d+", k.GVK.GroupVersion(), k.GVK.Kind, major, minor)
	if r, ok := old.(interface {
		APILifecycleReplacement() schema.GroupVersionKind
	}); ok {
		by := r.APILifecycleReplacement()
		text += fmt.Sprintf("; use %s %s", by.GroupVersion(), by.Kind)
	}
	return text
}
