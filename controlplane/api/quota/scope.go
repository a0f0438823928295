package quota

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
)

// inScopes reports whether an object is in the scopes of a quota. Scopes select pods only, except
// VolumeAttributesClass, which selects claims. A quota with scopes does not apply to other objects.
func inScopes(s *corev1.ResourceQuotaSpec, of schema.GroupResource, o api.Object) bool {
	for _, name := range s.Scopes {
		if !inScope(of, o, &corev1.ScopedResourceSelectorRequirement{ScopeName: name, Operator: corev1.ScopeSelectorOpExists}) {
			return false
		}
	}
	if s.ScopeSelector == nil {
		return true
	}
	for i := range s.ScopeSelector.MatchExpressions {
		if !inScope(of, o, &s.ScopeSelector.MatchExpressions[i]) {
			return false
		}
	}
	return true
}

func inScope(of schema.GroupResource, o api.Object, r *corev1.ScopedResourceSelectorRequirement) bool {
	switch o := o.(type) {
	case *corev1.Pod:
		return of == Pods && podInScope(o, r)
	case *corev1.PersistentVolumeClaim:
		return of == Claims && r.ScopeName == corev1.ResourceQuotaScopeVolumeAttributesClass && selects(r, api.AttributesClasses(o))
	}
	return false
}

func podInScope(pod *corev1.Pod, r *corev1.ScopedResourceSelectorRequirement) bool {
	switch r.ScopeName {
	case corev1.ResourceQuotaScopeTerminating:
		return terminating(pod)
	case corev1.ResourceQuotaScopeNotTerminating:
		return !terminating(pod)
	case corev1.ResourceQuotaScopeBestEffort:
		return podspec.QOSClass(&pod.Spec) == corev1.PodQOSBestEffort
	case corev1.ResourceQuotaScopeNotBestEffort:
		return podspec.QOSClass(&pod.Spec) != corev1.PodQOSBestEffort
	case corev1.ResourceQuotaScopePriorityClass:
		if pod.Spec.PriorityClassName == "" {
			return selects(r, nil)
		}
		return selects(r, []string{pod.Spec.PriorityClassName})
	case corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		return looksElsewhere(pod.Spec.Affinity)
	}
	return false
}

// selects reports whether the values of an object meet a requirement: one of them has to match.
func selects(r *corev1.ScopedResourceSelectorRequirement, have []string) bool {
	switch r.Operator {
	case corev1.ScopeSelectorOpExists:
		return len(have) > 0
	case corev1.ScopeSelectorOpDoesNotExist:
		return len(have) == 0
	case corev1.ScopeSelectorOpIn:
		return slices.ContainsFunc(have, func(v string) bool { return slices.Contains(r.Values, v) })
	case corev1.ScopeSelectorOpNotIn:
		return len(have) == 0 || slices.ContainsFunc(have, func(v string) bool { return !slices.Contains(r.Values, v) })
	}
	return false
}

func terminating(pod *corev1.Pod) bool {
	return pod.Spec.ActiveDeadlineSeconds != nil && *pod.Spec.ActiveDeadlineSeconds >= 0
}

// looksElsewhere reports whether an affinity term selects pods of other namespaces.
func looksElsewhere(a *corev1.Affinity) bool {
	elsewhere := func(t corev1.PodAffinityTerm) bool { return len(t.Namespaces) > 0 || t.NamespaceSelector != nil }
	weighted := func(t corev1.WeightedPodAffinityTerm) bool { return elsewhere(t.PodAffinityTerm) }
	if a == nil {
		return false
	}
	if p := a.PodAffinity; p != nil && (slices.ContainsFunc(p.RequiredDuringSchedulingIgnoredDuringExecution, elsewhere) ||
		slices.ContainsFunc(p.PreferredDuringSchedulingIgnoredDuringExecution, weighted)) {
		return true
	}
	p := a.PodAntiAffinity
	return p != nil && (slices.ContainsFunc(p.RequiredDuringSchedulingIgnoredDuringExecution, elsewhere) ||
		slices.ContainsFunc(p.PreferredDuringSchedulingIgnoredDuringExecution, weighted))
}
