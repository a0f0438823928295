package flowcontrol_test

import (
	"strings"
	"testing"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/flowcontrol"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

const (
	flowUser  = "subjects: [{kind: User, user: {name: u}}]"
	flowReads = "resourceRules: [{verbs: [get], apiGroups: [''], resources: [pods], namespaces: [a]}]"
)

func flow(rest string) string {
	return "{metadata: {name: a}, spec: {priorityLevelConfiguration: {name: l}, " + rest + "}}"
}

func flowRule(rule string) string { return flow("rules: [{" + rule + "}]") }

func TestFlowSchemaValidation(t *testing.T) {
	subject := func(s string) string { return flowRule(flowReads + ", subjects: [{" + s + "}]") }
	reads := func(r string) string { return flowRule(flowUser + ", resourceRules: [{" + r + "}]") }
	urls := func(u string) string {
		return flowRule(flowUser + ", nonResourceRules: [{verbs: ['*'], nonResourceURLs: [" + u + "]}]")
	}
	const who, what, where = "spec.rules[0].subjects[0]", "spec.rules[0].resourceRules[0]",
		"spec.rules[0].nonResourceRules[0]"
	const full = "verbs: [get], apiGroups: [''], resources: [pods]"
	kindstest.CheckRefused[*flowcontrolv1.FlowSchema](t,
		kindstest.BadObject{Text: flowRule(flowUser + ", " + flowReads), Want: ""},
		kindstest.BadObject{Text: flow("rules: []"), Want: ""},
		kindstest.BadObject{Text: urls("'*'"), Want: ""},
		kindstest.BadObject{Text: urls("/a/*, /"), Want: ""},
		kindstest.BadObject{Text: flow("matchingPrecedence: -1"),
			Want: "spec.matchingPrecedence: Invalid value: -1: must be a positive value"},
		kindstest.BadObject{Text: flow("matchingPrecedence: 10001"),
			Want: "spec.matchingPrecedence: Invalid value: 10001: must not be greater than 10000"},
		kindstest.BadObject{Text: flow("matchingPrecedence: 1"),
			Want: "spec.matchingPrecedence: Invalid value: 1: only the schema named 'exempt' may have " +
				"matchingPrecedence 1"},
		kindstest.BadObject{Text: flow("distinguisherMethod: {type: ByHat}"),
			Want: `spec.distinguisherMethod.type: Unsupported value: "ByHat": supported values: ` +
				`"ByNamespace", "ByUser"`},
		kindstest.BadObject{Text: "{metadata: {name: a}}",
			Want: "spec.priorityLevelConfiguration.name: Required value: must reference a priority level"},
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {priorityLevelConfiguration: {name: L}}}",
			Want: kindstest.InvalidText("spec.priorityLevelConfiguration.name", "L", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: flowRule(flowReads),
			Want: "spec.rules[0].subjects: Required value: subjects must contain at least one value"},
		kindstest.BadObject{Text: flowRule(flowUser),
			Want: "spec.rules[0]: Required value: at least one of resourceRules and nonResourceRules has " +
				"to be non-empty"},
		kindstest.BadObject{Text: subject("kind: Robot"),
			Want: who + `.kind: Unsupported value: "Robot": supported values: "Group", "ServiceAccount", "User"`},
		kindstest.BadObject{Text: subject("kind: User"),
			Want: who + ".user: Required value: user is required when subject kind is 'User'"},
		kindstest.BadObject{Text: subject("kind: Group"),
			Want: who + ".group: Required value: group is required when subject kind is 'Group'"},
		kindstest.BadObject{Text: subject("kind: ServiceAccount"),
			Want: who + ".serviceAccount: Required value: serviceAccount is required when subject kind is " +
				"'ServiceAccount'"},
		kindstest.BadObject{Text: subject("kind: User, user: {}"), Want: who + ".user.name: Required value"},
		kindstest.BadObject{Text: subject("kind: Group, group: {}"), Want: who + ".group.name: Required value"},
		kindstest.BadObject{Text: subject("kind: User, user: {name: u}, group: {name: g}, serviceAccount: {name: " +
			"s, namespace: a}"),
			Want: who + ".serviceAccount: Forbidden: serviceAccount is forbidden when subject kind is not " +
				"'ServiceAccount'\n" + who + ".group: Forbidden: group is forbidden when subject kind is not 'Group'"},
		kindstest.BadObject{Text: subject("kind: Group, group: {name: g}, user: {name: u}"),
			Want: who + ".user: Forbidden: user is forbidden when subject kind is not 'User'"},
		kindstest.BadObject{Text: subject("kind: ServiceAccount, serviceAccount: {}"),
			Want: who + ".serviceAccount.name: Required value\n" + who +
				".serviceAccount.namespace: Required value: must specify namespace for service account"},
		kindstest.BadObject{Text: subject("kind: ServiceAccount, serviceAccount: {name: S, namespace: A}"),
			Want: kindstest.InvalidText(who+".serviceAccount.name", "S", kindstest.NotSubdomain) + "\n" +
				kindstest.InvalidText(who+".serviceAccount.namespace", "A", kindstest.NotLabel)},
		kindstest.BadObject{Text: reads("apiGroups: [''], resources: [pods], namespaces: [a]"),
			Want: what + ".verbs: Required value: verbs must contain at least one value"},
		kindstest.BadObject{Text: reads("verbs: ['*', get], apiGroups: [''], resources: [pods], namespaces: [a]"),
			Want: what + `.verbs: Invalid value: ["*","get"]: if '*' is present, must not specify other verbs`},
		kindstest.BadObject{Text: reads("verbs: [read], apiGroups: [''], resources: [pods], namespaces: [a]"),
			Want: what + `.verbs: Unsupported value: ["read"]: supported values: "create", "delete", ` +
				`"deletecollection", "get", "list", "patch", "proxy", "update", "watch"`},
		kindstest.BadObject{Text: reads("verbs: [get], namespaces: [a]"),
			Want: what + ".apiGroups: Required value: resource rules must supply at least one api group\n" + what +
				".resources: Required value: resource rules must supply at least one resource"},
		kindstest.BadObject{Text: reads("verbs: [get], apiGroups: ['*', a], resources: ['*', b], namespaces: ['*', c]"),
			Want: what + `.apiGroups: Invalid value: ["*","a"]: if '*' is present, must not specify other api groups` +
				"\n" +
				what + `.resources: Invalid value: ["*","b"]: if '*' is present, must not specify other resources` +
				"\n" +
				what + `.namespaces: Invalid value: ["*","c"]: if '*' is present, must not specify other namespaces`},
		kindstest.BadObject{Text: reads(full), Want: what +
			".namespaces: Required value: resource rules that are not cluster scoped must supply at " +
			"least one namespace"},
		kindstest.BadObject{Text: reads(full + ", namespaces: [A]"),
			Want: kindstest.InvalidText(what+".namespaces[0]", "A",
				"each member of this list must be '*' or a DNS-1123 label; "+kindstest.NotLabel)},
		kindstest.BadObject{Text: urls(""), Want: where +
			".nonResourceURLs: Required value: nonResourceURLs must contain at least one value"},
		kindstest.BadObject{Text: urls("'*', /a"),
			Want: where + `.nonResourceURLs: Invalid value: ["*","/a"]: if '*' is present, must not specify other ` +
				`non-resource URLs`},
		kindstest.BadObject{Text: urls("'', a, '/a b', //a, '/*/a', /a*"),
			Want: kindstest.InvalidText(where+".nonResourceURLs[0]", "", "must not be empty") + "\n" +
				kindstest.InvalidText(where+".nonResourceURLs[1]", "a", "must start with slash") + "\n" +
				kindstest.InvalidText(where+".nonResourceURLs[2]", "/a b", "must not contain white-space") + "\n" +
				kindstest.InvalidText(where+".nonResourceURLs[3]", "//a", "must not contain double slash") + "\n" +
				kindstest.InvalidText(where+".nonResourceURLs[4]", "/*/a", "wildcard can only do suffix matching") +
				"\n" +
				kindstest.InvalidText(where+".nonResourceURLs[5]", "/a*", "wildcard can only do suffix matching")},
	)
}

