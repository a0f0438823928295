package admissionregistration_test

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds/admissionregistration"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

const constraints = "matchConstraints: {resourceRules: [{" + podRule + "}]}"

// policyText is a policy about pods, with rest.
func policyText(rest string) string {
	return "{metadata: {name: a.b}, spec: {" + constraints + ", " + rest + "}}"
}

// matchFaults are those of the requests that a policy is about, in the field at.
func matchFaults(text func(match string) string, at string) []kindstest.BadObject {
	rule := at + ".resourceRules[0]"
	return []kindstest.BadObject{
		{text("matchPolicy: Near, resourceRules: [{" + podRule + "}]"), at + `.matchPolicy: Unsupported value: "Near": supported values: "Equivalent", "Exact"`},
		{text("namespaceSelector: {matchExpressions: [{key: a, operator: Near}]}, resourceRules: [{" + podRule + "}]"), at + `.namespaceSelector.matchExpressions[0].operator: Invalid value: "Near": not a valid selector operator`},
		{text("objectSelector: {matchLabels: {a: b c}}, resourceRules: [{" + podRule + "}]"), kindstest.InvalidText(at+".objectSelector.matchLabels", "b c", validation.IsValidLabelValue("b c")[0])},
		{text("resourceRules: [{" + podRule + ", resourceNames: [a, a, b/c]}]"), rule + `.resourceNames[1]: Duplicate value: "a"` + "\n" + kindstest.InvalidText(rule+".resourceNames[2]", "b/c", "may not contain '/'")},
		{text("resourceRules: [{" + podRule + "}], excludeResourceRules: [{}]"), at + ".excludeResourceRules[0].operations: Required value\n" + at + ".excludeResourceRules[0].apiGroups: Required value\n" +
			at + ".excludeResourceRules[0].apiVersions: Required value\n" + at + ".excludeResourceRules[0].resources: Required value"},
	}
}

// policyFaults are those that both kinds of policies can have; rest makes one right.
func policyFaults(rest string) []kindstest.BadObject {
	kind := func(p string) string { return policyText(rest + ", paramKind: {" + p + "}") }
	variable := func(v string) string { return policyText(rest + ", variables: [{" + v + "}]") }
	const version = "spec.paramKind.apiVersion"
	return append([]kindstest.BadObject{
		{policyText(rest), ""},
		{kind("apiVersion: x.io/v1, kind: Limit"), ""},
		{"{metadata: {name: a}, spec: {" + rest + "}}", "spec.matchConstraints: Required value"},
		{"{metadata: {name: a}, spec: {matchConstraints: {}, " + rest + "}}", "spec.matchConstraints.resourceRules: Required value"},
		{policyText(rest + ", failurePolicy: Retry"), `spec.failurePolicy: Unsupported value: "Retry": supported values: "Fail", "Ignore"`},
		{kind("kind: Limit"), version + ": Required value"},
		{kind("apiVersion: a/b/c, kind: Limit"), kindstest.InvalidText(version, "a/b/c", "unexpected GroupVersion string: a/b/c")},
		{kind("apiVersion: X/v1, kind: Limit"), kindstest.InvalidText(version, "X", kindstest.NotSubdomain)},
		{kind("apiVersion: x/, kind: Limit"), kindstest.InvalidText(version, "x/", "version must be specified")},
		{kind("apiVersion: x/1, kind: Limit"), kindstest.InvalidText(version, "1", validation.IsDNS1035Label("1")[0])},
		{kind("apiVersion: v1"), "spec.paramKind.kind: Required value"},
		{kind("apiVersion: v1, kind: a_b"), kindstest.InvalidText("spec.paramKind.kind", "a_b", "may have mixed case, but should otherwise match: "+validation.IsDNS1035Label("a_b")[0])},
		{variable("expression: '1'"), "spec.variables[0].name: Required value: name is not specified"},
		{variable("name: a-b, expression: '1'"), kindstest.InvalidText("spec.variables[0].name", "a-b", "name is not a valid CEL identifier")},
		{variable("name: while, expression: '1'"), kindstest.InvalidText("spec.variables[0].name", "while", "name is not a valid CEL identifier")},
		{variable("name: a, expression: ' '"), "spec.variables[0].expression: Required value: expression is not specified"},
		{policyText(rest + ", matchConditions: [{name: n}]"), "spec.matchConditions[0].expression: Required value"},
	}, matchFaults(func(m string) string {
		return "{metadata: {name: a}, spec: {matchConstraints: {" + m + "}, " + rest + "}}"
	}, "spec.matchConstraints")...)
}

