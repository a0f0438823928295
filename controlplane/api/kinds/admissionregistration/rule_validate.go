package admissionregistration

import (
	"fmt"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

var (
	admissionOperations = []admissionv1.OperationType{admissionv1.OperationAll, admissionv1.Connect, admissionv1.Create,
		admissionv1.Delete, admissionv1.Update}
	// mutableOperations are the operations in which a mutating policy can change an object.
	mutableOperations = []admissionv1.OperationType{admissionv1.OperationAll, admissionv1.Connect, admissionv1.Create,
		admissionv1.Update}
)

// validateRule validates one rule of a webhook or a policy. allowed are the operations that the
// rule may contain.
func validateRule(
	r *admissionv1.RuleWithOperations, fldPath *field.Path, allowed ...admissionv1.OperationType,
) field.ErrorList {
	if len(allowed) == 0 {
		allowed = admissionOperations
	}
	var errs field.ErrorList
	required := func(n int, name string) {
		if n == 0 {
			errs = append(errs, field.Required(fldPath.Child(name), ""))
		}
	}
	alone := func(list []string, name, others string) {
		if len(list) > 1 && slices.Contains(list, "*") {
			errs = append(errs, field.Invalid(fldPath.Child(name), list,
				"if '*' is present, must not specify other "+others))
		}
	}
	required(len(r.Operations), "operations")
	if len(r.Operations) > 1 && slices.Contains(r.Operations, admissionv1.OperationAll) {
		errs = append(errs, field.Invalid(fldPath.Child("operations"), r.Operations,
			"if '*' is present, must not specify other operations"))
	}
	for i, op := range r.Operations {
		errs = append(errs, fieldrules.ValidateSupported(op, fldPath.Child("operations").Index(i), allowed...)...)
	}
	required(len(r.APIGroups), "apiGroups")
	alone(r.APIGroups, "apiGroups", "API groups")
	required(len(r.APIVersions), "apiVersions")
	alone(r.APIVersions, "apiVersions", "API versions")
	for i, v := range r.APIVersions {
		if v == "" {
			errs = append(errs, field.Required(fldPath.Child("apiVersions").Index(i), ""))
		}
	}
	errs = append(errs, validateRuleResources(r.Resources, fldPath.Child("resources"))...)
	if r.Scope != nil {
		errs = append(errs, fieldrules.ValidateSupported(*r.Scope, fldPath.Child("scope"), admissionv1.AllScopes,
			admissionv1.ClusterScope, admissionv1.NamespacedScope)...)
	}
	return errs
}

// validateRuleResources validates the resources of a rule: "pods", "pods/status", "pods/*",
// "*/scale", "*" and "*/*". It returns an error if one entry covers another.
func validateRuleResources(list []string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(list) == 0 {
		errs = append(errs, field.Required(fldPath, ""))
	}
	wholes, everywhere := map[string]bool{}, map[string]bool{}
	plain := false
	for i, r := range list {
		if r == "" {
			errs = append(errs, field.Required(fldPath.Index(i), ""))
			continue
		}
		resource, sub, facet := strings.Cut(r, "/")
		if !facet {
			plain = plain || r != "*"
			continue
		}
		if wholes[resource] {
			errs = append(errs, field.Invalid(fldPath.Index(i), r,
				fmt.Sprintf("if '%s/*' is present, must not specify %s", resource, r)))
		}
		if everywhere[sub] {
			errs = append(errs, field.Invalid(fldPath.Index(i), r,
				fmt.Sprintf("if '*/%s' is present, must not specify %s", sub, r)))
		}
		wholes[resource] = wholes[resource] || sub == "*"
		everywhere[sub] = everywhere[sub] || resource == "*"
	}
	if len(list) > 1 && slices.Contains(list, "*/*") {
		errs = append(errs, field.Invalid(fldPath, list, "if '*/*' is present, must not specify other resources"))
	}
	if plain && slices.Contains(list, "*") {
		errs = append(errs, field.Invalid(fldPath, list,
			"if '*' is present, must not specify other resources without subresources"))
	}
	return errs
}
