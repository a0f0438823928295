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

// policyText returns a policy for pods, with the fields in rest.
func policyText(rest string) string {
	return "{metadata: {name: a.b}, spec: {" + constraints + ", " + rest + "}}"
}

// matchFaults returns objects with errors in match rules, which are in the field at. text returns
// an object with the match rules.
func matchFaults(text func(match string) string, at string) []kindstest.BadObject {
	rule := at + ".resourceRules[0]"
	return []kindstest.BadObject{
		{Text: text("matchPolicy: Near, resourceRules: [{" + podRule + "}]"),
			Want: at + `.matchPolicy: Unsupported value: "Near": supported values: "Equivalent", "Exact"`},
		{Text: text("namespaceSelector: {matchExpressions: [{key: a, operator: Near}]}, resourceRules: [{" + podRule +
			"}]"), Want: at + `.namespaceSelector.matchExpressions[0].operator: Invalid value: "Near": not a valid ` +
			`selector operator`},
		{Text: text("objectSelector: {matchLabels: {a: b c}}, resourceRules: [{" + podRule + "}]"),
			Want: kindstest.InvalidText(at+".objectSelector.matchLabels", "b c",
				validation.IsValidLabelValue("b c")[0])},
		{Text: text("resourceRules: [{" + podRule + ", resourceNames: [a, a, b/c]}]"),
			Want: rule + `.resourceNames[1]: Duplicate value: "a"` + "\n" +
				kindstest.InvalidText(rule+".resourceNames[2]", "b/c", "may not contain '/'")},
		{Text: text("resourceRules: [{" + podRule + "}], excludeResourceRules: [{}]"),
			Want: at + ".excludeResourceRules[0].operations: Required value\n" + at +
				".excludeResourceRules[0].apiGroups: Required value\n" +
				at + ".excludeResourceRules[0].apiVersions: Required value\n" + at +
				".excludeResourceRules[0].resources: Required value"},
	}
}

