package podspec

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const notPositive = "must be greater than zero"

// maxWeight is the maximum weight of a preferred term.
const maxWeight = 100

// ValidateTolerations returns the errors in a list of tolerations.
func ValidateTolerations(list []corev1.Toleration, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, t := range list {
		here := fldPath.Index(i)
		if t.Key != "" {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("key"), t.Key,
				utilvalidation.IsQualifiedName(t.Key))...)
		} else if t.Operator != corev1.TolerationOpExists {
			errs = append(errs, field.Invalid(here.Child("operator"), t.Operator,
				"operator must be Exists when `key` is empty, which means \"match all values and all keys\""))
		}
		if t.TolerationSeconds != nil && t.Effect != corev1.TaintEffectNoExecute {
			errs = append(errs, field.Invalid(here.Child("effect"), t.Effect,
				"effect must be 'NoExecute' when `tolerationSeconds` is set"))
		}
		switch t.Operator {
		case corev1.TolerationOpEqual, "":
			errs = append(errs, fieldrules.InvalidErrors(here.Child("operator"), t.Value,
				utilvalidation.IsValidLabelValue(t.Value))...)
		case corev1.TolerationOpExists:
			if t.Value != "" {
				errs = append(errs, field.Invalid(here.Child("operator"), t.Value,
					"value must be empty when `operator` is 'Exists'"))
			}
		case corev1.TolerationOpLt, corev1.TolerationOpGt:
			errs = append(errs, field.NotSupported(here.Child("operator"), t.Operator,
				[]corev1.TolerationOperator{corev1.TolerationOpEqual, corev1.TolerationOpExists, corev1.TolerationOpLt,
					corev1.TolerationOpGt}))
		default:
			errs = append(errs, field.NotSupported(here.Child("operator"), t.Operator,
				[]corev1.TolerationOperator{corev1.TolerationOpEqual, corev1.TolerationOpExists}))
		}
		if t.Effect != "" {
			errs = append(errs, fieldrules.ValidateSupported(t.Effect, here.Child("effect"),
				corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)...)
		}
	}
	return errs
}

func validateAffinity(a *corev1.Affinity, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if n := a.NodeAffinity; n != nil {
		here := fldPath.Child("nodeAffinity")
		if r := n.RequiredDuringSchedulingIgnoredDuringExecution; r != nil {
			errs = append(errs, ValidateNodeSelector(r,
				here.Child("requiredDuringSchedulingIgnoredDuringExecution"))...)
		}
		for i, p := range n.PreferredDuringSchedulingIgnoredDuringExecution {
			term := here.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i)
			errs = append(errs, validateWeight(p.Weight, term.Child("weight"))...)
			errs = append(errs, validateNodeSelectorTerm(&p.Preference, true, term.Child("preference"))...)
		}
	}
	if p := a.PodAffinity; p != nil {
		errs = append(errs, validatePodTerms(p.RequiredDuringSchedulingIgnoredDuringExecution,
			p.PreferredDuringSchedulingIgnoredDuringExecution, fldPath.Child("podAffinity"))...)
	}
	if p := a.PodAntiAffinity; p != nil {
		errs = append(errs, validatePodTerms(p.RequiredDuringSchedulingIgnoredDuringExecution,
			p.PreferredDuringSchedulingIgnoredDuringExecution, fldPath.Child("podAntiAffinity"))...)
	}
	return errs
}

func validateWeight(w int32, fldPath *field.Path) field.ErrorList {
	if w <= 0 || w > maxWeight {
		return field.ErrorList{field.Invalid(fldPath, w, "must be in the range 1-100")}
	}
	return nil
}

// ValidateNodeSelector returns the errors in a node selector.
func ValidateNodeSelector(s *corev1.NodeSelector, fldPath *field.Path) field.ErrorList {
	here := fldPath.Child("nodeSelectorTerms")
	if len(s.NodeSelectorTerms) == 0 {
		return field.ErrorList{field.Required(here, "must have at least one node selector term")}
	}
	var errs field.ErrorList
	for i := range s.NodeSelectorTerms {
		errs = append(errs, validateNodeSelectorTerm(&s.NodeSelectorTerms[i], false, here.Index(i))...)
	}
	return errs
}

