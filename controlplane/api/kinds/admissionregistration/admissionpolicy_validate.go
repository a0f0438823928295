package admissionregistration

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/api/validation/path"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/expressions"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	maxAuditAnnotations   = 20
	MaxAuditAnnotationLen = 5 << 10 // maximum length of the expression, in bytes
)

// policy contains the fields that both kinds of admission policies have, for validation.
type policy struct {
	failure    *admissionv1.FailurePolicyType
	params     *admissionv1.ParamKind
	match      *admissionv1.MatchResources
	conditions []admissionv1.MatchCondition
	variables  []admissionv1.Variable
	operations []admissionv1.OperationType
}

func validatePolicy(p policy, texts *expressions.Collector, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if p.failure == nil {
		errs = append(errs, field.Required(spec.Child("failurePolicy"), ""))
	} else {
		errs = append(errs, fieldrules.ValidateSupported(*p.failure, spec.Child("failurePolicy"), admissionv1.Fail,
			admissionv1.Ignore)...)
	}
	if p.params != nil {
		texts.Params = true
		errs = append(errs, validateParamKind(p.params, spec.Child("paramKind"))...)
	}
	if p.match == nil {
		errs = append(errs, field.Required(spec.Child("matchConstraints"), ""))
	} else {
		errs = append(errs, validateMatch(p.match, spec.Child("matchConstraints"), p.operations...)...)
		if len(p.match.ResourceRules) == 0 {
			errs = append(errs, field.Required(spec.Child("matchConstraints", "resourceRules"), ""))
		}
	}
	errs = append(errs, validateMatchConditions(p.conditions, spec.Child("matchConditions"), texts)...)
	for i, v := range p.variables {
		fldPath := spec.Child("variables").Index(i)
		switch {
		case strings.TrimSpace(v.Name) == "":
			errs = append(errs, field.Required(fldPath.Child("name"), "name is not specified"))
		case !isCELIdentifier(v.Name):
			errs = append(errs, field.Invalid(fldPath.Child("name"), v.Name, "name is not a valid CEL identifier"))
		}
		if strings.TrimSpace(v.Expression) == "" {
			errs = append(errs, field.Required(fldPath.Child("expression"), "expression is not specified"))
			continue
		}
		texts.Add(expressions.Variable, v.Expression, fldPath.Child("expression"))
		texts.All[len(texts.All)-1].Name = v.Name
	}
	return errs
}

func validateValidatingPolicy(p *admissionv1.ValidatingAdmissionPolicy, o *expressions.Options) field.ErrorList {
	spec, s := field.NewPath("spec"), &p.Spec
	var texts expressions.Collector
	errs := validatePolicy(policy{s.FailurePolicy, s.ParamKind, s.MatchConstraints, s.MatchConditions, s.Variables,
		nil}, &texts, spec)
	if len(s.Validations) == 0 && len(s.AuditAnnotations) == 0 {
		const why = "validations or auditAnnotations must contain at least one item"
		return append(errs, field.Required(spec.Child("validations"), why),
			field.Required(spec.Child("auditAnnotations"), why))
	}
	for i := range s.Validations {
		errs = append(errs, validateValidation(&s.Validations[i], &texts, spec.Child("validations").Index(i))...)
	}
	fldPath := spec.Child("auditAnnotations")
	if len(s.AuditAnnotations) > maxAuditAnnotations {
		errs = append(errs, field.Invalid(fldPath, s.AuditAnnotations,
			fmt.Sprintf("must not have more than %d auditAnnotations", maxAuditAnnotations)))
	}
	seen := map[string]bool{}
	for i, a := range s.AuditAnnotations {
		errs = append(errs, validateAuditAnnotation(p.Name, a, &texts, fldPath.Index(i))...)
		if seen[a.Key] {
			errs = append(errs, field.Duplicate(fldPath.Index(i).Child("key"), a.Key))
		}
		seen[a.Key] = true
	}
	return append(errs, o.CompileAll(&texts)...)
}

