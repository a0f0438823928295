package podspec

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// validateGatedPlacement validates a change of the placement of a pod with scheduling gates: its
// constraints may only become stricter. It then copies the validated fields from old to updated, so
// that a later comparison of the specs ignores them.
func validateGatedPlacement(updated, old *corev1.PodSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for key, value := range old.NodeSelector {
		if updated.NodeSelector[key] != value {
			errs = append(errs, field.Invalid(fldPath.Child("nodeSelector"), updated.NodeSelector,
				"only additions to spec.nodeSelector are allowed (no mutations or deletions)"))
			break
		}
	}
	updated.NodeSelector = old.NodeSelector
	errs = append(errs, validateNarrowerAffinity(nodeAffinity(updated), nodeAffinity(old),
		fldPath.Child("affinity", "nodeAffinity"))...)
	if updated.Affinity != nil {
		updated.Affinity.NodeAffinity = nil
	}
	if old.Affinity != nil && old.Affinity.NodeAffinity != nil {
		if updated.Affinity == nil {
			updated.Affinity = &corev1.Affinity{}
		}
		updated.Affinity.NodeAffinity = old.Affinity.NodeAffinity
	}
	if updated.Affinity != nil && old.Affinity == nil && *updated.Affinity == (corev1.Affinity{}) {
		updated.Affinity = nil
	}
	return errs
}

func nodeAffinity(s *corev1.PodSpec) *corev1.NodeAffinity {
	if s.Affinity == nil || s.Affinity.NodeAffinity == nil {
		return &corev1.NodeAffinity{}
	}
	return s.Affinity.NodeAffinity
}

// validateNarrowerAffinity returns an error unless the required terms are unchanged or have
// additional requirements. Preferred terms may change freely.
func validateNarrowerAffinity(updated, old *corev1.NodeAffinity, fldPath *field.Path) field.ErrorList {
	if old.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil // required terms are stricter than no terms
	}
	fldPath = fldPath.Child("requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
	var terms []corev1.NodeSelectorTerm
	if r := updated.RequiredDuringSchedulingIgnoredDuringExecution; r != nil {
		terms = r.NodeSelectorTerms
	}
	before := old.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if len(before) == 0 {
		return nil
	}
	if len(terms) != len(before) {
		return field.ErrorList{field.Invalid(fldPath, terms,
			"no additions/deletions to non-empty NodeSelectorTerms list are allowed")}
	}
	var errs field.ErrorList
	for i := range terms {
		if !isNarrowerTerm(terms[i], before[i]) {
			errs = append(errs, field.Invalid(fldPath.Index(i), terms[i],
				"only additions are allowed (no mutations or deletions)"))
		}
	}
	return errs
}

// isNarrowerTerm reports whether a term equals old, or has additional requirements after those of
// old. An empty old term matches no node, so an additional requirement would make it less strict.
func isNarrowerTerm(updated, old corev1.NodeSelectorTerm) bool {
	if len(old.MatchExpressions) == 0 && len(old.MatchFields) == 0 {
		return len(updated.MatchExpressions) == 0 && len(updated.MatchFields) == 0
	}
	return hasPrefix(updated.MatchExpressions, old.MatchExpressions) && hasPrefix(updated.MatchFields, old.MatchFields)
}

func hasPrefix(updated, old []corev1.NodeSelectorRequirement) bool {
	return len(updated) >= len(old) && (len(old) == 0 || fieldrules.SemanticEqual(updated[:len(old)], old))
}