// policyFaults returns the errors that both kinds of policies can have. rest has the required
// fields of one kind.
func policyFaults(rest string) []kindstest.BadObject {
	kind := func(p string) string { return policyText(rest + ", paramKind: {" + p + "}") }
	variable := func(v string) string { return policyText(rest + ", variables: [{" + v + "}]") }
	const version = "spec.paramKind.apiVersion"
	return append([]kindstest.BadObject{
		{Text: policyText(rest), Want: ""},
		{Text: kind("apiVersion: x.io/v1, kind: Limit"), Want: ""},
		{Text: "{metadata: {name: a}, spec: {" + rest + "}}", Want: "spec.matchConstraints: Required value"},
		{Text: "{metadata: {name: a}, spec: {matchConstraints: {}, " + rest + "}}",
			Want: "spec.matchConstraints.resourceRules: Required value"},
		{Text: policyText(rest + ", failurePolicy: Retry"),
			Want: `spec.failurePolicy: Unsupported value: "Retry": supported values: "Fail", "Ignore"`},
		{Text: kind("kind: Limit"), Want: version + ": Required value"},
		{Text: kind("apiVersion: a/b/c, kind: Limit"),
			Want: kindstest.InvalidText(version, "a/b/c", "unexpected GroupVersion string: a/b/c")},
		{Text: kind("apiVersion: X/v1, kind: Limit"),
			Want: kindstest.InvalidText(version, "X", kindstest.NotSubdomain)},
		{Text: kind("apiVersion: x/, kind: Limit"),
			Want: kindstest.InvalidText(version, "x/", "version must be specified")},
		{Text: kind("apiVersion: x/1, kind: Limit"),
			Want: kindstest.InvalidText(version, "1", validation.IsDNS1035Label("1")[0])},
		{Text: kind("apiVersion: v1"), Want: "spec.paramKind.kind: Required value"},
		{Text: kind("apiVersion: v1, kind: a_b"),
			Want: kindstest.InvalidText("spec.paramKind.kind", "a_b",
				"may have mixed case, but should otherwise match: "+validation.IsDNS1035Label("a_b")[0])},
		{Text: variable("expression: '1'"), Want: "spec.variables[0].name: Required value: name is not specified"},
		{Text: variable("name: a-b, expression: '1'"),
			Want: kindstest.InvalidText("spec.variables[0].name", "a-b", "name is not a valid CEL identifier")},
		{Text: variable("name: while, expression: '1'"),
			Want: kindstest.InvalidText("spec.variables[0].name", "while", "name is not a valid CEL identifier")},
		{Text: variable("name: a, expression: ' '"),
			Want: "spec.variables[0].expression: Required value: expression is not specified"},
		{Text: policyText(rest + ", matchConditions: [{name: n}]"),
			Want: "spec.matchConditions[0].expression: Required value"},
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
		kindstest.BadObject{Text: policyText(""),
			Want: "spec.validations: Required value: validations or auditAnnotations must contain at least one item\n" +
				"spec.auditAnnotations: Required value: validations or auditAnnotations must contain " +
				"at least one item"},
		kindstest.BadObject{Text: one("message: m"),
			Want: at + ".expression: Required value: expression is not specified"},
		kindstest.BadObject{Text: one("expression: 'true', messageExpression: ' '"),
			Want: kindstest.InvalidText(at+".messageExpression", " ", "must be non-empty if specified")},
		kindstest.BadObject{Text: one("expression: 'true', message: ' '"),
			Want: kindstest.InvalidText(at+".message", " ", "message must be non-empty if specified")},
		kindstest.BadObject{Text: one(`expression: 'true', message: "a\nb"`),
			Want: kindstest.InvalidText(at+".message", `a\nb`, "message must not contain line breaks")},
		kindstest.BadObject{Text: one("expression: 'true', reason: NotFound"),
			Want: at + `.reason: Unsupported value: "NotFound": supported values: "Forbidden", "Invalid", ` +
				`"RequestEntityTooLarge"`},
		kindstest.BadObject{Text: note("{key: k, valueExpression: a}"), Want: ""},
		kindstest.BadObject{Text: note("{key: a b, valueExpression: a}"),
			Want: kindstest.InvalidText(key, "a.b/a b", validation.IsQualifiedName("a b")[0][len(""):])},
		kindstest.BadObject{Text: note("{key: k}"),
			Want: "spec.auditAnnotations[0].valueExpression: Required value: valueExpression is not specified"},
		kindstest.BadObject{Text: note("{key: k, valueExpression: " + long + "}"),
			Want: "spec.auditAnnotations[0].valueExpression: Required value: must not exceed 5120 bytes in length"},
		kindstest.BadObject{Text: note("{key: k, valueExpression: a}, {key: k, valueExpression: a}"),
			Want: `spec.auditAnnotations[1].key: Duplicate value: "k"`},
	)
	kindstest.CheckDefaults[*admissionv1.ValidatingAdmissionPolicy](t, policyText(right),
		"{spec: {matchConstraints: {resourceRules: [{"+podRule+
			", scope: '*'}], matchPolicy: Equivalent, namespaceSelector: {}, objectSelector: {}}, "+right+
			", failurePolicy: Fail}}")
	kindstest.CheckChanges(t, policyText(right),
		kindstest.Change[*admissionv1.ValidatingAdmissionPolicy]{
			Change: func(p *admissionv1.ValidatingAdmissionPolicy) {
				p.Spec.FailurePolicy = new(admissionv1.Ignore)
			}, Generation: 2},
		kindstest.Change[*admissionv1.ValidatingAdmissionPolicy]{Sub: "status",
			Change: func(p *admissionv1.ValidatingAdmissionPolicy) {
				p.Spec.Validations = nil
				p.Status.TypeChecking = &admissionv1.TypeChecking{
					ExpressionWarnings: []admissionv1.ExpressionWarning{{FieldRef: " "}}}
				p.Status.Conditions = []metav1.Condition{{Type: "Ready", Status: "Perhaps", Reason: "r",
					LastTransitionTime: metav1.NewTime(kindstest.Now)}}
			}, Want: "status.typeChecking.expressionWarnings[0].warning: Required " +
				"value\nstatus.typeChecking.expressionWarnings[0].fieldRef: Required value\n" +
				`status.conditions[0].status: Unsupported value: "Perhaps": supported values: "False", ` +
				`"True", "Unknown"`,
			Generation: 1},
	)
	for text, want := range map[string]string{policyText(right): "a.b|1|<unset>|3h",
		policyText(right + ", paramKind: {apiVersion: x/v1, kind: K}"): "a.b|1|x/v1/K|3h"} {
		if got := kindstest.PrintTable[*admissionv1.ValidatingAdmissionPolicy](t, text); got !=
			"NAME|VALIDATIONS|PARAMKIND|AGE\n"+want {
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
		kindstest.BadObject{Text: policyText(""),
			Want: "spec.mutations: Required value: mutations must contain at least one item"},
		kindstest.BadObject{Text: one("jsonPatch: {expression: a}"), Want: at + ".patchType: Required value"},
		kindstest.BadObject{Text: one("patchType: MergePatch"),
			Want: at + `.patchType: Unsupported value: "MergePatch": supported values: ` +
				`"ApplyConfiguration", "JSONPatch"`},
		kindstest.BadObject{Text: one("patchType: JSONPatch"),
			Want: at + ".jsonPatch: Required value: must be specified when patchType is JSONPatch"},
		kindstest.BadObject{Text: one("patchType: JSONPatch, jsonPatch: {}"),
			Want: at + ".jsonPatch.expression: Required value: expression is not specified"},
		kindstest.BadObject{Text: one("patchType: JSONPatch, jsonPatch: {expression: a}, applyConfiguration: {}"),
			Want: at + ".applyConfiguration: Forbidden: must not be specified when patchType is JSONPatch"},
		kindstest.BadObject{Text: one("patchType: ApplyConfiguration"),
			Want: at + ".applyConfiguration: Required value: must be specified when patchType is ApplyConfiguration"},
		kindstest.BadObject{Text: one("patchType: ApplyConfiguration, applyConfiguration: {expression: a}, " +
			"jsonPatch: {}"), Want: at + ".jsonPatch: Forbidden: must not be specified when patchType is " +
			"ApplyConfiguration"},
		kindstest.BadObject{Text: policyText(right + ", reinvocationPolicy: Often"),
			Want: `spec.reinvocationPolicy: Unsupported value: "Often": supported values: "IfNeeded", "Never"`},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {matchConstraints: {resourceRules: [{operations: " +
			"[DELETE], apiGroups: [''], apiVersions: [v1], resources: [pods]}]}, " + right + "}}",
			Want: `spec.matchConstraints.resourceRules[0].operations[0]: Unsupported value: "DELETE": supported ` +
				`values: "*", "CONNECT", "CREATE", "UPDATE"`},
	)
	kindstest.CheckChanges(t, policyText(right),
		kindstest.Change[*admissionv1.MutatingAdmissionPolicy]{Change: func(p *admissionv1.MutatingAdmissionPolicy) {
			p.Spec.ReinvocationPolicy = "IfNeeded"
		}, Generation: 2})
	if got := kindstest.PrintTable[*admissionv1.MutatingAdmissionPolicy](t, policyText(right)); got !=
		"NAME|MUTATIONS|PARAMKIND|AGE\na.b|1|<unset>|3h" {
		t.Error(got)
	}
}

func bindingText(rest string) string {
	return "{metadata: {name: a}, spec: {policyName: p, " + strings.TrimPrefix(rest, ", ") + "}}"
}

// bindingFaults returns the errors that both kinds of bindings can have. rest has the required
// fields of one kind.
func bindingFaults(rest string) []kindstest.BadObject {
	ref := func(r string) string { return bindingText(rest + ", paramRef: {" + r + "}") }
	const at, deny = "spec.paramRef", ", parameterNotFoundAction: Deny"
	return append([]kindstest.BadObject{
		{Text: bindingText(rest), Want: ""},
		{Text: ref("selector: {matchLabels: {a: b}}" + deny), Want: ""},
		{Text: "{metadata: {name: a}, spec: {" + rest + "}}", Want: "spec.policyName: Required value"},
		{Text: "{metadata: {name: a}, spec: {policyName: P, " + rest + "}}",
			Want: kindstest.InvalidText("spec.policyName", "P", kindstest.NotSubdomain)},
		{Text: ref("name: a/b" + deny), Want: kindstest.InvalidText(at+".name", "a/b", "may not contain '/'")},
		{Text: ref("name: a, selector: {}" + deny),
			Want: at + ".name: Forbidden: name and selector are mutually exclusive\n" + at +
				".selector: Forbidden: name and selector are mutually exclusive"},
		{Text: ref("namespace: a" + deny), Want: at + ": Required value: one of name or selector must be specified"},
		{Text: ref("selector: {matchLabels: {a: b c}}" + deny),
			Want: kindstest.InvalidText(at+".selector.matchLabels", "b c", validation.IsValidLabelValue("b c")[0])},
		{Text: ref("name: a"), Want: at + ".parameterNotFoundAction: Required value"},
		{Text: ref("name: a, parameterNotFoundAction: Ask"),
			Want: at + `.parameterNotFoundAction: Unsupported value: "Ask": supported values: "Deny", "Allow"`},
	}, matchFaults(func(m string) string {
		return bindingText(rest + ", matchResources: {" + m + "}")
	}, "spec.matchResources")...)
}

func TestPolicyBindings(t *testing.T) {
	const right = "validationActions: [Deny]"
	kindstest.CheckRefused[*admissionv1.ValidatingAdmissionPolicyBinding](t, bindingFaults(right)...)
	kindstest.CheckRefused[*admissionv1.MutatingAdmissionPolicyBinding](t, bindingFaults("")...)
	const at = "spec.validationActions"
	kindstest.CheckRefused[*admissionv1.ValidatingAdmissionPolicyBinding](t,
		kindstest.BadObject{Text: bindingText(""),
			Want: at + ": Required value: at least one validation action is required"},
		kindstest.BadObject{Text: bindingText("validationActions: [Log]"),
			Want: at + `[0]: Unsupported value: "Log": supported values: "Audit", "Deny", "Warn"`},
		kindstest.BadObject{Text: bindingText("validationActions: [Audit, Audit]"),
			Want: at + `[1]: Duplicate value: "Audit"`},
		kindstest.BadObject{Text: bindingText("validationActions: [Deny, Warn]"),
			Want: at + `: Invalid value: ["Deny","Warn"]: must not contain both Deny and Warn (repeating the same ` +
				`validation failure information in the API response and headers serves no purpose)`},
	)
	kindstest.CheckChanges(t, bindingText(right),
		kindstest.Change[*admissionv1.ValidatingAdmissionPolicyBinding]{
			Change: func(b *admissionv1.ValidatingAdmissionPolicyBinding) { b.Spec.PolicyName = "q" }, Generation: 2},
		kindstest.Change[*admissionv1.ValidatingAdmissionPolicyBinding]{
			Change: func(b *admissionv1.ValidatingAdmissionPolicyBinding) {
				b.Labels = map[string]string{"a": "b"}
			}, Generation: 1})
	for ref, want := range map[string]string{"": "<unset>", "name: o": "*/o", "name: o, namespace: m": "m/o",
		"selector: {matchLabels: {a: b}}": "&LabelSelector{MatchLabels:map[string]string{a: " +
			"b,},MatchExpressions:[]LabelSelectorRequirement{},}"} {
		text := bindingText(right)
		if ref != "" {
			text = bindingText("paramRef: {" + ref + "}")
		}
		if got := kindstest.PrintTable[*admissionv1.ValidatingAdmissionPolicyBinding](t, text); got !=
			"NAME|POLICYNAME|PARAMREF|AGE\na|p|"+want+"|3h" {
			t.Error(got)
		}
		if got := kindstest.PrintTable[*admissionv1.MutatingAdmissionPolicyBinding](t,
			strings.Replace(text, right, "", 1)); got != "NAME|POLICYNAME|PARAMREF|AGE\na|p|"+want+"|3h" {
			t.Error(got)
		}
	}
}