func validateValidation(v *admissionv1.Validation, texts *expressions.Collector, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if strings.TrimSpace(v.Expression) == "" {
		errs = append(errs, field.Required(fldPath.Child("expression"), "expression is not specified"))
	} else {
		texts.Add(expressions.Validation, v.Expression, fldPath.Child("expression"))
	}
	if m := v.MessageExpression; m != "" {
		if strings.TrimSpace(m) == "" {
			errs = append(errs, field.Invalid(fldPath.Child("messageExpression"), m, "must be non-empty if specified"))
		} else {
			texts.Add(expressions.Message, m, fldPath.Child("messageExpression"))
		}
	}
	switch message := strings.TrimSpace(v.Message); {
	case v.Message != "" && message == "":
		errs = append(errs, field.Invalid(fldPath.Child("message"), v.Message,
			"message must be non-empty if specified"))
	case strings.ContainsAny(message, "\n\r"):
		errs = append(errs, field.Invalid(fldPath.Child("message"), v.Message, "message must not contain line breaks"))
	}
	if v.Reason != nil {
		errs = append(errs, fieldrules.ValidateSupported(*v.Reason, fldPath.Child("reason"),
			metav1.StatusReasonForbidden,
			metav1.StatusReasonInvalid,
			metav1.StatusReasonRequestEntityTooLarge)...)
	}
	return errs
}

func validateAuditAnnotation(policy string, a admissionv1.AuditAnnotation, texts *expressions.Collector,
	fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if policy == "" {
		errs = append(errs, field.Invalid(fldPath.Child("key"), a.Key, "requires metadata.name be non-empty"))
	} else {
		whole := policy + "/" + a.Key
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("key"), whole, validation.IsQualifiedName(whole))...)
	}
	switch text, here := strings.TrimSpace(a.ValueExpression), fldPath.Child("valueExpression"); {
	case text == "":
		errs = append(errs, field.Required(here, "valueExpression is not specified"))
	case len(text) > MaxAuditAnnotationLen:
		errs = append(errs, field.Required(here,
			fmt.Sprintf("must not exceed %d bytes in length", MaxAuditAnnotationLen)))
	default:
		texts.Add(expressions.AuditAnnotation, text, here)
	}
	return errs
}

func validateMutatingPolicy(s *admissionv1.MutatingAdmissionPolicySpec, o *expressions.Options) field.ErrorList {
	spec := field.NewPath("spec")
	var texts expressions.Collector
	errs := validatePolicy(policy{s.FailurePolicy, s.ParamKind, s.MatchConstraints, s.MatchConditions, s.Variables,
		mutableOperations}, &texts, spec)
	fldPath := spec.Child("mutations")
	if len(s.Mutations) == 0 {
		errs = append(errs, field.Required(fldPath, "mutations must contain at least one item"))
	}
	for i := range s.Mutations {
		errs = append(errs, validateMutation(&s.Mutations[i], &texts, fldPath.Index(i))...)
	}
	if s.ReinvocationPolicy == "" {
		errs = append(errs, field.Required(spec.Child("reinvocationPolicy"), ""))
	} else {
		errs = append(errs, fieldrules.ValidateSupported(s.ReinvocationPolicy, spec.Child("reinvocationPolicy"),
			admissionv1.IfNeededReinvocationPolicy, admissionv1.NeverReinvocationPolicy)...)
	}
	return append(errs, o.CompileAll(&texts)...)
}

