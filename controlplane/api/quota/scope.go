package quota

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// isInScopes reports whether a quota applies to an object, according to its scopes. Scopes select
// pods only, except VolumeAttributesClass, which selects claims. A quota with scopes does not apply
// to other objects.
func isInScopes(spec *corev1.ResourceQuotaSpec, gr schema.GroupResource, object api.Object) bool {
	for _, name := range spec.Scopes {
		if !isInScope(gr, object, &corev1.ScopedResourceSelectorRequirement{ScopeName: name,
			Operator: corev1.ScopeSelectorOpExists}) {
			return false
		}
	}
	if spec.ScopeSelector == nil {
		return true
	}
	for i := range spec.ScopeSelector.MatchExpressions {
		if !isInScope(gr, object, &spec.ScopeSelector.MatchExpressions[i]) {
			return false
		}
	}
	return true
}

func isInScope(gr schema.GroupResource, o api.Object, r *corev1.ScopedResourceSelectorRequirement) bool {
	switch o := o.(type) {
	case *corev1.Pod:
		return gr == Pods && isPodInScope(o, r)
	case *corev1.PersistentVolumeClaim:
		return gr == Claims && r.ScopeName == corev1.ResourceQuotaScopeVolumeAttributesClass &&
			meetsRequirement(r, api.VolumeAttributesClasses(o))
	}
	return false
}

func isPodInScope(pod *corev1.Pod, r *corev1.ScopedResourceSelectorRequirement) bool {
	switch r.ScopeName {
	case corev1.ResourceQuotaScopeTerminating:
		return hasDeadline(pod)
	case corev1.ResourceQuotaScopeNotTerminating:
		return !hasDeadline(pod)
	case corev1.ResourceQuotaScopeBestEffort:
		return podspec.QOSClass(&pod.Spec) == corev1.PodQOSBestEffort
	case corev1.ResourceQuotaScopeNotBestEffort:
		return podspec.QOSClass(&pod.Spec) != corev1.PodQOSBestEffort
	case corev1.ResourceQuotaScopePriorityClass:
		if pod.Spec.PriorityClassName == "" {
			return meetsRequirement(r, nil)
		}
		return meetsRequirement(r, []string{pod.Spec.PriorityClassName})
	case corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		return hasCrossNamespaceAffinity(pod.Spec.Affinity)
	}
	return false
}

// meetsRequirement reports whether an object meets a requirement of a quota's scope. values are the
// object's values for that scope. For In, one of them must be in requirement.Values. For NotIn, one
// of them must not be in requirement.Values, or values must be empty.
func meetsRequirement(requirement *corev1.ScopedResourceSelectorRequirement, values []string) bool {
	switch requirement.Operator {
	case corev1.ScopeSelectorOpExists:
		return len(values) > 0
	case corev1.ScopeSelectorOpDoesNotExist:
		return len(values) == 0
	case corev1.ScopeSelectorOpIn:
		return slices.ContainsFunc(values, func(v string) bool { return slices.Contains(requirement.Values, v) })
	case corev1.ScopeSelectorOpNotIn:
		return len(values) == 0 || slices.ContainsFunc(values, func(v string) bool {
			return !slices.Contains(requirement.Values, v)
		})
	}
	return false
}

func hasDeadline(pod *corev1.Pod) bool {
	return pod.Spec.ActiveDeadlineSeconds != nil && *pod.Spec.ActiveDeadlineSeconds >= 0
}

// hasCrossNamespaceAffinity reports whether an affinity term selects pods of other namespaces.
func hasCrossNamespaceAffinity(a *corev1.Affinity) bool {
	elsewhere := func(t corev1.PodAffinityTerm) bool { return len(t.Namespaces) > 0 || t.NamespaceSelector != nil }
	weighted := func(t corev1.WeightedPodAffinityTerm) bool { return elsewhere(t.PodAffinityTerm) }
	if a == nil {
		return false
	}
	if p := a.PodAffinity; p != nil &&
		(slices.ContainsFunc(p.RequiredDuringSchedulingIgnoredDuringExecution, elsewhere) ||
			slices.ContainsFunc(p.PreferredDuringSchedulingIgnoredDuringExecution, weighted)) {
		return true
	}
	p := a.PodAntiAffinity
	return p != nil && (slices.ContainsFunc(p.RequiredDuringSchedulingIgnoredDuringExecution, elsewhere) ||
		slices.ContainsFunc(p.PreferredDuringSchedulingIgnoredDuringExecution, weighted))
}
