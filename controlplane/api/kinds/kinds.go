// Package kinds contains the table of the built-in kinds: for each kind its names, defaulting,
// validation, printer columns, field selectors and subresources. All functions of a kind are pure
// functions of their arguments. Error messages and columns are those of Kubernetes, so that
// Kubernetes clients print the same output.
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
func All(options ...Option) *api.Kinds {
	o := &expressions.Options{}
	for _, set := range options {
		set(o)
	}
	coreEvents := core.EventKind()
	return api.NewKinds(withHubVersions(withAnswers(slices.Concat([]*api.Kind{
		core.NamespaceKind(), core.NodeKind(), podspec.PodKind(), core.ServiceKind(), core.EndpointsKind(),
		core.ConfigMapKind(), core.SecretKind(), core.ServiceAccountKind(), coreEvents, events.NewEventKind(coreEvents),
		core.PersistentVolumeKind(), core.PersistentVolumeClaimKind(),
		apps.DeploymentKind(), apps.ReplicaSetKind(),
		discovery.EndpointSliceKind(), coordination.LeaseKind(),
		networking.IngressKind(), networking.IngressClassKind(), networking.NetworkPolicyKind(),
		networking.ServiceCIDRKind(), networking.IPAddressKind(), node.RuntimeClassKind(),
		storage.StorageClassKind(), storage.CSIDriverKind(), storage.CSINodeKind(), storage.VolumeAttachmentKind(),
		storage.CSIStorageCapacityKind(), storage.VolumeAttributesClassKind(),
		admissionregistration.ValidatingWebhookKind(o), admissionregistration.MutatingWebhookKind(o),
		admissionregistration.ValidatingPolicyKind(o), admissionregistration.ValidatingPolicyBindingKind(),
		admissionregistration.MutatingPolicyKind(o), admissionregistration.MutatingPolicyBindingKind(),
		certificates.CertificateSigningRequestKind(), certificates.ClusterTrustBundleKind(),
		flowcontrol.FlowSchemaKind(), flowcontrol.PriorityLevelKind(),
		resource.DeviceClassKind(o), resource.ResourceClaimKind(o), resource.ResourceClaimTemplateKind(o),
		resource.ResourceSliceKind(),
		scheduling.PriorityClassKind(), scheduling.WorkloadKind(), scheduling.PodGroupKind(),
		policy.PodDisruptionBudgetKind(),
		rbac.RoleKind(), rbac.ClusterRoleKind(), rbac.RoleBindingKind(), rbac.ClusterRoleBindingKind(),
		apiregistration.APIServiceKind(),
		apiextensions.CustomResourceDefinitionKind(),
		authentication.TokenReviewKind(), authentication.SelfSubjectReviewKind(),
		authorization.SubjectAccessReviewKind(), authorization.SelfSubjectAccessReviewKind(),
		authorization.LocalSubjectAccessReviewKind(), authorization.SelfSubjectRulesReviewKind(),
		core.ComponentStatusKind(), core.BindingKind(), metrics.NodeMetricsKind(), metrics.PodMetricsKind(),
	}, workloadKinds())...)...)...)
}

// withHubVersions sets the hub version of each kind that needs no conversion, and returns the
// kinds. It must be called after all other fields of the kinds are set.
func withHubVersions(kinds ...*api.Kind) []*api.Kind {
	for _, k := range kinds {
		if k.Storage != nil && k.Conversion == nil {
			k.Storage.Hub = api.Version{GVK: k.GVK, New: k.Type.New, Shallow: k.Type.Ops.Shallow,
				Default: k.Writes.Default,
				Light:   k.Storage.Hub.Light}
		}
	}
	return kinds
}

// withAnswers sets KindSchema.Answers of each kind and of its subresource bodies: how the API
// server treats each field. It also sets the kinds' deprecation warnings and warning functions, and
// returns the kinds.
func withAnswers(kinds ...*api.Kind) []*api.Kind {
	table := answers.LoadTable()
	for _, k := range kinds {
		k.Schema.Answers = table.AnswersFor(k.Type.New())
		k.Serving.Deprecated = deprecationWarning(k)
		k.Validation.Warnings, k.Validation.CreateWarnings = ObjectWarnings, NewObjectWarnings
		for _, s := range k.Subresources {
			if s.New != nil {
				s.Answers = table.AnswersFor(s.New())
			}
		}
	}
	return kinds
}

// KubernetesMinor is the version of Kubernetes, 1.KubernetesMinor, that these kinds correspond to.
const KubernetesMinor = 37

// deprecationWarning returns Kubernetes' warning for a deprecated kind. It returns "" if the kind
// is not deprecated.
func deprecationWarning(kind *api.Kind) string {
	old, ok := kind.Type.New().(interface{ APILifecycleDeprecated() (major, minor int) })
	if !ok {
		return ""
	}
	major, minor := old.APILifecycleDeprecated()
	if major > 1 || minor > KubernetesMinor {
		return "" // the kind is deprecated only in a later version
	}
	text := fmt.Sprintf("%s %s is deprecated in v%d.%d+", kind.GVK.GroupVersion(), kind.GVK.Kind, major, minor)
	if r, ok := old.(interface {
		APILifecycleReplacement() schema.GroupVersionKind
	}); ok {
		by := r.APILifecycleReplacement()
		text += fmt.Sprintf("; use %s %s", by.GroupVersion(), by.Kind)
	}
	return text
}
