package kinds

import (
	"strings"
	"testing"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"

	"keelson.dev/keelson/controlplane/api/kinds/flowcontrol"
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
	const who, what, where = "spec.rules[0].subjects[0]", "spec.rules[0].resourceRules[0]", "spec.rules[0].nonResourceRules[0]"
	const full = "verbs: [get], apiGroups: [''], resources: [pods]"
	refuses[*flowcontrolv1.FlowSchema](t,
		bad{flowRule(flowUser + ", " + flowReads), ""},
		bad{flow("rules: []"), ""},
		bad{urls("'*'"), ""},
		bad{urls("/a/*, /"), ""},
		bad{flow("matchingPrecedence: -1"), "spec.matchingPrecedence: Invalid value: -1: must be a positive value"},
		bad{flow("matchingPrecedence: 10001"), "spec.matchingPrecedence: Invalid value: 10001: must not be greater than 10000"},
		bad{flow("matchingPrecedence: 1"), "spec.matchingPrecedence: Invalid value: 1: only the schema named 'exempt' may have matchingPrecedence 1"},
		bad{flow("distinguisherMethod: {type: ByHat}"), `spec.distinguisherMethod.type: Unsupported value: "ByHat": supported values: "ByNamespace", "ByUser"`},
		bad{"{metadata: {name: a}}", "spec.priorityLevelConfiguration.name: Required value: must reference a priority level"},
		bad{"{metadata: {name: a}, spec: {priorityLevelConfiguration: {name: L}}}", invalidText("spec.priorityLevelConfiguration.name", "L", notSubdomain)},
		bad{flowRule(flowReads), "spec.rules[0].subjects: Required value: subjects must contain at least one value"},
		bad{flowRule(flowUser), "spec.rules[0]: Required value: at least one of resourceRules and nonResourceRules has to be non-empty"},
		bad{subject("kind: Robot"), who + `.kind: Unsupported value: "Robot": supported values: "Group", "ServiceAccount", "User"`},
		bad{subject("kind: User"), who + ".user: Required value: user is required when subject kind is 'User'"},
		bad{subject("kind: Group"), who + ".group: Required value: group is required when subject kind is 'Group'"},
		bad{subject("kind: ServiceAccount"), who + ".serviceAccount: Required value: serviceAccount is required when subject kind is 'ServiceAccount'"},
		bad{subject("kind: User, user: {}"), who + ".user.name: Required value"},
		bad{subject("kind: Group, group: {}"), who + ".group.name: Required value"},
		bad{subject("kind: User, user: {name: u}, group: {name: g}, serviceAccount: {name: s, namespace: a}"),
			who + ".serviceAccount: Forbidden: serviceAccount is forbidden when subject kind is not 'ServiceAccount'\n" + who + ".group: Forbidden: group is forbidden when subject kind is not 'Group'"},
		bad{subject("kind: Group, group: {name: g}, user: {name: u}"), who + ".user: Forbidden: user is forbidden when subject kind is not 'User'"},
		bad{subject("kind: ServiceAccount, serviceAccount: {}"), who + ".serviceAccount.name: Required value\n" + who + ".serviceAccount.namespace: Required value: must specify namespace for service account"},
		bad{subject("kind: ServiceAccount, serviceAccount: {name: S, namespace: A}"), invalidText(who+".serviceAccount.name", "S", notSubdomain) + "\n" + invalidText(who+".serviceAccount.namespace", "A", notLabel)},
		bad{reads("apiGroups: [''], resources: [pods], namespaces: [a]"), what + ".verbs: Required value: verbs must contain at least one value"},
		bad{reads("verbs: ['*', get], apiGroups: [''], resources: [pods], namespaces: [a]"), what + `.verbs: Invalid value: ["*","get"]: if '*' is present, must not specify other verbs`},
		bad{reads("verbs: [read], apiGroups: [''], resources: [pods], namespaces: [a]"), what + `.verbs: Unsupported value: ["read"]: supported values: "create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"`},
		bad{reads("verbs: [get], namespaces: [a]"), what + ".apiGroups: Required value: resource rules must supply at least one api group\n" + what + ".resources: Required value: resource rules must supply at least one resource"},
		bad{reads("verbs: [get], apiGroups: ['*', a], resources: ['*', b], namespaces: ['*', c]"), what + `.apiGroups: Invalid value: ["*","a"]: if '*' is present, must not specify other api groups` + "\n" +
			what + `.resources: Invalid value: ["*","b"]: if '*' is present, must not specify other resources` + "\n" + what + `.namespaces: Invalid value: ["*","c"]: if '*' is present, must not specify other namespaces`},
		bad{reads(full), what + ".namespaces: Required value: resource rules that are not cluster scoped must supply at least one namespace"},
		bad{reads(full + ", namespaces: [A]"), invalidText(what+".namespaces[0]", "A", "each member of this list must be '*' or a DNS-1123 label; "+notLabel)},
		bad{urls(""), where + ".nonResourceURLs: Required value: nonResourceURLs must contain at least one value"},
		bad{urls("'*', /a"), where + `.nonResourceURLs: Invalid value: ["*","/a"]: if '*' is present, must not specify other non-resource URLs`},
		bad{urls("'', a, '/a b', //a, '/*/a', /a*"), invalidText(where+".nonResourceURLs[0]", "", "must not be empty") + "\n" + invalidText(where+".nonResourceURLs[1]", "a", "must start with slash") + "\n" +
			invalidText(where+".nonResourceURLs[2]", "/a b", "must not contain white-space") + "\n" + invalidText(where+".nonResourceURLs[3]", "//a", "must not contain double slash") + "\n" +
			invalidText(where+".nonResourceURLs[4]", "/*/a", "wildcard can only do suffix matching") + "\n" + invalidText(where+".nonResourceURLs[5]", "/a*", "wildcard can only do suffix matching")},
	)
}

