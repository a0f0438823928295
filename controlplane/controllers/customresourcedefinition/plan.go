// Package customresourcedefinition maintains CustomResourceDefinitions. It accepts their names,
// sets their conditions, and deletes the custom objects of definitions that are being deleted.
package customresourcedefinition

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	v1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/custom"
)

// UsedNames holds the names in an API group that other definitions or built-in kinds already use.
// Resources includes singular and short names; Kinds includes list kinds.
type UsedNames struct{ Resources, Kinds map[string]bool }

// FindUsedNames returns the names that the given definitions, except c itself, use in the API group
// of c.
func FindUsedNames(c *v1.CustomResourceDefinition, definitions []*v1.CustomResourceDefinition) UsedNames {
	t := UsedNames{Resources: map[string]bool{}, Kinds: map[string]bool{}}
	for _, other := range definitions {
		if other.Spec.Group != c.Spec.Group || other.Name == c.Name {
			continue
		}
		n := &other.Status.AcceptedNames
		for _, name := range append([]string{n.Plural, n.Singular}, n.ShortNames...) {
			t.Resources[name] = true
		}
		t.Kinds[n.Kind], t.Kinds[n.ListKind] = true, true
	}
	return t
}

// DefinitionStatus returns the new status of definition c: its accepted names and its conditions. t
// holds the names that c cannot use.
func DefinitionStatus(c *v1.CustomResourceDefinition, t UsedNames, now metav1.Time) v1.CustomResourceDefinitionStatus {
	return computeStatus(c, t, nonStructuralCondition(c), now)
}

// computeStatus returns the result of DefinitionStatus. schemas is the result of
// nonStructuralCondition for c.
func computeStatus(
	c *v1.CustomResourceDefinition, t UsedNames, schemas *v1.CustomResourceDefinitionCondition, now metav1.Time,
) v1.CustomResourceDefinitionStatus {
	next := withStatus(c)
	accepted := acceptNames(next, t)
	accepted.LastTransitionTime = now
	setCondition(next, accepted)
	switch established := apihelpers.IsCRDConditionTrue(next, v1.Established); {
	case established: // condition Established stays true: later names may be refused, but the first names stay accepted
	case accepted.Status == v1.ConditionTrue:
		setCondition(next, v1.CustomResourceDefinitionCondition{Type: v1.Established, Status: v1.ConditionTrue,
			LastTransitionTime: now,
			Reason:             "InitialNamesAccepted", Message: "the initial names have been accepted"})
	default:
		setCondition(next, v1.CustomResourceDefinitionCondition{Type: v1.Established, Status: v1.ConditionFalse,
			LastTransitionTime: now,
			Reason:             "NotAccepted", Message: "not all names are accepted"})
	}
	for _, one := range []struct {
		of  v1.CustomResourceDefinitionConditionType
		now *v1.CustomResourceDefinitionCondition
	}{{v1.NonStructuralSchema, schemas}, {v1.KubernetesAPIApprovalPolicyConformant, approvalCondition(next)}} {
		if one.now == nil {
			apihelpers.RemoveCRDCondition(next, one.of)
			continue
		}
		one.now.Type, one.now.LastTransitionTime = one.of, now
		setCondition(next, *one.now)
	}
	return next.Status
}

// withStatus returns a copy of definition c in which only the status may be modified. It shares the
// spec with c, because schemas may have thousands of properties.
func withStatus(c *v1.CustomResourceDefinition) *v1.CustomResourceDefinition {
	next := *c
	next.Status = *c.Status.DeepCopy()
	return &next
}

// setCondition adds a condition to the status of c, or replaces the condition of the same type. The
// transition time is kept if the condition's status does not change.
func setCondition(c *v1.CustomResourceDefinition, condition v1.CustomResourceDefinitionCondition) {
	c.Status.Conditions = slices.Clone(c.Status.Conditions)
	i := slices.IndexFunc(c.Status.Conditions, func(h v1.CustomResourceDefinitionCondition) bool {
		return h.Type == condition.Type
	})
	if i < 0 {
		c.Status.Conditions = append(c.Status.Conditions, condition)
		return
	}
	if have := c.Status.Conditions[i]; have.Status == condition.Status {
		condition.LastTransitionTime = have.LastTransitionTime
	}
	c.Status.Conditions[i] = condition
}

