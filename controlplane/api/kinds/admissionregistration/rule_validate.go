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
	mutableOperations = []admissionv1.OperationType{admissionv1.OperationAll, admissionv1.Connect, admissionv1.Create, admissionv1.Update}
)

// validateRule validates one rule of a webhook or a policy. operations are the allowed operations.
func validateRule(r *admissionv1.RuleWithOperations, at *field.Path, operations ...admissionv1.OperationType) field.ErrorList {
	if len(operations) == 0 {
		operations = admissionOperations
	}
	var errs field.ErrorList
	required := func(n int, name string) {
		if n == 0 {
			errs = append(errs, field.Required(at.Child(name), ""))
		}
	}
	alone := func(list []string, name, others string) {
		if len(list) > 1 && slices.Contains(list, "*") {
			errs = append(errs, field.Invalid(at.Child(name), list, "if '*' is present, must not specify other "+others))
		}
	}
	required(len(r.Operations), "operations")
	if len(r.Operations) > 1 && slices.Contains(r.Operations, admissionv1.OperationAll) {
		errs = append(errs, field.Invalid(at.Child("operations"), r.Operations, "if '*' is present, must not specify other operations"))
	}
	for i, op := range r.Operations {
		errs = append(errs, fieldrules.Supported(op, at.Child("operations").Index(i), operations...)...)
	}
	required(len(r.APIGroups), "apiGroups")
	alone(r.APIGroups, "apiGroups", "API groups")
	required(len(r.APIVersions), "apiVersions")
	alone(r.APIVersions, "apiVersions", "API versions")
	for i, v := range r.APIVersions {
		if v == "" {
			errs = append(errs, field.Required(at.Child("apiVersions").Index(i), ""))
		}
	}
	errs = append(errs, validateRuleResources(r.Resources, at.Child("resources"))...)
	if r.Scope != nil {
		errs = append(errs, fieldrules.Supported(*r.Scope, at.Child("scope"), admissionv1.AllScopes,
			admissionv1.ClusterScope, admissionv1.NamespacedScope)...)
	}
	return errs
}

// validateRuleResources validates a list of resources: "pods", "pods/status", "pods/*", "*/scale",
// "*" and "*/*". No entry may be covered by another.
func validateRuleResources(list []string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(list) == 0 {
		errs = append(errs, field.Required(at, ""))
	}
	wholes, everywhere := map[string]bool{}, map[string]bool{}
	plain := false
	for i, r := range list {
		if r == "" {
			errs = append(errs, field.Required(at.Index(i), ""))
			continue
		}
		resource, sub, facet := strings.Cut(r, "/")
		if !facet {
			plain = plain || r != "*"
			continue
		}
		if wholes[resource] {
			errs = append(errs, field.Invalid(at.Index(i), r, fmt.Sprintf("if '%s/*' is present, must not specify %s", resource, r)))
		}
		if everywhere[sub] {
			errs = append(errs, field.Invalid(at.Index(i), r, fmt.Sprintf("if '*/%s' is present, must not specify %s", sub, r)))
		}
		wholes[resource] = wholes[resource] || sub == "*"
		everywhere[sub] = everywhere[sub] || resource == "*"
	}
	if len(list) > 1 && slices.Contains(list, "*/*") {
		errs = append(errs, field.Invalid(at, list, "if '*/*' is present, must not specify other resources"))
	}
	if plain && slices.Contains(list, "*") {
		errs = append(errs, field.Invalid(at, list, "if '*' is present, must not specify other resources without subresources"))
	}
	return errs
}
