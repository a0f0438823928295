package policies

import (
	"strings"
	"testing"

	arv1 "k8s.io/api/admissionregistration/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
)

// Type errors for the kinds that a policy names are reported in its status, with the compiler's
// messages.
func TestTypeChecking(t *testing.T) {
	rule := func(group, version string, resources ...string) *arv1.MatchResources {
		m := everything()
		m.ResourceRules[0].Rule = arv1.Rule{APIGroups: []string{group}, APIVersions: []string{version},
			Resources: resources}
		return m
	}
	deployments := rule("apps", "v1", "deployments")
	for _, tc := range []struct {
		match *arv1.MatchResources
		v     arv1.Validation
		want  []string // "field: part of the warning"
	}{
		{deployments, arv1.Validation{Expression: "object.spec.replicas > 1"}, nil},
		{deployments, arv1.Validation{Expression: "object.replicas > 1"},
			[]string{"spec.validations[0].expression: apps/v1, Kind=Deployment: ERROR: <input>:1:7: undefined " +
				"field 'replicas'"}},
		{deployments, arv1.Validation{Expression: "object.spec.replicas > '1'"},
			[]string{"spec.validations[0].expression: apps/v1, Kind=Deployment: ERROR: <input>:1:22: found no " +
				"matching overload for '_>_' applied to '(int, string)'"}},
		{deployments, arv1.Validation{Expression: "true", MessageExpression: "object.metadata.nam"},
			[]string{"spec.validations[0].messageExpression: apps/v1, Kind=Deployment: ERROR: <input>:1:16: " +
				"undefined field 'nam'"}},
		{deployments,
			arv1.Validation{Expression: "variables.r > 1 && oldObject.spec.replicas < 3 && " +
				"has(object.metadata.labels)"}, nil},
		{deployments, arv1.Validation{Expression: "variables.r == 'x'"},
			[]string{"found no matching overload for '_==_' applied to '(int, string)'"}},
		{deployments, arv1.Validation{Expression: "object.spec.template.spec.containers.all(c, c.imag != '')"},
			[]string{"undefined field 'imag'"}},
		{deployments, arv1.Validation{Expression: "params.data['a'] == 'b'"}, nil},
		{deployments, arv1.Validation{Expression: "params.dat['a'] == 'b'"}, []string{"undefined field 'dat'"}},
		{deployments,
			arv1.Validation{Expression: "authorizer.group('').resource('pods').check('get').allowed() && " +
				"request.operation == 'CREATE' && namespaceObject.metadata.name != ''"}, nil},
		{rule("apps", "v1", "deployments", "replicasets"), arv1.Validation{Expression: "object.spec.paused"},
			[]string{"apps/v1, Kind=ReplicaSet: ERROR: <input>:1:12: undefined field 'paused'"}},
		{rule("*", "*", "*"), arv1.Validation{Expression: "object.nothing"}, nil},
		{rule("example.com", "v1", "things"), arv1.Validation{Expression: "object.nothing"}, nil},
	} {
		p := policyOf("v", tc.v)
		p.Spec.MatchConstraints = tc.match
		p.Spec.ParamKind = &arv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"}
		p.Spec.Variables = []arv1.Variable{{Name: "r", Expression: "object.spec.replicas"}}
		got := CheckTypes(p, kinds.All(), environments())
		if len(got) != len(tc.want) {
			t.Errorf("%+v: %+v", tc.v, got)
			continue
		}
		for i, w := range got {
			if !strings.Contains(w.FieldRef+": "+w.Warning, tc.want[i]) {
				t.Errorf("%+v: %s: %s", tc.v, w.FieldRef, w.Warning)
			}
		}
	}
}