func validateMutation(m *admissionv1.Mutation, texts *expressions.Collector, fldPath *field.Path) field.ErrorList {
	patch, apply := fldPath.Child("jsonPatch"), fldPath.Child("applyConfiguration")
	expression := func(set bool, text string, here, other *field.Path, use expressions.Use,
		wrong bool) field.ErrorList {
		var errs field.ErrorList
		switch {
		case !set:
			errs = append(errs, field.Required(here,
				fmt.Sprintf("must be specified when patchType is %s", m.PatchType)))
		case strings.TrimSpace(text) == "":
			errs = append(errs, field.Required(here.Child("expression"), "expression is not specified"))
		default:
			texts.Add(use, text, here.Child("expression"))
		}
		if wrong {
			errs = append(errs, field.Forbidden(other,
				fmt.Sprintf("must not be specified when patchType is %s", m.PatchType)))
		}
		return errs
	}
	switch m.PatchType {
	case "":
		return field.ErrorList{field.Required(fldPath.Child("patchType"), "")}
	case admissionv1.PatchTypeJSONPatch:
		return expression(m.JSONPatch != nil, ptr.Deref(m.JSONPatch, admissionv1.JSONPatch{}).Expression, patch, apply,
			expressions.PatchMutation, m.ApplyConfiguration != nil)
	case admissionv1.PatchTypeApplyConfiguration:
		return expression(m.ApplyConfiguration != nil,
			ptr.Deref(m.ApplyConfiguration, admissionv1.ApplyConfiguration{}).Expression, apply, patch,
			expressions.ApplyMutation, m.JSONPatch != nil)
	}
	return field.ErrorList{field.NotSupported(fldPath.Child("patchType"), m.PatchType,
		[]admissionv1.PatchType{admissionv1.PatchTypeApplyConfiguration, admissionv1.PatchTypeJSONPatch})}
}

func validateParamKind(p *admissionv1.ParamKind, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	version := fldPath.Child("apiVersion")
	group, v, both := strings.Cut(p.APIVersion, "/")
	if !both {
		group, v = "", p.APIVersion
	}
	switch {
	case p.APIVersion == "":
		errs = append(errs, field.Required(version, ""))
	case strings.Count(p.APIVersion, "/") > 1:
		errs = append(errs, field.Invalid(version, p.APIVersion, "unexpected GroupVersion string: "+p.APIVersion))
	default:
		if wrong := validation.IsDNS1123Subdomain(group); group != "" && len(wrong) > 0 {
			errs = append(errs, field.Invalid(version, group, strings.Join(wrong, ",")))
		}
		if v == "" {
			errs = append(errs, field.Invalid(version, p.APIVersion, "version must be specified"))
		} else if wrong := validation.IsDNS1035Label(v); len(wrong) > 0 {
			errs = append(errs, field.Invalid(version, v, strings.Join(wrong, ",")))
		}
	}
	if p.Kind == "" {
		errs = append(errs, field.Required(fldPath.Child("kind"), ""))
	} else if wrong := validation.IsDNS1035Label(strings.ToLower(p.Kind)); len(wrong) > 0 {
		errs = append(errs, field.Invalid(fldPath.Child("kind"), p.Kind,
			"may have mixed case, but should otherwise match: "+strings.Join(wrong, ",")))
	}
	return errs
}

// validateMatch validates the match rules of a policy or a binding. Fields with a default value
// must be set. allowed are the operations that the rules may contain.
func validateMatch(
	m *admissionv1.MatchResources, fldPath *field.Path, allowed ...admissionv1.OperationType,
) field.ErrorList {
	var errs field.ErrorList
	if m.MatchPolicy == nil {
		errs = append(errs, field.Required(fldPath.Child("matchPolicy"), ""))
	} else {
		errs = append(errs, fieldrules.ValidateSupported(*m.MatchPolicy, fldPath.Child("matchPolicy"),
			admissionv1.Equivalent,
			admissionv1.Exact)...)
	}
	for _, s := range []struct {
		name     string
		selector *metav1.LabelSelector
	}{{"namespaceSelector", m.NamespaceSelector}, {"objectSelector", m.ObjectSelector}} {
		if s.selector == nil {
			errs = append(errs, field.Required(fldPath.Child(s.name), ""))
			continue
		}
		errs = append(errs, fieldrules.ValidateSelector(s.selector, fldPath.Child(s.name))...)
	}
	rules := func(list []admissionv1.NamedRuleWithOperations, fldPath *field.Path) {
		for i, r := range list {
			here := fldPath.Index(i).Child("resourceNames")
			for j, n := range r.ResourceNames {
				errs = append(errs, fieldrules.InvalidErrors(here.Index(j), n,
					path.ValidatePathSegmentName(n, false))...)
				if slices.Contains(r.ResourceNames[:j], n) {
					errs = append(errs, field.Duplicate(here.Index(j), n))
				}
			}
			errs = append(errs, validateRule(&r.RuleWithOperations, fldPath.Index(i), allowed...)...)
		}
	}
	rules(m.ResourceRules, fldPath.Child("resourceRules"))
	rules(m.ExcludeResourceRules, fldPath.Child("excludeResourceRules"))
	return errs
}