func TestValidatingPolicy(t *testing.T) {
	const right = "validations: [{expression: 'true'}]"
	kindstest.CheckRefused[*admissionv1.ValidatingAdmissionPolicy](t, policyFaults(right)...)
	one := func(v string) string { return policyText("validations: [{" + v + "}]") }
	note := func(a string) string { return policyText("auditAnnotations: [" + a + "]") }
	const at, key = "spec.validations[0]", "spec.auditAnnotations[0].key"
	long := strings.Repeat("a", admissionregistration.MaxAuditAnnotationLen+1)
	kindstest.CheckRefused[*admissionv1.ValidatingAdmissionPolicy](t,
		kindstest.BadObject{policyText(""), "spec.validations: Required value: validations or auditAnnotations must contain at least one item\n" +
			"spec.auditAnnotations: Required value: validations or auditAnnotations must contain at least one item"},
		kindstest.BadObject{one("message: m"), at + ".expression: Required value: expression is not specified"},
		kindstest.BadObject{one("expression: 'true', messageExpression: ' '"), kindstest.InvalidText(at+".messageExpression", " ", "must be non-empty if specified")},
		kindstest.BadObject{one("expression: 'true', message: ' '"), kindstest.InvalidText(at+".message", " ", "message must be non-empty if specified")},
		kindstest.BadObject{one(`expression: 'true', message: "a\nb"`), kindstest.InvalidText(at+".message", `a\nb`, "message must not contain line breaks")},
		kindstest.BadObject{one("expression: 'true', reason: NotFound"), at + `.reason: Unsupported value: "NotFound": supported values: "Forbidden", "Invalid", "RequestEntityTooLarge"`},
		kindstest.BadObject{note("{key: k, valueExpression: a}"), ""},
		kindstest.BadObject{note("{key: a b, valueExpression: a}"), kindstest.InvalidText(key, "a.b/a b", validation.IsQualifiedName("a b")[0][len(""):])},
		kindstest.BadObject{note("{key: k}"), "spec.auditAnnotations[0].valueExpression: Required value: valueExpression is not specified"},
		kindstest.BadObject{note("{key: k, valueExpression: " + long + "}"), "spec.auditAnnotations[0].valueExpression: Required value: must not exceed 5120 bytes in length"},
		kindstest.BadObject{note("{key: k, valueExpression: a}, {key: k, valueExpression: a}"), `spec.auditAnnotations[1].key: Duplicate value: "k"`},
	)
	kindstest.CheckDefaults[*admissionv1.ValidatingAdmissionPolicy](t, policyText(right), "{spec: {matchConstraints: {resourceRules: [{"+podRule+
		", scope: '*'}], matchPolicy: Equivalent, namespaceSelector: {}, objectSelector: {}}, "+right+", failurePolicy: Fail}}")
	kindstest.CheckChanges(t, policyText(right),
		kindstest.Change[*admissionv1.ValidatingAdmissionPolicy]{Change: func(p *admissionv1.ValidatingAdmissionPolicy) {
			p.Spec.FailurePolicy = kindstest.Ptr(admissionv1.Ignore)
		}, Generation: 2},
		kindstest.Change[*admissionv1.ValidatingAdmissionPolicy]{Sub: "status", Change: func(p *admissionv1.ValidatingAdmissionPolicy) {
			p.Spec.Validations = nil
			p.Status.TypeChecking = &admissionv1.TypeChecking{ExpressionWarnings: []admissionv1.ExpressionWarning{{FieldRef: " "}}}
			p.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: "Perhaps", Reason: "r", LastTransitionTime: metav1.NewTime(kindstest.Now)}}
		}, Want: "status.typeChecking.expressionWarnings[0].warning: Required value\nstatus.typeChecking.expressionWarnings[0].fieldRef: Required value\n" +
			`status.conditions[0].status: Unsupported value: "Perhaps": supported values: "False", "True", "Unknown"`, Generation: 1},
	)
	for text, want := range map[string]string{policyText(right): "a.b|1|<unset>|3h", policyText(right + ", paramKind: {apiVersion: x/v1, kind: K}"): "a.b|1|x/v1/K|3h"} {
		if got := kindstest.PrintTable[*admissionv1.ValidatingAdmissionPolicy](t, text); got != "NAME|VALIDATIONS|PARAMKIND|AGE\n"+want {
			t.Error(got)
		}
	}
}

