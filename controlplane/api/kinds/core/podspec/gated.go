package podspec

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// narrowPlacement validates a change of the placement of a pod with scheduling gates: its
// constraints may only become stricter. It then copies the validated fields from was to now, so
// that a comparison of the specs ignores them.
func narrowPlacement(now, was *corev1.PodSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	for key, value := range was.NodeSelector {
		if now.NodeSelector[key] != value {
			errs = append(errs, field.Invalid(spec.Child("nodeSelector"), now.NodeSelector,
				"only additions to spec.nodeSelector are allowed (no mutations or deletions)"))
			break
		}
	}
	now.NodeSelector = was.NodeSelector
	errs = append(errs, narrowNodeAffinity(nodeAffinity(now), nodeAffinity(was),
		spec.Child("affinity", "nodeAffinity"))...)
	if now.Affinity != nil {
		now.Affinity.NodeAffinity = nil
	}
	if was.Affinity != nil && was.Affinity.NodeAffinity != nil {
		if now.Affinity == nil {
			now.Affinity = &corev1.Affinity{}
		}
		now.Affinity.NodeAffinity = was.Affinity.NodeAffinity
	}
	if now.Affinity != nil && was.Affinity == nil && *now.Affinity == (corev1.Affinity{}) {
		now.Affinity = nil
	}
	return errs
}

func nodeAffinity(s *corev1.PodSpec) *corev1.NodeAffinity {
	if s.Affinity == nil || s.Affinity.NodeAffinity == nil {
		return &corev1.NodeAffinity{}
	}
	return s.Affinity.NodeAffinity
}

// narrowNodeAffinity returns an error unless the required terms have only gained requirements.
// Preferred terms may change freely.
func narrowNodeAffinity(now, was *corev1.NodeAffinity, at *field.Path) field.ErrorList {
	if was.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil // any required term is stricter than none
	}
	at = at.Child("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
	var terms []corev1.NodeSelectorTerm
	if r := now.RequiredDuringSchedulingIgnoredDuringExecution; r != nil {
		terms = r.NodeSelectorTerms
	}
	before := was.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if len(before) == 0 {
		return nil
	}
	if len(terms) != len(before) {
		return field.ErrorList{field.Invalid(at, terms,
			"no additions/deletions to non-empty NodeSelectorTerms list are allowed")}
	}
	var errs field.ErrorList
	for i := range terms {
		if !narrowerTerm(terms[i], before[i]) {
			errs = append(errs, field.Invalid(at.Index(i), terms[i], "only additions are allowed (no mutations or deletions)"))
		}
	}
	return errs
}

// narrowerTerm reports whether a term equals was, or has further requirements at the end. An empty
// term matches no node, so an added requirement would make it less strict.
func narrowerTerm(now, was corev1.NodeSelectorTerm) bool {
	if len(was.MatchExpressions) == 0 && len(was.MatchFields) == 0 {
		return len(now.MatchExpressions) == 0 && len(now.MatchFields) == 0
	}
	return begins(now.MatchExpressions, was.MatchExpressions) && begins(now.MatchFields, was.MatchFields)
}

func begins(now, was []corev1.NodeSelectorRequirement) bool {
	return len(now) >= len(was) && (len(was) == 0 || fieldrules.SemanticEqual(now[:len(was)], was))
}