// validateNodeSelectorTerm validates a node selector term. As in Kubernetes, the values of a
// preferred term are not checked, and the value of Gt and Lt need not be a number. A term with such
// a value matches no node.
func validateNodeSelectorTerm(t *corev1.NodeSelectorTerm, preferred bool, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, r := range t.MatchExpressions {
		here := fldPath.Child("matchExpressions").Index(i)
		errs = append(errs, validateNodeRequirement(r, here)...)
		errs = append(errs, fieldrules.InvalidErrors(here.Child("key"), r.Key,
			utilvalidation.IsQualifiedName(r.Key))...)
		for j, v := range r.Values {
			if !preferred {
				errs = append(errs, fieldrules.InvalidErrors(here.Child("values").Index(j), v,
					utilvalidation.IsValidLabelValue(v))...)
			}
		}
	}
	for i, r := range t.MatchFields {
		here := fldPath.Child("matchFields").Index(i)
		if r.Key != metav1.ObjectNameField {
			errs = append(errs, field.Invalid(here.Child("key"), r.Key, "not a valid field selector key"))
		} else {
			for j, v := range r.Values {
				errs = append(errs, fieldrules.InvalidErrors(here.Child("values").Index(j), v,
					validation.NameIsDNSSubdomain(v, false))...)
			}
		}
		if r.Operator != corev1.NodeSelectorOpIn && r.Operator != corev1.NodeSelectorOpNotIn {
			errs = append(errs, field.Invalid(here.Child("operator"), r.Operator, "not a valid selector operator"))
		} else if len(r.Values) != 1 {
			errs = append(errs, field.Required(here.Child("values"),
				"must be only one value when `operator` is 'In' or 'NotIn' for node field selector"))
		}
	}
	return errs
}

func validateNodeRequirement(r corev1.NodeSelectorRequirement, fldPath *field.Path) field.ErrorList {
	switch r.Operator {
	case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
		if len(r.Values) == 0 {
			return field.ErrorList{field.Required(fldPath.Child("values"),
				"must be specified when `operator` is 'In' or 'NotIn'")}
		}
	case corev1.NodeSelectorOpExists, corev1.NodeSelectorOpDoesNotExist:
		if len(r.Values) > 0 {
			return field.ErrorList{field.Forbidden(fldPath.Child("values"),
				"may not be specified when `operator` is 'Exists' or 'DoesNotExist'")}
		}
	case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
		if len(r.Values) != 1 {
			return field.ErrorList{field.Required(fldPath.Child("values"),
				"must be specified single value when `operator` is 'Lt' or 'Gt'")}
		}
	default:
		return field.ErrorList{field.Invalid(fldPath.Child("operator"), r.Operator, "not a valid selector operator")}
	}
	return nil
}

func validatePodTerms(required []corev1.PodAffinityTerm, preferred []corev1.WeightedPodAffinityTerm,
	fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i := range required {
		errs = append(errs, validatePodTerm(&required[i],
			fldPath.Child("requiredDuringSchedulingIgnoredDuringExecution").Index(i))...)
	}
	for i := range preferred {
		here := fldPath.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i)
		errs = append(errs, validateWeight(preferred[i].Weight, here.Child("weight"))...)
		errs = append(errs, validatePodTerm(&preferred[i].PodAffinityTerm, here.Child("podAffinityTerm"))...)
	}
	return errs
}

func validatePodTerm(t *corev1.PodAffinityTerm, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateSelector(t.LabelSelector, fldPath.Child("labelSelector"))
	errs = append(errs, fieldrules.ValidateSelector(t.NamespaceSelector, fldPath.Child("namespaceSelector"))...)
	errs = append(errs, validateLabelKeys(t.MatchLabelKeys, t.MismatchLabelKeys, t.LabelSelector, fldPath)...)
	for _, ns := range t.Namespaces {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("namespace"), ns,
			utilvalidation.IsDNS1123Label(ns))...)
	}
	errs = append(errs, validateTopologyKey(t.TopologyKey, fldPath.Child("topologyKey"))...)
	return append(errs, metavalidation.ValidateLabelName(t.TopologyKey, fldPath.Child("topologyKey"))...)
}

// validateLabelKeys validates matchLabelKeys and mismatchLabelKeys. When a pod is created,
// mergeLabelKeys adds requirements with these keys to the selector. The selector must therefore not
// have the keys already.
func validateLabelKeys(match, mismatch []string, selector *metav1.LabelSelector, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	judge := func(keys []string, fldPath *field.Path) {
		if len(keys) > 0 && selector == nil {
			errs = append(errs, field.Forbidden(fldPath, "must not be specified when labelSelector is not set"))
			return
		}
		for i, key := range keys {
			errs = append(errs, metavalidation.ValidateLabelName(key, fldPath.Index(i))...)
		}
	}
	judge(match, fldPath.Child("matchLabelKeys"))
	judge(mismatch, fldPath.Child("mismatchLabelKeys"))
	if selector != nil {
		seen := map[string]bool{}
		for key := range selector.MatchLabels {
			seen[key] = true
		}
		for _, r := range selector.MatchExpressions {
			if i := slices.Index(match, r.Key); i >= 0 && seen[r.Key] {
				errs = append(errs, field.Invalid(fldPath.Index(i), r.Key,
					"exists in both matchLabelKeys and labelSelector"))
			}
			seen[r.Key] = true
		}
	}
	for i, key := range match {
		if slices.Contains(mismatch, key) {
			errs = append(errs, field.Invalid(fldPath.Child("matchLabelKeys").Index(i), key,
				"exists in both matchLabelKeys and mismatchLabelKeys"))
		}
	}
	return errs
}

