package kinds

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
)

type apiService = apiregistrationv1.APIService

func TestAPIService(t *testing.T) {
	named := func(name, spec string) string { return "{metadata: {name: '" + name + "'}, spec: {" + spec + "}}" }
	const priorities = ", groupPriorityMinimum: 100, versionPriority: 10"
	of := func(more string) string { return named("v1.a.io", "group: a.io, version: v1"+priorities+more) }
	at := func(service string) string { return of(", service: {" + service + "}") }
	const mustBe = "must be `spec.version+\".\"+spec.group`: "
	refuses[*apiService](t,
		bad{of(""), ""},
		bad{at("namespace: a, name: b"), ""},
		bad{at("namespace: a, name: b, port: 65535"), ""},
		bad{named("v1.", "version: v1"+priorities), ""},
		bad{of(", service: {namespace: a, name: b}, insecureSkipTLSVerify: true"), ""},
		bad{of(", service: {namespace: a, name: b}, caBundle: YWJj"), ""}, // as with Kubernetes: the condition tells
		bad{named("v2.a.io", "group: a.io, version: v1"+priorities), invalidText("metadata.name", "v2.a.io", mustBe+`"v1.a.io"`)},
		bad{named("v2.", "version: v2"+priorities), "spec.group: Required value: only v1 may have an empty group and it better be legacy kube"},
		bad{named("v1.A", "group: A, version: v1"+priorities), invalidText("spec.group", "A", notSubdomain)},
		bad{named("1.a.io", "group: a.io, version: '1'"+priorities), invalidText("spec.version", "1", validation.IsDNS1035Label("1")[0])},
		bad{named("v1.a.io", "group: a.io, version: v1, versionPriority: 1"), "spec.groupPriorityMinimum: Invalid value: 0: must be positive and less than 20000"},
		bad{named("v1.a.io", "group: a.io, version: v1, groupPriorityMinimum: 20000, versionPriority: 1000"), ""},
		bad{named("v1.a.io", "group: a.io, version: v1, groupPriorityMinimum: 20001, versionPriority: 1001"),
			"spec.groupPriorityMinimum: Invalid value: 20001: must be positive and less than 20000\nspec.versionPriority: Invalid value: 1001: must be positive and less than 1000"},
		bad{named("v1.a.io", "group: a.io, version: v1, groupPriorityMinimum: 1"), "spec.versionPriority: Invalid value: 0: must be positive and less than 1000"},
		bad{of(", caBundle: YWJj"), invalidText("spec.caBundle", "3 bytes", "local APIServices may not have a caBundle")},
		bad{of(", insecureSkipTLSVerify: true"), "spec.insecureSkipTLSVerify: Invalid value: true: local APIServices may not have insecureSkipTLSVerify"},
		bad{at("name: b"), "spec.service.namespace: Required value"},
		bad{at("namespace: a"), "spec.service.name: Required value"},
		bad{at("namespace: a, name: b, port: 0"), "spec.service.port: Invalid value: 0: port is not valid: must be between 1 and 65535, inclusive"},
		bad{at("namespace: a, name: b, port: 65536"), "spec.service.port: Invalid value: 65536: port is not valid: must be between 1 and 65535, inclusive"},
		bad{of(", service: {namespace: a, name: b}, caBundle: YWJj, insecureSkipTLSVerify: true"),
			"spec.insecureSkipTLSVerify: Invalid value: true: may not be true if caBundle is present"},
	)
	condition := func(status apiregistrationv1.ConditionStatus) func(*apiService) {
		return func(s *apiService) {
			s.Status.Conditions = []apiregistrationv1.APIServiceCondition{{Type: apiregistrationv1.Available, Status: status}}
		}
	}
	local := at("namespace: a, name: b")
	changes(t, local,
		changed[*apiService]{change: func(s *apiService) { s.Spec.Service.Name = "c" }},
		changed[*apiService]{change: func(s *apiService) { s.Spec.Version = "v2" }, want: invalidText("metadata.name", "v1.a.io", mustBe+`"v2.a.io"`)},
		changed[*apiService]{sub: "status", change: condition("Unknown")},
		changed[*apiService]{sub: "status", change: condition("Maybe"), want: `status.conditions[0].status: Unsupported value: "Maybe": supported values: "True", "False", "Unknown"`},
	)
	for text, want := range map[string]string{
		local:  "NAME|SERVICE|AVAILABLE|AGE\nv1.a.io|a/b|Unknown|3h",
		of(""): "NAME|SERVICE|AVAILABLE|AGE\nv1.a.io|Local|Unknown|3h",
		"{metadata: {name: v1.a.io}, status: {conditions: [{type: Available, status: 'False', reason: MissingEndpoints}]}}": "NAME|SERVICE|AVAILABLE|AGE\nv1.a.io|Local|False (MissingEndpoints)|3h",
	} {
		if got := table[*apiService](t, text); got != want {
			t.Errorf("%s\n got %s", text, got)
		}
	}
}