func TestMandatoryFlowSchemas(t *testing.T) {
	for _, name := range []string{"exempt", "catch-all"} {
		f := &flowcontrolv1.FlowSchema{Spec: *flowcontrol.MandatoryFlowSchema(name)}
		f.Name = name
		k := kinds.All().ByType(f)
		if got := kindstest.JoinErrors(k.ValidateObject(f, nil)); got != "" {
			t.Errorf("%s: %s", name, got)
		}
		f.Spec.Rules = nil
		if got := kindstest.JoinErrors(k.ValidateObject(f, nil)); !strings.HasPrefix(got, "spec: Invalid value: ") ||
			!strings.HasSuffix(got, "spec of '"+name+"' must equal the fixed value") {
			t.Errorf("%s, changed: %s", name, got)
		}
	}
}

func TestFlowSchema(t *testing.T) {
	kindstest.CheckDefaults[*flowcontrolv1.FlowSchema](t, flow("rules: []"),
		"{spec: {priorityLevelConfiguration: {name: l}, matchingPrecedence: 1000}}")
	kindstest.CheckChanges(t, flow("rules: []"),
		kindstest.Change[*flowcontrolv1.FlowSchema]{Change: func(f *flowcontrolv1.FlowSchema) {
			f.Spec.MatchingPrecedence = 5
		}, Generation: 2},
		kindstest.Change[*flowcontrolv1.FlowSchema]{Sub: "status", Change: func(f *flowcontrolv1.FlowSchema) {
			f.Status.Conditions = []flowcontrolv1.FlowSchemaCondition{{Type: "A"}, {Type: "A"}, {}}
		}, Want: `status.conditions[1].type: Duplicate value: "A"` +
			"\nstatus.conditions[2].type: Required value: must not be empty", Generation: 1},
	)
	const head = "NAME|PRIORITYLEVEL|MATCHINGPRECEDENCE|DISTINGUISHERMETHOD|AGE|MISSINGPL\n"
	for text, want := range map[string]string{flow("rules: []"): "a|l|1000|<none>|3h|?",
		"{metadata: {name: a}, spec: {distinguisherMethod: {type: ByUser}, priorityLevelConfiguration: {name: l}}, " +
			"status: {conditions: [{type: Dangling, status: 'False'}]}}": "a|l|1000|ByUser|3h|False"} {
		if got := kindstest.PrintTable[*flowcontrolv1.FlowSchema](t, text); got != head+want {
			t.Error(got)
		}
	}
}