func validatePolicyBinding(policy string, params *admissionv1.ParamRef, match *admissionv1.MatchResources,
	spec *field.Path,
	operations ...admissionv1.OperationType) field.ErrorList {
	var errs field.ErrorList
	if policy == "" {
		errs = append(errs, field.Required(spec.Child("policyName"), ""))
	} else {
		errs = append(errs, fieldrules.InvalidErrors(spec.Child("policyName"), policy,
			apivalidation.NameIsDNSSubdomain(policy, false))...)
	}
	if params != nil {
		errs = append(errs, validateParamRef(params, spec.Child("paramRef"))...)
	}
	if match != nil {
		errs = append(errs, validateMatch(match, spec.Child("matchResources"), operations...)...)
	}
	return errs
}

func validateParamRef(p *admissionv1.ParamRef, fldPath *field.Path) field.ErrorList {
	const both = "name and selector are mutually exclusive"
	var errs field.ErrorList
	if p.Name != "" {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("name"), p.Name,
			path.ValidatePathSegmentName(p.Name, false))...)
		if p.Selector != nil {
			errs = append(errs, field.Forbidden(fldPath.Child("name"), both))
		}
	}
	if p.Selector != nil {
		errs = append(errs, fieldrules.ValidateSelector(p.Selector, fldPath.Child("selector"))...)
		if p.Name != "" {
			errs = append(errs, field.Forbidden(fldPath.Child("selector"), both))
		}
	}
	if p.Name == "" && p.Selector == nil {
		errs = append(errs, field.Required(fldPath, "one of name or selector must be specified"))
	}
	if a := ptr.Deref(p.ParameterNotFoundAction, ""); a == "" {
		errs = append(errs, field.Required(fldPath.Child("parameterNotFoundAction"), ""))
	} else {
		errs = append(errs, fieldrules.ValidateSupported(a, fldPath.Child("parameterNotFoundAction"),
			admissionv1.DenyAction,
			admissionv1.AllowAction)...)
	}
	return errs
}

func validateActions(actions []admissionv1.ValidationAction, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, a := range actions {
		errs = append(errs, fieldrules.ValidateSupported(a, fldPath.Index(i), admissionv1.Audit, admissionv1.Deny,
			admissionv1.Warn)...)
		if slices.Contains(actions[:i], a) {
			errs = append(errs, field.Duplicate(fldPath.Index(i), a))
		}
	}
	if slices.Contains(actions, admissionv1.Deny) && slices.Contains(actions, admissionv1.Warn) {
		errs = append(errs, field.Invalid(fldPath, actions,
			"must not contain both Deny and Warn (repeating the same validation failure "+
				"information in the API response and headers serves no purpose)"))
	}
	if len(actions) == 0 {
		errs = append(errs, field.Required(fldPath, "at least one validation action is required"))
	}
	return errs
}

func validatePolicyStatus(s *admissionv1.ValidatingAdmissionPolicyStatus, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.TypeChecking != nil {
		for i, w := range s.TypeChecking.ExpressionWarnings {
			here := fldPath.Child("typeChecking", "expressionWarnings").Index(i)
			if w.Warning == "" {
				errs = append(errs, field.Required(here.Child("warning"), ""))
			}
			if strings.TrimSpace(w.FieldRef) == "" {
				errs = append(errs, field.Required(here.Child("fieldRef"), ""))
			}
		}
	}
	return append(errs, metavalidation.ValidateConditions(s.Conditions, fldPath.Child("conditions"))...)
}

var celIdentifier = regexp.MustCompile("^[_a-zA-Z][_a-zA-Z0-9]*$")

// celReserved are the reserved words of CEL.
var celReserved = []string{"true", "false", "null", "in", "as", "break", "const", "continue", "else", "for",
	"function", "if",
	"import", "let", "loop", "package", "namespace", "return", "var", "void", "while"}

func isCELIdentifier(name string) bool {
	return celIdentifier.MatchString(name) && !slices.Contains(celReserved, name)
}
