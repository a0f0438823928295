package admissionregistration_test

import (
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

const (
	hookRest = "sideEffects: None, admissionReviewVersions: [v1]"
	hookURL  = "clientConfig: {url: 'https://a.b/c'}"
	podRule  = "operations: [CREATE], apiGroups: [''], apiVersions: [v1], resources: [pods]"
)

func hooks(list string) string { return "{metadata: {name: a}, webhooks: [" + list + "]}" }

// hook returns a configuration with one webhook, valid except for the fields in rest.
func hook(rest string) string { return hooks("{name: a.b.c, " + rest + "}") }

func hookRules(rule string) string {
	return hook(hookRest + ", " + hookURL + ", rules: [{" + rule + "}]")
}

var webhookFaults = func() []kindstest.BadObject {
	const at, rule = "webhooks[0]", "webhooks[0].rules[0]"
	url := func(u string) string { return hook(hookRest + ", clientConfig: {url: '" + u + "'}") }
	service := func(s string) string { return hook(hookRest + ", clientConfig: {service: {" + s + "}}") }
	only := func(what string) string { return hook(hookRest + ", " + hookURL + ", " + what) }
	resources := func(r string) string {
		return hookRules("operations: [CREATE], apiGroups: [''], apiVersions: [v1], resources: [" + r + "]")
	}
	const form = "; desired format: https://host[/path]"
	const here = at + ".clientConfig.service"
	return []kindstest.BadObject{
		{Text: hookRules(podRule), Want: ""},
		{Text: hooks(""), Want: ""},
		{Text: service("name: s, namespace: n, path: /a/b"), Want: ""},
		{Text: resources("pods/*, '*/scale', deployments"), Want: ""},
		{Text: hooks("{" + hookRest + ", " + hookURL + "}"), Want: at + ".name: Required value"},
		{Text: hooks("{name: a.b, " + hookRest + ", " + hookURL + "}"),
			Want: kindstest.InvalidText(at+".name", "a.b",
				"should be a domain with at least three segments separated by dots")},
		{Text: hooks("{name: a.b.c, " + hookRest + ", " + hookURL + "}, {name: a.b.c, " + hookRest + ", " + hookURL +
			"}"), Want: `webhooks[1].name: Duplicate value: "a.b.c"`},
		{Text: hook("admissionReviewVersions: [v1], " + hookURL),
			Want: at + ".sideEffects: Required value: must specify one of None, NoneOnDryRun"},
		{Text: hook("sideEffects: Some, admissionReviewVersions: [v1], " + hookURL),
			Want: at + `.sideEffects: Unsupported value: "Some": supported values: "None", "NoneOnDryRun"`},
		{Text: hook("sideEffects: None, " + hookURL),
			Want: at + ".admissionReviewVersions: Required value: must specify one of v1, v1beta1"},
		{Text: hook("sideEffects: None, admissionReviewVersions: [v2], " + hookURL),
			Want: at + `.admissionReviewVersions: Invalid value: ["v2"]: must include at least one of v1, v1beta1`},
		{Text: hook("sideEffects: None, admissionReviewVersions: [v1, v1], " + hookURL),
			Want: kindstest.InvalidText(at+".admissionReviewVersions[1]", "v1", "duplicate version")},
		{Text: hook("sideEffects: None, admissionReviewVersions: [v1, V2], " + hookURL),
			Want: kindstest.InvalidText(at+".admissionReviewVersions[1]", "V2", validation.IsDNS1035Label("V2")[0])},
		{Text: hook(hookRest), Want: at + ".clientConfig: Required value: exactly one of url or service is required"},
		{Text: hook(hookRest + ", clientConfig: {url: 'https://a', service: {name: a, namespace: b}}"),
			Want: at + ".clientConfig: Required value: exactly one of url or service is required"},
		{Text: url("http://a.b"), Want: kindstest.InvalidText(at+".clientConfig.url", "http",
			"'https' is the only allowed URL scheme"+form)},
		{Text: url("https:///a"), Want: kindstest.InvalidText(at+".clientConfig.url", "",
			"host must be specified"+form)},
		{Text: url("https://u:p@a/b?c=d#e"), Want: kindstest.InvalidText(at+".clientConfig.url", "u:p",
			"user information is not permitted in the URL") + "\n" +
			kindstest.InvalidText(at+".clientConfig.url", "e", "fragments are not permitted in the URL") + "\n" +
			kindstest.InvalidText(at+".clientConfig.url", "c=d", "query parameters are not permitted in the URL")},
		{Text: url("https://a b"), Want: at + `.clientConfig.url: Required value: url must be a valid URL: parse ` +
			`"https://a b": invalid character " " in host name` + form},
		{Text: service("namespace: n"), Want: here + ".name: Required value"},
		{Text: service("name: s"), Want: here + ".namespace: Required value"},
		{Text: service("name: s, namespace: n, port: 0"),
			Want: here + ".port: Invalid value: 0: port is not valid: must be between 1 and 65535, inclusive"},
		{Text: service("name: s, namespace: n, path: a"),
			Want: kindstest.InvalidText(here+".path", "a", "must start with a '/'") + "\n" +
				kindstest.InvalidText(here+".path", "a", "segment[0] may not be empty")},
		{Text: service("name: s, namespace: n, path: //"),
			Want: kindstest.InvalidText(here+".path", "//", "segment[0] may not be empty")},
		{Text: service("name: s, namespace: n, path: /a//B"),
			Want: kindstest.InvalidText(here+".path", "/a//B", "segment[1] may not be empty") + "\n" +
				kindstest.InvalidText(here+".path", "/a//B", "segment[2]: "+kindstest.NotSubdomain)},
		{Text: only("failurePolicy: Retry"), Want: at +
			`.failurePolicy: Unsupported value: "Retry": supported values: "Fail", "Ignore"`},
		{Text: only("matchPolicy: Near"), Want: at +
			`.matchPolicy: Unsupported value: "Near": supported values: "Equivalent", "Exact"`},
		{Text: only("timeoutSeconds: 31"), Want: at +
			".timeoutSeconds: Invalid value: 31: the timeout value must be between 1 and 30 seconds"},
		{Text: only("timeoutSeconds: 0"), Want: at +
			".timeoutSeconds: Invalid value: 0: the timeout value must be between 1 and 30 seconds"},
		{Text: only("namespaceSelector: {matchExpressions: [{key: a, operator: Near}]}"),
			Want: at + `.namespaceSelector.matchExpressions[0].operator: Invalid value: "Near": not a valid ` +
				`selector operator`},
		{Text: only("objectSelector: {matchLabels: {'a b': c}}"),
			Want: kindstest.InvalidText(at+".objectSelector.matchLabels", "a b", validation.IsQualifiedName("a b")[0])},
		{Text: hookRules("apiGroups: [''], apiVersions: [v1], resources: [pods]"),
			Want: rule + ".operations: Required value"},
		{Text: hookRules("operations: ['*', CREATE], apiGroups: [''], apiVersions: [v1], resources: [pods]"),
			Want: rule + `.operations: Invalid value: ["*","CREATE"]: if '*' is present, must not specify ` +
				`other operations`},
		{Text: hookRules("operations: [READ], apiGroups: [''], apiVersions: [v1], resources: [pods]"),
			Want: rule + `.operations[0]: Unsupported value: "READ": supported values: "*", "CONNECT", "CREATE", ` +
				`"DELETE", "UPDATE"`},
		{Text: hookRules("operations: [CREATE]"),
			Want: rule + ".apiGroups: Required value\n" + rule + ".apiVersions: Required value\n" + rule +
				".resources: Required value"},
		{Text: hookRules("operations: [CREATE], apiGroups: [a, '*'], apiVersions: ['*', v1, ''], resources: [pods]"),
			Want: rule + `.apiGroups: Invalid value: ["a","*"]: if '*' is present, must not specify other API groups` +
				"\n" +
				rule + `.apiVersions: Invalid value: ["*","v1",""]: if '*' is present, must not specify other API ` +
				`versions` + "\n" + rule + ".apiVersions[2]: Required value"},
		{Text: hookRules(podRule + ", scope: World"),
			Want: rule + `.scope: Unsupported value: "World": supported values: "*", "Cluster", "Namespaced"`},
		{Text: resources("''"), Want: rule + ".resources[0]: Required value"},
		{Text: resources("'pods/*', pods/status"),
			Want: kindstest.InvalidText(rule+".resources[1]", "pods/status",
				"if 'pods/*' is present, must not specify pods/status")},
		{Text: resources("'*/status', pods/status"),
			Want: kindstest.InvalidText(rule+".resources[1]", "pods/status",
				"if '*/status' is present, must not specify pods/status")},
		{Text: resources("'*/*', pods"), Want: rule +
			`.resources: Invalid value: ["*/*","pods"]: if '*/*' is present, must not specify other resources`},
		{Text: resources("'*', pods"), Want: rule +
			`.resources: Invalid value: ["*","pods"]: if '*' is present, must not specify other resources ` +
			`without subresources`},
		{Text: only("matchConditions: [{name: n}]"), Want: at + ".matchConditions[0].expression: Required value"},
		{Text: only("matchConditions: [{expression: 'true'}]"), Want: at + ".matchConditions[0].name: Required value"},
		{Text: only("matchConditions: [{name: a b, expression: 'true'}]"),
			Want: kindstest.InvalidText(at+".matchConditions[0].name", "a b", validation.IsQualifiedName("a b")[0])},
		{Text: only("matchConditions: [{name: m, expression: 'true'}, {name: m, expression: 'true'}]"),
			Want: at + `.matchConditions[1].name: Duplicate value: "m"`},
		{Text: only("matchConditions: [" + strings.Repeat("{name: m, expression: 'true'}, ", 65) + "]"),
			Want: at + ".matchConditions: Too many: 65: must have at most 64 items"},
	}
}()

func TestWebhookValidation(t *testing.T) {
	kindstest.CheckRefused[*admissionv1.ValidatingWebhookConfiguration](t, webhookFaults...)
	kindstest.CheckRefused[*admissionv1.MutatingWebhookConfiguration](t, webhookFaults...)
	kindstest.CheckRefused[*admissionv1.MutatingWebhookConfiguration](t,
		kindstest.BadObject{Text: hook(hookRest + ", " + hookURL + ", reinvocationPolicy: Often"),
			Want: `webhooks[0].reinvocationPolicy: Unsupported value: "Often": supported values: "IfNeeded", "Never"`})
}

func TestWebhookDefaults(t *testing.T) {
	const given = "clientConfig: {service: {name: s, namespace: x}}, " + hookRest + ", rules: [{" + podRule + "}]"
	const filled = "clientConfig: {service: {name: s, namespace: x, port: 443}}, " + hookRest + ", rules: [{" +
		podRule + ", scope: '*'}], " +
		"failurePolicy: Fail, matchPolicy: Equivalent, namespaceSelector: {}, objectSelector: {}, timeoutSeconds: 10"
	kindstest.CheckDefaults[*admissionv1.ValidatingWebhookConfiguration](t, hook(given), hook(filled))
	kindstest.CheckDefaults[*admissionv1.MutatingWebhookConfiguration](t, hook(given),
		hook(filled+", reinvocationPolicy: Never"))
}

func TestWebhookUpdate(t *testing.T) {
	kindstest.CheckChanges(t, hookRules(podRule),
		kindstest.Change[*admissionv1.ValidatingWebhookConfiguration]{
			Change: func(c *admissionv1.ValidatingWebhookConfiguration) {
				c.Labels = map[string]string{"a": "b"}
			}, Generation: 1},
		kindstest.Change[*admissionv1.ValidatingWebhookConfiguration]{
			Change: func(c *admissionv1.ValidatingWebhookConfiguration) { c.Webhooks = nil }, Generation: 2},
	)
	// What was stored when more side effects were allowed may stay.
	kindstest.CheckChanges(t, hook("sideEffects: Unknown, admissionReviewVersions: [v1], "+hookURL),
		kindstest.Change[*admissionv1.MutatingWebhookConfiguration]{
			Change: func(c *admissionv1.MutatingWebhookConfiguration) {
				c.Webhooks[0].TimeoutSeconds = new(int32(5))
			}, Generation: 2})
	for _, got := range []string{kindstest.PrintTable[*admissionv1.ValidatingWebhookConfiguration](t,
		hookRules(podRule)), kindstest.PrintTable[*admissionv1.MutatingWebhookConfiguration](t, hookRules(podRule))} {
		if got != "NAME|WEBHOOKS|AGE\na|1|3h" {
			t.Error(got)
		}
	}
}

// Expressions are handed to the compiler with what they are for, and what it finds is a cause like the others.
func TestExpressionsAreCompiled(t *testing.T) {
	var seen []expressions.Expression
	all := kinds.All(kinds.WithCompiler(func(list []expressions.Expression) field.ErrorList {
		seen = append(seen, list...)
		return field.ErrorList{field.Invalid(list[0].At, list[0].Text, "compilation failed")}
	}))
	c := kindstest.Load[*admissionv1.ValidatingWebhookConfiguration](t,
		hook(hookRest+", "+hookURL+", matchConditions: [{name: m, expression: ' 1 + '}]"))
	if got := kindstest.JoinErrors(all.ByType(c).ValidateObject(c, nil)); got !=
		kindstest.InvalidText("webhooks[0].matchConditions[0].expression", "1 +", "compilation failed") {
		t.Error(got)
	}
	if len(seen) != 1 || seen[0].Use != expressions.MatchCondition || seen[0].Params {
		t.Errorf("compiled %+v", seen)
	}
	seen = nil
	p := kindstest.Load[*admissionv1.ValidatingAdmissionPolicy](t,
		policyText("paramKind: {apiVersion: v1, kind: ConfigMap}, variables: [{name: v, expression: '1'}], "+
			"validations: [{expression: a, messageExpression: b}], auditAnnotations: [{key: k, valueExpression: c}]"))
	all.ByType(p).ValidateObject(p, nil)
	var uses []expressions.Use
	for _, e := range seen {
		uses = append(uses, e.Use)
		if !e.Params {
			t.Errorf("%s may use params", e.Text)
		}
	}
	if len(uses) != 4 || uses[0] != expressions.Variable || seen[0].Name != "v" || uses[1] != expressions.Validation ||
		uses[2] != expressions.Message || uses[3] != expressions.AuditAnnotation {
		t.Errorf("compiled %+v", seen)
	}
}