func level(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }

func TestPriorityLevelValidation(t *testing.T) {
	limited := func(l string) string { return level("type: Limited, limited: {" + l + "}") }
	queuing := func(q string) string { return limited("limitResponse: {type: Queue, queuing: {" + q + "}}") }
	fixed := func(kind string) string {
		return `spec: Invalid value: {"type":"` + kind +
			`","limited":{"nominalConcurrencyShares":30,"limitResponse":{"type":"Reject"},` +
			`"lendablePercent":0}}: spec of 'exempt' except the 'spec.exempt' field must equal the fixed value`
	}
	exempt := func(spec string) string { return strings.Replace(level(spec), "name: a", "name: exempt", 1) }
	const reject, at = "limitResponse: {type: Reject}", "spec.limited"
	const q = at + ".limitResponse.queuing"
	kindstest.CheckRefused[*flowcontrolv1.PriorityLevelConfiguration](t,
		kindstest.BadObject{Text: limited(reject), Want: ""},
		kindstest.BadObject{Text: queuing(""), Want: ""},
		kindstest.BadObject{Text: limited("nominalConcurrencyShares: 0, " + reject), Want: ""},
		kindstest.BadObject{Text: exempt("type: Exempt, exempt: {nominalConcurrencyShares: 5}"), Want: ""},
		kindstest.BadObject{Text: level(""),
			Want: `spec.type: Unsupported value: "": supported values: "Exempt", "Limited"`},
		kindstest.BadObject{Text: level("type: Free"),
			Want: `spec.type: Unsupported value: "Free": supported values: "Exempt", "Limited"`},
		kindstest.BadObject{Text: level("type: Exempt"),
			Want: kindstest.InvalidText("spec.type", "Exempt",
				"type must be 'Exempt' if and only if name is 'exempt'")},
		kindstest.BadObject{Text: exempt("type: Limited, limited: {" + reject + "}"),
			Want: kindstest.InvalidText("spec.type", "Limited",
				"type must be 'Exempt' if and only if name is 'exempt'") +
				"\n" + fixed("Limited")},
		kindstest.BadObject{Text: exempt("type: Exempt, limited: {" + reject + "}"),
			Want: at + ": Forbidden: must be nil if the type is not Limited\n" + fixed("Exempt")},
		kindstest.BadObject{Text: exempt("type: Exempt, exempt: {nominalConcurrencyShares: -1}"),
			Want: "spec.exempt.nominalConcurrencyShares: Invalid value: -1: must be a non-negative integer"},
		kindstest.BadObject{Text: exempt("type: Exempt, exempt: {lendablePercent: 101}"),
			Want: "spec.exempt.lendablePercent: Invalid value: 101: must be between 0 and 100, inclusive"},
		kindstest.BadObject{Text: level("type: Limited"),
			Want: at + ": Required value: must not be empty when type is Limited"},
		kindstest.BadObject{Text: level("type: Limited, exempt: {}, limited: {" + reject + "}"),
			Want: "spec.exempt: Forbidden: must be nil if the type is Limited"},
		kindstest.BadObject{Text: limited("nominalConcurrencyShares: -1, " + reject),
			Want: at + ".nominalConcurrencyShares: Invalid value: -1: must be a non-negative integer"},
		kindstest.BadObject{Text: limited("lendablePercent: -1, " + reject),
			Want: at + ".lendablePercent: Invalid value: -1: must be between 0 and 100, inclusive"},
		kindstest.BadObject{Text: limited("lendablePercent: 101, " + reject),
			Want: at + ".lendablePercent: Invalid value: 101: must be between 0 and 100, inclusive"},
		kindstest.BadObject{Text: limited("borrowingLimitPercent: -1, " + reject),
			Want: at + ".borrowingLimitPercent: Invalid value: -1: if specified, must be a non-negative integer"},
		kindstest.BadObject{Text: limited(""), Want: at +
			`.limitResponse.type: Unsupported value: "": supported values: "Queue", "Reject"`},
		kindstest.BadObject{Text: limited("limitResponse: {type: Wait}"),
			Want: at + `.limitResponse.type: Unsupported value: "Wait": supported values: "Queue", "Reject"`},
		kindstest.BadObject{Text: limited("limitResponse: {type: Reject, queuing: {}}"),
			Want: q + ": Forbidden: must be nil if limited.limitResponse.type is not Limited"},
		kindstest.BadObject{Text: limited("limitResponse: {type: Queue}"),
			Want: q + ": Required value: must not be empty if limited.limitResponse.type is Limited"},
		kindstest.BadObject{Text: queuing("queueLengthLimit: -1"),
			Want: q + ".queueLengthLimit: Invalid value: -1: must be positive"},
		kindstest.BadObject{Text: queuing("queues: 10000001, handSize: 1"),
			Want: q + ".queues: Invalid value: 10000001: must not be greater than 10000000"},
		kindstest.BadObject{Text: queuing("queues: -1"),
			Want: q + ".queues: Invalid value: -1: must be positive\n" + q +
				".handSize: Invalid value: 8: should not be greater than queues (-1)"},
		kindstest.BadObject{Text: queuing("handSize: -1"), Want: q + ".handSize: Invalid value: -1: must be positive"},
		kindstest.BadObject{Text: queuing("queues: 4, handSize: 5"),
			Want: q + ".handSize: Invalid value: 5: should not be greater than queues (4)"},
		kindstest.BadObject{Text: queuing("queues: 256"),
			Want: q + ".handSize: Invalid value: 8: required entropy bits of deckSize 256 and handSize 8 should not " +
				"be greater than 60"},
		kindstest.BadObject{Text: queuing("handSize: 11"),
			Want: q + ".handSize: Invalid value: 11: required entropy bits of deckSize 64 and handSize 11 should not " +
				"be greater than 60"},
	)
	all := flowcontrol.CatchAllLevel()
	p := &flowcontrolv1.PriorityLevelConfiguration{Spec: all}
	p.Name = "catch-all"
	if got := kindstest.JoinErrors(kinds.All().ByType(p).ValidateObject(p, nil)); got != "" {
		t.Error(got)
	}
	*p.Spec.Limited.NominalConcurrencyShares = 6
	if got := kindstest.JoinErrors(kinds.All().ByType(p).ValidateObject(p, nil)); !strings.HasSuffix(got,
		"spec of 'catch-all' must equal the fixed value") {
		t.Error(got)
	}
}