func TestMutatingPolicy(t *testing.T) {
	const right = "mutations: [{patchType: JSONPatch, jsonPatch: {expression: '[]'}}]"
	kindstest.CheckRefused[*admissionv1.MutatingAdmissionPolicy](t, policyFaults(right)...)
	one := func(m string) string { return policyText("mutations: [{" + m + "}]") }
	const at = "spec.mutations[0]"
	kindstest.CheckRefused[*admissionv1.MutatingAdmissionPolicy](t,
		kindstest.BadObject{policyText(""), "spec.mutations: Required value: mutations must contain at least one item"},
		kindstest.BadObject{one("jsonPatch: {expression: a}"), at + ".patchType: Required value"},
		kindstest.BadObject{one("patchType: MergePatch"), at + `.patchType: Unsupported value: "MergePatch": supported values: "ApplyConfiguration", "JSONPatch"`},
		kindstest.BadObject{one("patchType: JSONPatch"), at + ".jsonPatch: Required value: must be specified when patchType is JSONPatch"},
		kindstest.BadObject{one("patchType: JSONPatch, jsonPatch: {}"), at + ".jsonPatch.expression: Required value: expression is not specified"},
		kindstest.BadObject{one("patchType: JSONPatch, jsonPatch: {expression: a}, applyConfiguration: {}"), at + ".applyConfiguration: Forbidden: must not be specified when patchType is JSONPatch"},
		kindstest.BadObject{one("patchType: ApplyConfiguration"), at + ".applyConfiguration: Required value: must be specified when patchType is ApplyConfiguration"},
		kindstest.BadObject{one("patchType: ApplyConfiguration, applyConfiguration: {expression: a}, jsonPatch: {}"), at + ".jsonPatch: Forbidden: must not be specified when patchType is ApplyConfiguration"},
		kindstest.BadObject{policyText(right + ", reinvocationPolicy: Often"), `spec.reinvocationPolicy: Unsupported value: "Often": supported values: "IfNeeded", "Never"`},
		kindstest.BadObject{"{metadata: {name: a}, spec: {matchConstraints: {resourceRules: [{operations: [DELETE], apiGroups: [''], apiVersions: [v1], resources: [pods]}]}, " + right + "}}",
			`spec.matchConstraints.resourceRules[0].operations[0]: Unsupported value: "DELETE": supported values: "*", "CONNECT", "CREATE", "UPDATE"`},
	)
	kindstest.CheckChanges(t, policyText(right),
		kindstest.Change[*admissionv1.MutatingAdmissionPolicy]{Change: func(p *admissionv1.MutatingAdmissionPolicy) { p.Spec.ReinvocationPolicy = "IfNeeded" }, Generation: 2})
	if got := kindstest.PrintTable[*admissionv1.MutatingAdmissionPolicy](t, policyText(right)); got != "NAME|MUTATIONS|PARAMKIND|AGE\na.b|1|<unset>|3h" {
		t.Error(got)
	}
}

func bindingText(rest string) string {
	return "{metadata: {name: a}, spec: {policyName: p, " + strings.TrimPrefix(rest, ", ") + "}}"
}