// mergeLabelKeys adds requirements with the values of the pod's own labels to the selectors of its
// affinity terms and topology spread constraints.
func mergeLabelKeys(p *corev1.Pod) {
	merge := func(s *metav1.LabelSelector, keys []string, op metav1.LabelSelectorOperator) {
		if s == nil { // a nil selector matches no pod, and must remain nil
			return
		}
		for _, key := range keys {
			if value, ok := p.Labels[key]; ok {
				s.MatchExpressions = append(s.MatchExpressions,
					metav1.LabelSelectorRequirement{Key: key, Operator: op, Values: []string{value}})
			}
		}
	}
	for i := range p.Spec.TopologySpreadConstraints {
		c := &p.Spec.TopologySpreadConstraints[i]
		merge(c.LabelSelector, c.MatchLabelKeys, metav1.LabelSelectorOpIn)
	}
	terms := func(required []corev1.PodAffinityTerm, preferred []corev1.WeightedPodAffinityTerm) {
		one := func(t *corev1.PodAffinityTerm) {
			merge(t.LabelSelector, t.MatchLabelKeys, metav1.LabelSelectorOpIn)
			merge(t.LabelSelector, t.MismatchLabelKeys, metav1.LabelSelectorOpNotIn)
		}
		for i := range required {
			one(&required[i])
		}
		for i := range preferred {
			one(&preferred[i].PodAffinityTerm)
		}
	}
	if a := p.Spec.Affinity; a != nil && a.PodAffinity != nil {
		terms(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution,
			a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	if a := p.Spec.Affinity; a != nil && a.PodAntiAffinity != nil {
		terms(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution,
			a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
	}
}

func validateTopologyKey(key string, fldPath *field.Path) field.ErrorList {
	if key == "" {
		return field.ErrorList{field.Required(fldPath, "can not be empty")}
	}
	return nil
}

func validateInclusion(p *corev1.NodeInclusionPolicy, fldPath *field.Path) field.ErrorList {
	if p == nil {
		return nil
	}
	return fieldrules.ValidateSupported(*p, fldPath, corev1.NodeInclusionPolicyHonor, corev1.NodeInclusionPolicyIgnore)
}

func validateSpread(list []corev1.TopologySpreadConstraint, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, c := range list {
		here := fldPath.Index(i)
		if c.MaxSkew <= 0 {
			errs = append(errs, field.Invalid(here.Child("maxSkew"), c.MaxSkew, notPositive))
		}
		errs = append(errs, validateTopologyKey(c.TopologyKey, here.Child("topologyKey"))...)
		errs = append(errs, fieldrules.ValidateSupported(c.WhenUnsatisfiable, here.Child("whenUnsatisfiable"),
			corev1.DoNotSchedule, corev1.ScheduleAnyway)...)
		errs = append(errs, fieldrules.ValidateSelector(c.LabelSelector, here.Child("labelSelector"))...)
		errs = append(errs, validateLabelKeys(c.MatchLabelKeys, nil, c.LabelSelector, here)...)
		errs = append(errs, validateInclusion(c.NodeAffinityPolicy, here.Child("nodeAffinityPolicy"))...)
		errs = append(errs, validateInclusion(c.NodeTaintsPolicy, here.Child("nodeTaintsPolicy"))...)
		if m := c.MinDomains; m != nil {
			if *m <= 0 {
				errs = append(errs, field.Invalid(here.Child("minDomains"), *m, notPositive))
			}
			if c.WhenUnsatisfiable != corev1.DoNotSchedule {
				errs = append(errs, field.Invalid(here.Child("minDomains"), *m,
					"can only use minDomains if whenUnsatisfiable=DoNotSchedule, not "+string(c.WhenUnsatisfiable)))
			}
		}
		if slices.ContainsFunc(list[i+1:], func(later corev1.TopologySpreadConstraint) bool {
			return later.TopologyKey == c.TopologyKey && later.WhenUnsatisfiable == c.WhenUnsatisfiable
		}) {
			errs = append(errs, field.Duplicate(here.Child("{topologyKey, whenUnsatisfiable}"),
				fmt.Sprintf("{%s, %s}", c.TopologyKey, c.WhenUnsatisfiable)))
		}
	}
	return errs
}