func TestPriorityLevel(t *testing.T) {
	const queue = "type: Limited, limited: {limitResponse: {type: Queue, queuing: {}}}"
	const filled = "type: Limited, limited: {nominalConcurrencyShares: 30, lendablePercent: 0, limitResponse: {type: " +
		"Queue, queuing: {queues: 64, handSize: 8, queueLengthLimit: 50}}}"
	kindstest.CheckDefaults[*flowcontrolv1.PriorityLevelConfiguration](t, level(queue), level(filled))
	kindstest.CheckDefaults[*flowcontrolv1.PriorityLevelConfiguration](t, level("type: Exempt, exempt: {}"),
		level("type: Exempt, exempt: {nominalConcurrencyShares: 0, lendablePercent: 0}"))
	kindstest.CheckChanges(t, level(queue),
		kindstest.Change[*flowcontrolv1.PriorityLevelConfiguration]{
			Change: func(p *flowcontrolv1.PriorityLevelConfiguration) {
				p.Spec.Limited.LendablePercent = new(int32(5))
			}, Generation: 2},
		kindstest.Change[*flowcontrolv1.PriorityLevelConfiguration]{Sub: "status",
			Change: func(p *flowcontrolv1.PriorityLevelConfiguration) {
				p.Status.Conditions = []flowcontrolv1.PriorityLevelConfigurationCondition{{}}
			}, Want: "status.conditions[0].type: Required value: must not be empty", Generation: 1},
	)
	const head = "NAME|TYPE|NOMINALCONCURRENCYSHARES|QUEUES|HANDSIZE|QUEUELENGTHLIMIT|AGE\n"
	for text, want := range map[string]string{level(queue): "a|Limited|30|64|8|50|3h",
		level("type: Exempt"): "a|Exempt|<none>|<none>|<none>|<none>|3h"} {
		if got := kindstest.PrintTable[*flowcontrolv1.PriorityLevelConfiguration](t, text); got != head+want {
			t.Error(got)
		}
	}
}