// acceptNames writes those requested names of c that are not in use to the status of c. It returns
// condition NamesAccepted, which lists the names that are in use.
func acceptNames(c *v1.CustomResourceDefinition, t UsedNames) v1.CustomResourceDefinitionCondition {
	want, have := &c.Spec.Names, &c.Status.AcceptedNames
	out := v1.CustomResourceDefinitionCondition{Type: v1.NamesAccepted, Status: v1.ConditionTrue,
		Reason: "NoConflicts", Message: "no conflicts found"}
	refuse := func(reason string, names ...string) {
		var all []string
		for _, n := range names {
			all = append(all, fmt.Sprintf("%q is already in use", n))
		}
		out.Status, out.Reason, out.Message = v1.ConditionFalse, reason, strings.Join(all, ", ")
		if len(all) > 1 {
			out.Message = "[" + out.Message + "]"
		}
	}
	for _, one := range []struct {
		reason     string
		want, have *string
		taken      map[string]bool
	}{
		{"PluralConflict", &want.Plural, &have.Plural, t.Resources},
		{"SingularConflict", &want.Singular, &have.Singular, t.Resources},
		{"", nil, nil, nil}, // placeholder for the short names, in the order of upstream Kubernetes
		{"KindConflict", &want.Kind, &have.Kind, t.Kinds},
		{"ListKindConflict", &want.ListKind, &have.ListKind, t.Kinds},
	} {
		if one.want == nil {
			var conflicts []string
			for _, s := range want.ShortNames {
				if !slices.Contains(have.ShortNames, s) && t.Resources[s] {
					conflicts = append(conflicts, s)
				}
			}
			if len(conflicts) > 0 {
				refuse("ShortNamesConflict", conflicts...)
			} else {
				have.ShortNames = slices.Clone(want.ShortNames)
			}
			continue
		}
		if *one.want != *one.have && one.taken[*one.want] {
			refuse(one.reason, *one.want)
			continue
		}
		*one.have = *one.want
	}
	have.Categories = slices.Clone(want.Categories)
	return out
}

// approvalCondition returns condition KubernetesAPIApprovalPolicyConformant if the API group of c
// is reserved for the Kubernetes project. It returns nil for other groups.
func approvalCondition(c *v1.CustomResourceDefinition) *v1.CustomResourceDefinitionCondition {
	if !apihelpers.IsProtectedCommunityGroup(c.Spec.Group) {
		return nil
	}
	state, why := apihelpers.GetAPIApprovalState(c.Annotations)
	out := &v1.CustomResourceDefinitionCondition{Status: v1.ConditionFalse, Message: why}
	switch state {
	case apihelpers.APIApproved:
		out.Status, out.Reason = v1.ConditionTrue, "ApprovedAnnotation"
	case apihelpers.APIApprovalInvalid:
		out.Reason = "InvalidAnnotation"
	case apihelpers.APIApprovalMissing:
		out.Reason = "MissingAnnotation"
	case apihelpers.APIApprovalBypassed:
		out.Reason = "UnapprovedAnnotation"
	default:
		out.Status, out.Reason = v1.ConditionUnknown, "UnknownAnnotation"
	}
	return out
}

// nonStructuralCondition returns condition NonStructuralSchema of c, or nil if all schemas are
// structural. Only definitions from old releases have schemas that are not structural.
func nonStructuralCondition(c *v1.CustomResourceDefinition) *v1.CustomResourceDefinitionCondition {
	var errs field.ErrorList
	if c.Spec.PreserveUnknownFields {
		errs = append(errs, field.Invalid(field.NewPath("spec", "preserveUnknownFields"), true, "must be false"))
	}
	for i := range c.Spec.Versions {
		v := &c.Spec.Versions[i]
		schema, err := custom.UnpackSchema(v)
		if err == nil && schema == nil {
			continue
		}
		props := &apiextensions.JSONSchemaProps{}
		if err == nil {
			err = v1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(schema, props, nil)
		}
		var s *structural.Structural
		if err == nil {
			s, err = structural.NewStructural(props)
		}
		if err != nil {
			return &v1.CustomResourceDefinitionCondition{Status: v1.ConditionUnknown, Reason: "StructuralError",
				Message: fmt.Sprintf("failed to check validation schema for version %s: %v", v.Name, err)}
		}
		errs = append(errs, structural.ValidateStructural(field.NewPath("spec", "versions").Index(i).Child("schema",
			"openAPIV3Schema"), s)...)
	}
	if len(errs) == 0 {
		return nil
	}
	return &v1.CustomResourceDefinitionCondition{Status: v1.ConditionTrue, Reason: "Violations",
		Message: errs.ToAggregate().Error()}
}
