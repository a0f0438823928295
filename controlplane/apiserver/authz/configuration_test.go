package authz_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F33: authorizers are called in the order of the file. A matching webhook decides before RBAC,
// its failure policy is that of the file, and a changed file takes effect.
func TestAuthorizationConfiguration(t *testing.T) {
	var asked atomic.Int32
	var broken atomic.Bool
	a := apiservertest.NewConfigFiles(t)
	hook := a.StartWebhook("hook", func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		var q authorizationv1.SubjectAccessReview
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || broken.Load() || q.Spec.ResourceAttributes == nil {
			http.Error(w, "unexpected", http.StatusBadRequest)
			return
		}
		res := q.Spec.ResourceAttributes
		q.Status.Allowed = res.Resource == "configmaps"
		q.Status.Denied = res.Resource == "secrets"
		q.Status.Reason = "says the service"
		_ = json.NewEncoder(w).Encode(q)
	})
	say := func(policy string) string {
		return fmt.Sprintf(`
apiVersion: apiserver.config.k8s.io/v1
kind: AuthorizationConfiguration
authorizers:
- type: Webhook
  name: outside
  webhook:
    timeout: 3s
    subjectAccessReviewVersion: v1
    matchConditionSubjectAccessReviewVersion: v1
    failurePolicy: %s
    connectionInfo: {type: KubeConfigFile, kubeConfigFile: %s}
    matchConditions:
    - expression: has(request.resourceAttributes)
    - expression: "'dev-team' in request.groups"
- {type: Node, name: node}
- {type: RBAC, name: rbac}
`, policy, hook)
	}
	a.Authz.ConfigFile = a.WriteFile("authz.yaml", say("NoOpinion"))
	r := a.StartReplica()
	get := func(path string) apiservertest.Response {
		t.Helper()
		return r.Call(r.Unauthenticated(), http.MethodGet, path, "", "Authorization", "Bearer alice-token")
	}
	expect := func(path string, code int, words string) {
		t.Helper()
		if got := get(path); got.Code != code || !strings.Contains(got.Body, words) {
			t.Errorf("%s: %d %s, want %d with %q", path, got.Code, got.Body, code, words)
		}
	}
	expect("/api/v1/namespaces/default/configmaps", 200, "")
	expect("/api/v1/namespaces/default/secrets", 403, "says the service")
	expect("/version", 200, "") // by RBAC: the service is for resources
	before := asked.Load()
	expect("/api/v1/namespaces/default/configmaps", 200, "")
	if asked.Load() != before || before != 2 {
		t.Errorf("asked %d times, then %d", before, asked.Load())
	}
	if _, err := r.Admin().CoreV1().Secrets("default").List(apiservertest.Within(t), metav1.ListOptions{}); err !=
		nil || asked.Load() != before {
		t.Errorf("an administrator: %v; the service was asked %d times", err, asked.Load())
	}
	rules, err := r.Client("alice").AuthorizationV1().SelfSubjectRulesReviews().Create(apiservertest.Within(t),
		&authorizationv1.SelfSubjectRulesReview{
			Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "default"},
		}, metav1.CreateOptions{})
	if err != nil || !rules.Status.Incomplete || !strings.Contains(rules.Status.EvaluationError, "webhook") {
		t.Errorf("a list of rules: %+v, %v", rules, err)
	}
	broken.Store(true)
	expect("/api/v1/namespaces/default/services", 403, "webhook outside")
	a.WriteFile("authz.yaml", say("Deny"))
	apiservertest.Eventually(t, func() error { // what is remembered goes with the former configuration
		if got := get("/api/v1/namespaces/default/configmaps"); got.Code != 403 {
			return fmt.Errorf("%d: %s", got.Code, got.Body)
		}
		return nil
	})
	a.WriteFile("authz.yaml", strings.ReplaceAll(say("Deny"), "has(request", "hasnt(request"))
	a.WriteFile("authz.yaml", `
apiVersion: apiserver.config.k8s.io/v1beta1
kind: AuthorizationConfiguration
authorizers: [{type: AlwaysAllow, name: all}]
`)
	apiservertest.Eventually(t, func() error {
		if got := get("/api/v1/namespaces/default/secrets"); got.Code != 200 {
			return fmt.Errorf("%d: %s", got.Code, got.Body)
		}
		return nil
	})
}

// F31: a policy file allows the requests that its lines match.
func TestABACMode(t *testing.T) {
	a := apiservertest.NewConfigFiles(t)
	a.Authz.Modes = []string{"Node", "ABAC"}
	a.Authz.PolicyFile = a.WriteFile("policy.jsonl", `# who may what
{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":{"group":"dev-team","namespace":"default","resource":"*","apiGroup":"*","readonly":true}}
`)
	r := a.StartReplica()
	for path, want := range map[string]int{"/api/v1/namespaces/default/secrets": 200, "/api/v1/secrets": 403,
		"/version": 403} {
		if got := r.Call(r.Unauthenticated(), http.MethodGet, path, "", "Authorization",
			"Bearer alice-token"); got.Code != want {
			t.Errorf("%s: %d, want %d", path, got.Code, want)
		}
	}
	if got := r.Call(r.Unauthenticated(), http.MethodDelete, "/api/v1/namespaces/default/secrets/x", "",
		"Authorization", "Bearer alice-token"); got.Code != 403 {
		t.Errorf("a delete: %d", got.Code)
	}
}
