package flowcontrol

import (
	"testing"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
)

// bootstrapSchemas returns the schemas and levels of a new cluster; the UID of each is its name.
func bootstrapSchemas(more ...*flowcontrolv1.FlowSchema) *Schemas {
	levels := map[string]types.UID{}
	for _, l := range append(bootstrap.MandatoryPriorityLevelConfigurations,
		bootstrap.SuggestedPriorityLevelConfigurations...) {
		levels[l.Name] = types.UID(l.Name)
	}
	var schemas []*flowcontrolv1.FlowSchema
	for _, s := range append(append(bootstrap.MandatoryFlowSchemas, bootstrap.SuggestedFlowSchemas...), more...) {
		s = s.DeepCopy()
		s.UID = types.UID(s.Name)
		schemas = append(schemas, s)
	}
	return NewSchemas(schemas, levels)
}

// Requests match the schemas of a new cluster as https://kubernetes.io/docs/concepts/cluster-administration/flow-control/
// describes them, and a user's schema by its precedence. F16
func TestSchemasMatch(t *testing.T) {
	own := &flowcontrolv1.FlowSchema{ObjectMeta: metav1.ObjectMeta{Name: "own"}, Spec: flowcontrolv1.FlowSchemaSpec{
		MatchingPrecedence:         500,
		PriorityLevelConfiguration: flowcontrolv1.PriorityLevelConfigurationReference{Name: "gone"},
		Rules: []flowcontrolv1.PolicyRulesWithSubjects{{
			Subjects: []flowcontrolv1.Subject{{Kind: flowcontrolv1.SubjectKindServiceAccount,
				ServiceAccount: &flowcontrolv1.ServiceAccountSubject{Namespace: "a", Name: "robot"}}},
			ResourceRules: []flowcontrolv1.ResourcePolicyRule{{Verbs: []string{"list"}, APIGroups: []string{""},
				Resources: []string{"pods", "pods/log"}, Namespaces: []string{"a"}}},
			NonResourceRules: []flowcontrolv1.NonResourcePolicyRule{{Verbs: []string{"get"},
				NonResourceURLs: []string{"/metrics/*", "/version"}}},
		}},
	}}
	s := bootstrapSchemas(own)
	authenticated, accounts := "system:authenticated", "system:serviceaccounts"
	robot := func(r Request) Request {
		r.User, r.Groups = "system:serviceaccount:a:robot", []string{accounts, accounts + ":a", authenticated}
		return r
	}
	for name, c := range map[string]struct {
		request       Request
		schema, level string
	}{
		"administrator": {Request{User: "admin", Groups: []string{"system:masters", authenticated}, Verb: "list",
			Resource: "pods", Namespace: "a"}, "exempt", "exempt"},
		"probe": {Request{User: "system:anonymous", Groups: []string{"system:unauthenticated"},
			Verb: "get", Path: "/readyz"}, "probes", "exempt"},
		"node's lease": {Request{User: "system:node:w1", Groups: []string{"system:nodes", authenticated},
			Verb: "update", APIGroup: "coordination.k8s.io", Resource: "leases", Namespace: "kube-node-lease"},
			"system-node-high", "node-high"},
		"node's pod": {Request{User: "system:node:w1", Groups: []string{"system:nodes", authenticated},
			Verb: "get", Resource: "pods", Namespace: "a"}, "system-nodes", "system"},
		"person": {Request{User: "alice", Groups: []string{authenticated}, Verb: "list", Resource: "pods",
			Namespace: "a"}, "global-default", "global-default"},
		"other account": {Request{User: "system:serviceaccount:b:robot",
			Groups: []string{accounts, authenticated}, Verb: "list", Resource: "pods", Namespace: "a"},
			"service-accounts", "workload-low"},
		"own schema": {robot(Request{Verb: "list", Resource: "pods", Namespace: "a"}), "own", ""},
		"own, subresource": {robot(Request{Verb: "list", Resource: "pods", Subresource: "log", Namespace: "a"}),
			"own", ""},
		"own, other facet": {robot(Request{Verb: "list", Resource: "pods", Subresource: "status", Namespace: "a"}),
			"service-accounts", "workload-low"},
		"own, other verb": {robot(Request{Verb: "get", Resource: "pods", Namespace: "a"}), "service-accounts",
			"workload-low"},
		"own, all namespaces": {robot(Request{Verb: "list", Resource: "pods"}), "service-accounts", "workload-low"},
		"own, below URL":      {robot(Request{Verb: "get", Path: "/metrics/slis"}), "own", ""},
		"own, URL":            {robot(Request{Verb: "get", Path: "/version"}), "own", ""},
		"own, longer URL":     {robot(Request{Verb: "get", Path: "/version/x"}), "service-accounts", "workload-low"},
	} {
		f, found := s.Match(&c.request)
		if want := (Flow{Schema: types.UID(c.schema), Level: types.UID(c.level)}); !found || f != want {
			t.Errorf("%s: %+v, %v, want %+v", name, f, found, want)
		}
	}
	if f, found := NewSchemas(nil, nil).Match(&Request{User: "alice", Verb: "get", Path: "/"}); found {
		t.Errorf("without schemas a request matches %+v", f)
	}
}