func TestMandatoryFlowSchemas(t *testing.T) {
	for _, name := range []string{"exempt", "catch-all"} {
		f := &flowcontrolv1.FlowSchema{Spec: *flowcontrol.MandatoryFlowSchema(name)}
		f.Name = name
		k := All().ByType(f)
		if got := lines(k.Judge(f, nil)); got != "" {
			t.Errorf("%s: %s", name, got)
		}
		f.Spec.Rules = nil
		if got := lines(k.Judge(f, nil)); !strings.HasPrefix(got, "spec: Invalid value: ") || !strings.HasSuffix(got, "spec of '"+name+"' must equal the fixed value") {
			t.Errorf("%s, changed: %s", name, got)
		}
	}
}

func TestFlowSchema(t *testing.T) {
	defaulted[*flowcontrolv1.FlowSchema](t, flow("rules: []"), "{spec: {priorityLevelConfiguration: {name: l}, matchingPrecedence: 1000}}")
	changes(t, flow("rules: []"),
		changed[*flowcontrolv1.FlowSchema]{change: func(f *flowcontrolv1.FlowSchema) { f.Spec.MatchingPrecedence = 5 }, generation: 2},
		changed[*flowcontrolv1.FlowSchema]{sub: "status", change: func(f *flowcontrolv1.FlowSchema) {
			f.Status.Conditions = []flowcontrolv1.FlowSchemaCondition{{Type: "A"}, {Type: "A"}, {}}
		}, want: `status.conditions[1].type: Duplicate value: "A"` + "\nstatus.conditions[2].type: Required value: must not be empty", generation: 1},
	)
	const head = "NAME|PRIORITYLEVEL|MATCHINGPRECEDENCE|DISTINGUISHERMETHOD|AGE|MISSINGPL\n"
	for text, want := range map[string]string{flow("rules: []"): "a|l|1000|<none>|3h|?",
		"{metadata: {name: a}, spec: {distinguisherMethod: {type: ByUser}, priorityLevelConfiguration: {name: l}}, status: {conditions: [{type: Dangling, status: 'False'}]}}": "a|l|1000|ByUser|3h|False"} {
		if got := table[*flowcontrolv1.FlowSchema](t, text); got != head+want {
			t.Error(got)
		}
	}
}

func level(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }

func TestPriorityLevelValidation(t *testing.T) {
	limited := func(l string) string { return level("type: Limited, limited: {" + l + "}") }
	queuing := func(q string) string { return limited("limitResponse: {type: Queue, queuing: {" + q + "}}") }
	fixed := func(kind string) string {
		return `spec: Invalid value: {"type":"` + kind + `","limited":{"nominalConcurrencyShares":30,"limitResponse":{"type":"Reject"},` +
			`"lendablePercent":0}}: spec of 'exempt' except the 'spec.exempt' field must equal the fixed value`
	}
	exempt := func(spec string) string { return strings.Replace(level(spec), "name: a", "name: exempt", 1) }
	const reject, at = "limitResponse: {type: Reject}", "spec.limited"
	const q = at + ".limitResponse.queuing"
	refuses[*flowcontrolv1.PriorityLevelConfiguration](t,
		bad{limited(reject), ""},
		bad{queuing(""), ""},
		bad{limited("nominalConcurrencyShares: 0, " + reject), ""},
		bad{exempt("type: Exempt, exempt: {nominalConcurrencyShares: 5}"), ""},
		bad{level(""), `spec.type: Unsupported value: "": supported values: "Exempt", "Limited"`},
		bad{level("type: Free"), `spec.type: Unsupported value: "Free": supported values: "Exempt", "Limited"`},
		bad{level("type: Exempt"), invalidText("spec.type", "Exempt", "type must be 'Exempt' if and only if name is 'exempt'")},
		bad{exempt("type: Limited, limited: {" + reject + "}"), invalidText("spec.type", "Limited", "type must be 'Exempt' if and only if name is 'exempt'") +
			"\n" + fixed("Limited")},
		bad{exempt("type: Exempt, limited: {" + reject + "}"), at + ": Forbidden: must be nil if the type is not Limited\n" + fixed("Exempt")},
		bad{exempt("type: Exempt, exempt: {nominalConcurrencyShares: -1}"), "spec.exempt.nominalConcurrencyShares: Invalid value: -1: must be a non-negative integer"},
		bad{exempt("type: Exempt, exempt: {lendablePercent: 101}"), "spec.exempt.lendablePercent: Invalid value: 101: must be between 0 and 100, inclusive"},
		bad{level("type: Limited"), at + ": Required value: must not be empty when type is Limited"},
		bad{level("type: Limited, exempt: {}, limited: {" + reject + "}"), "spec.exempt: Forbidden: must be nil if the type is Limited"},
		bad{limited("nominalConcurrencyShares: -1, " + reject), at + ".nominalConcurrencyShares: Invalid value: -1: must be a non-negative integer"},
		bad{limited("lendablePercent: -1, " + reject), at + ".lendablePercent: Invalid value: -1: must be between 0 and 100, inclusive"},
		bad{limited("lendablePercent: 101, " + reject), at + ".lendablePercent: Invalid value: 101: must be between 0 and 100, inclusive"},
		bad{limited("borrowingLimitPercent: -1, " + reject), at + ".borrowingLimitPercent: Invalid value: -1: if specified, must be a non-negative integer"},
		bad{limited(""), at + `.limitResponse.type: Unsupported value: "": supported values: "Queue", "Reject"`},
		bad{limited("limitResponse: {type: Wait}"), at + `.limitResponse.type: Unsupported value: "Wait": supported values: "Queue", "Reject"`},
		bad{limited("limitResponse: {type: Reject, queuing: {}}"), q + ": Forbidden: must be nil if limited.limitResponse.type is not Limited"},
		bad{limited("limitResponse: {type: Queue}"), q + ": Required value: must not be empty if limited.limitResponse.type is Limited"},
		bad{queuing("queueLengthLimit: -1"), q + ".queueLengthLimit: Invalid value: -1: must be positive"},
		bad{queuing("queues: 10000001, handSize: 1"), q + ".queues: Invalid value: 10000001: must not be greater than 10000000"},
		bad{queuing("queues: -1"), q + ".queues: Invalid value: -1: must be positive\n" + q + ".handSize: Invalid value: 8: should not be greater than queues (-1)"},
		bad{queuing("handSize: -1"), q + ".handSize: Invalid value: -1: must be positive"},
		bad{queuing("queues: 4, handSize: 5"), q + ".handSize: Invalid value: 5: should not be greater than queues (4)"},
		bad{queuing("queues: 256"), q + ".handSize: Invalid value: 8: required entropy bits of deckSize 256 and handSize 8 should not be greater than 60"},
		bad{queuing("handSize: 11"), q + ".handSize: Invalid value: 11: required entropy bits of deckSize 64 and handSize 11 should not be greater than 60"},
	)
	all := flowcontrol.CatchAllLevel()
	p := &flowcontrolv1.PriorityLevelConfiguration{Spec: all}
	p.Name = "catch-all"
	if got := lines(All().ByType(p).Judge(p, nil)); got != "" {
		t.Error(got)
	}
	*p.Spec.Limited.NominalConcurrencyShares = 6
	if got := lines(All().ByType(p).Judge(p, nil)); !strings.HasSuffix(got, "spec of 'catch-all' must equal the fixed value") {
		t.Error(got)
	}
}

func TestPriorityLevel(t *testing.T) {
	const queue = "type: Limited, limited: {limitResponse: {type: Queue, queuing: {}}}"
	const filled = "type: Limited, limited: {nominalConcurrencyShares: 30, lendablePercent: 0, limitResponse: {type: Queue, queuing: {queues: 64, handSize: 8, queueLengthLimit: 50}}}"
	defaulted[*flowcontrolv1.PriorityLevelConfiguration](t, level(queue), level(filled))
	defaulted[*flowcontrolv1.PriorityLevelConfiguration](t, level("type: Exempt, exempt: {}"), level("type: Exempt, exempt: {nominalConcurrencyShares: 0, lendablePercent: 0}"))
	changes(t, level(queue),
		changed[*flowcontrolv1.PriorityLevelConfiguration]{change: func(p *flowcontrolv1.PriorityLevelConfiguration) { p.Spec.Limited.LendablePercent = ptr(int32(5)) }, generation: 2},
		changed[*flowcontrolv1.PriorityLevelConfiguration]{sub: "status", change: func(p *flowcontrolv1.PriorityLevelConfiguration) {
			p.Status.Conditions = []flowcontrolv1.PriorityLevelConfigurationCondition{{}}
		}, want: "status.conditions[0].type: Required value: must not be empty", generation: 1},
	)
	const head = "NAME|TYPE|NOMINALCONCURRENCYSHARES|QUEUES|HANDSIZE|QUEUELENGTHLIMIT|AGE\n"
	for text, want := range map[string]string{level(queue): "a|Limited|30|64|8|50|3h", level("type: Exempt"): "a|Exempt|<none>|<none>|<none>|<none>|3h"} {
		if got := table[*flowcontrolv1.PriorityLevelConfiguration](t, text); got != head+want {
			t.Error(got)
		}
	}
}
