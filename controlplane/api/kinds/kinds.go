// Package kinds is the table of the built-in kinds: for each its names,
// defaulting, validation, printing columns, field selectors and subresources.
// Everything here is a pure function of its arguments; the wording of errors and
// the columns are those of Kubernetes, so that its clients show the same thing.
package kinds

import (
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	answers "keelson.dev/keelson/controlplane/api/fields"
	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
)

// All returns the table of every built-in kind.
func All(with ...Option) *api.Kinds {
	o := &expressions.Options{}
	for _, set := range with {
		set(o)
	}
	coreEvents := core.EventKind()
	return api.NewKinds(stored(answered(slices.Concat([]*api.Kind{
		core.NamespaceKind(), core.NodeKind(), podspec.PodKind(), core.ServiceKind(), core.EndpointsKind(),
		core.ConfigMapKind(), core.SecretKind(), core.ServiceAccountKind(), coreEvents, newEventKind(coreEvents),
		core.PersistentVolumeKind(), core.PersistentVolumeClaimKind(),
		deploymentKind(), replicaSetKind(),
		endpointSliceKind(), leaseKind(),
		ingressKind(), ingressClassKind(), networkPolicyKind(), serviceCIDRKind(), ipAddressKind(), runtimeClassKind(),
		storageClassKind(), csiDriverKind(), csiNodeKind(), volumeAttachmentKind(),
		csiStorageCapacityKind(), volumeAttributesClassKind(),
		validatingWebhookKind(o), mutatingWebhookKind(o), validatingPolicyKind(o), validatingPolicyBindingKind(),
		mutatingPolicyKind(o), mutatingPolicyBindingKind(),
		certificateSigningRequestKind(), clusterTrustBundleKind(),
		flowSchemaKind(), priorityLevelKind(),
		deviceClassKind(o), resourceClaimKind(o), resourceClaimTemplateKind(o), resourceSliceKind(),
		priorityClassKind(), workloadKind(), podGroupKind(), podDisruptionBudgetKind(),
		roleKind(), clusterRoleKind(), roleBindingKind(), clusterRoleBindingKind(), apiServiceKind(),
		customResourceDefinitionKind(),
		tokenReviewKind(), selfSubjectReviewKind(),
		subjectAccessReviewKind(), selfSubjectAccessReviewKind(),
		localSubjectAccessReviewKind(), selfSubjectRulesReviewKind(),
		core.ComponentStatusKind(), core.BindingKind(), nodeMetricsKind(), podMetricsKind(),
	}, workloads())...)...)...)
}

// stored completes the storages of the kinds that are stored as they are: with what was added to a kind after New.
func stored(all ...*api.Kind) []*api.Kind {
	for _, k := range all {
		if k.Storage != nil && k.Conversion == nil {
			k.Storage.Hub = api.Version{GVK: k.GVK, New: k.New, Shallow: k.Ops.Shallow, Default: k.Default, Light: k.Storage.Hub.Light}
		}
	}
	return all
}

// answered gives each kind the answers of all its fields, and of those of the bodies of its subresources.
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

// KubernetesMinor is the version of Kubernetes, 1.KubernetesMinor, whose kinds these are.
const KubernetesMinor = 37

// deprecation is what Kubernetes warns of who asks for a kind that it means to give up; "" = nothing.
func deprecation(k *api.Kind) string {
	old, ok := k.New().(interface{ APILifecycleDeprecated() (major, minor int) })
	if !ok {
		return ""
	}
	major, minor := old.APILifecycleDeprecated()
	if major > 1 || minor > KubernetesMinor {
		return "" // not yet
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