// bindingFaults are those that both kinds of bindings can have; rest makes one right.
func bindingFaults(rest string) []kindstest.BadObject {
	ref := func(r string) string { return bindingText(rest + ", paramRef: {" + r + "}") }
	const at, deny = "spec.paramRef", ", parameterNotFoundAction: Deny"
	return append([]kindstest.BadObject{
		{bindingText(rest), ""},
		{ref("selector: {matchLabels: {a: b}}" + deny), ""},
		{"{metadata: {name: a}, spec: {" + rest + "}}", "spec.policyName: Required value"},
		{"{metadata: {name: a}, spec: {policyName: P, " + rest + "}}", kindstest.InvalidText("spec.policyName", "P", kindstest.NotSubdomain)},
		{ref("name: a/b" + deny), kindstest.InvalidText(at+".name", "a/b", "may not contain '/'")},
		{ref("name: a, selector: {}" + deny), at + ".name: Forbidden: name and selector are mutually exclusive\n" + at + ".selector: Forbidden: name and selector are mutually exclusive"},
		{ref("namespace: a" + deny), at + ": Required value: one of name or selector must be specified"},
		{ref("selector: {matchLabels: {a: b c}}" + deny), kindstest.InvalidText(at+".selector.matchLabels", "b c", validation.IsValidLabelValue("b c")[0])},
		{ref("name: a"), at + ".parameterNotFoundAction: Required value"},
		{ref("name: a, parameterNotFoundAction: Ask"), at + `.parameterNotFoundAction: Unsupported value: "Ask": supported values: "Deny", "Allow"`},
	}, matchFaults(func(m string) string { return bindingText(rest + ", matchResources: {" + m + "}") }, "spec.matchResources")...)
}

func TestPolicyBindings(t *testing.T) {
	const right = "validationActions: [Deny]"
	kindstest.CheckRefused[*admissionv1.ValidatingAdmissionPolicyBinding](t, bindingFaults(right)...)
	kindstest.CheckRefused[*admissionv1.MutatingAdmissionPolicyBinding](t, bindingFaults("")...)
	const at = "spec.validationActions"
	kindstest.CheckRefused[*admissionv1.ValidatingAdmissionPolicyBinding](t,
		kindstest.BadObject{bindingText(""), at + ": Required value: at least one validation action is required"},
		kindstest.BadObject{bindingText("validationActions: [Log]"), at + `[0]: Unsupported value: "Log": supported values: "Audit", "Deny", "Warn"`},
		kindstest.BadObject{bindingText("validationActions: [Audit, Audit]"), at + `[1]: Duplicate value: "Audit"`},
		kindstest.BadObject{bindingText("validationActions: [Deny, Warn]"), at + `: Invalid value: ["Deny","Warn"]: must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)`},
	)
	kindstest.CheckChanges(t, bindingText(right),
		kindstest.Change[*admissionv1.ValidatingAdmissionPolicyBinding]{Change: func(b *admissionv1.ValidatingAdmissionPolicyBinding) { b.Spec.PolicyName = "q" }, Generation: 2},
		kindstest.Change[*admissionv1.ValidatingAdmissionPolicyBinding]{Change: func(b *admissionv1.ValidatingAdmissionPolicyBinding) { b.Labels = map[string]string{"a": "b"} }, Generation: 1})
	for ref, want := range map[string]string{"": "<unset>", "name: o": "*/o", "name: o, namespace: m": "m/o", "selector: {matchLabels: {a: b}}": "&LabelSelector{MatchLabels:map[string]string{a: b,},MatchExpressions:[]LabelSelectorRequirement{},}"} {
		text := bindingText(right)
		if ref != "" {
			text = bindingText("paramRef: {" + ref + "}")
		}
		if got := kindstest.PrintTable[*admissionv1.ValidatingAdmissionPolicyBinding](t, text); got != "NAME|POLICYNAME|PARAMREF|AGE\na|p|"+want+"|3h" {
			t.Error(got)
		}
		if got := kindstest.PrintTable[*admissionv1.MutatingAdmissionPolicyBinding](t, strings.Replace(text, right, "", 1)); got != "NAME|POLICYNAME|PARAMREF|AGE\na|p|"+want+"|3h" {
			t.Error(got)
		}
	}
}
