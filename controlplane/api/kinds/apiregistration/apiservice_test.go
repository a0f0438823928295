package apiregistration_test

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

type apiService = apiregistrationv1.APIService

func TestAPIService(t *testing.T) {
	named := func(name, spec string) string { return "{metadata: {name: '" + name + "'}, spec: {" + spec + "}}" }
	const priorities = ", groupPriorityMinimum: 100, versionPriority: 10"
	of := func(more string) string { return named("v1.a.io", "group: a.io, version: v1"+priorities+more) }
	at := func(service string) string { return of(", service: {" + service + "}") }
	const mustBe = "must be `spec.version+\".\"+spec.group`: "
	kindstest.CheckRefused[*apiService](t,
		kindstest.BadObject{Text: of(""), Want: ""},
		kindstest.BadObject{Text: at("namespace: a, name: b"), Want: ""},
		kindstest.BadObject{Text: at("namespace: a, name: b, port: 65535"), Want: ""},
		kindstest.BadObject{Text: named("v1.", "version: v1"+priorities), Want: ""},
		kindstest.BadObject{Text: of(", service: {namespace: a, name: b}, insecureSkipTLSVerify: true"), Want: ""},
		// as with Kubernetes: the condition tells
		kindstest.BadObject{Text: of(", service: {namespace: a, name: b}, caBundle: YWJj"), Want: ""},
		kindstest.BadObject{Text: named("v2.a.io", "group: a.io, version: v1"+priorities),
			Want: kindstest.InvalidText("metadata.name", "v2.a.io", mustBe+`"v1.a.io"`)},
		kindstest.BadObject{Text: named("v2.", "version: v2"+priorities),
			Want: "spec.group: Required value: only v1 may have an empty group and it better be legacy kube"},
		kindstest.BadObject{Text: named("v1.A", "group: A, version: v1"+priorities),
			Want: kindstest.InvalidText("spec.group", "A", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: named("1.a.io", "group: a.io, version: '1'"+priorities),
			Want: kindstest.InvalidText("spec.version", "1", validation.IsDNS1035Label("1")[0])},
		kindstest.BadObject{Text: named("v1.a.io", "group: a.io, version: v1, versionPriority: 1"),
			Want: "spec.groupPriorityMinimum: Invalid value: 0: must be positive and less than 20000"},
		kindstest.BadObject{Text: named("v1.a.io",
			"group: a.io, version: v1, groupPriorityMinimum: 20000, versionPriority: 1000"), Want: ""},
		kindstest.BadObject{Text: named("v1.a.io",
			"group: a.io, version: v1, groupPriorityMinimum: 20001, versionPriority: 1001"),
			Want: "spec.groupPriorityMinimum: Invalid value: 20001: must be positive and less than " +
				"20000\nspec.versionPriority: Invalid value: 1001: must be positive and less than 1000"},
		kindstest.BadObject{Text: named("v1.a.io", "group: a.io, version: v1, groupPriorityMinimum: 1"),
			Want: "spec.versionPriority: Invalid value: 0: must be positive and less than 1000"},
		kindstest.BadObject{Text: of(", caBundle: YWJj"),
			Want: kindstest.InvalidText("spec.caBundle", "3 bytes", "local APIServices may not have a caBundle")},
		kindstest.BadObject{Text: of(", insecureSkipTLSVerify: true"),
			Want: "spec.insecureSkipTLSVerify: Invalid value: true: local APIServices may not have " +
				"insecureSkipTLSVerify"},
		kindstest.BadObject{Text: at("name: b"), Want: "spec.service.namespace: Required value"},
		kindstest.BadObject{Text: at("namespace: a"), Want: "spec.service.name: Required value"},
		kindstest.BadObject{Text: at("namespace: a, name: b, port: 0"),
			Want: "spec.service.port: Invalid value: 0: port is not valid: must be between 1 and 65535, inclusive"},
		kindstest.BadObject{Text: at("namespace: a, name: b, port: 65536"),
			Want: "spec.service.port: Invalid value: 65536: port is not valid: must be between 1 and 65535, inclusive"},
		kindstest.BadObject{Text: of(", service: {namespace: a, name: b}, caBundle: YWJj, insecureSkipTLSVerify: true"),
			Want: "spec.insecureSkipTLSVerify: Invalid value: true: may not be true if caBundle is present"},
	)
	condition := func(status apiregistrationv1.ConditionStatus) func(*apiService) {
		return func(s *apiService) {
			s.Status.Conditions = []apiregistrationv1.APIServiceCondition{{Type: apiregistrationv1.Available,
				Status: status}}
		}
	}
	local := at("namespace: a, name: b")
	kindstest.CheckChanges(t, local,
		kindstest.Change[*apiService]{Change: func(s *apiService) { s.Spec.Service.Name = "c" }},
		kindstest.Change[*apiService]{Change: func(s *apiService) {
			s.Spec.Version = "v2"
		}, Want: kindstest.InvalidText("metadata.name", "v1.a.io", mustBe+`"v2.a.io"`)},
		kindstest.Change[*apiService]{Sub: "status", Change: condition("Unknown")},
		kindstest.Change[*apiService]{Sub: "status", Change: condition("Maybe"),
			Want: `status.conditions[0].status: Unsupported value: "Maybe": supported values: "True", ` +
				`"False", "Unknown"`},
	)
	for text, want := range map[string]string{
		local:  "NAME|SERVICE|AVAILABLE|AGE\nv1.a.io|a/b|Unknown|3h",
		of(""): "NAME|SERVICE|AVAILABLE|AGE\nv1.a.io|Local|Unknown|3h",
		"{metadata: {name: v1.a.io}, status: {conditions: [{type: Available, status: 'False', reason: " +
			"MissingEndpoints}]}}": "NAME|SERVICE|AVAILABLE|AGE\nv1.a.io|Local|False (MissingEndpoints)|3h",
	} {
		if got := kindstest.PrintTable[*apiService](t, text); got != want {
			t.Errorf("%s\n got %s", text, got)
		}
	}
}
