package clients

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// carol is the user that the token service returns for the token "carol-s".
var carol = authenticationv1.UserInfo{
	Username: "hook:carol", UID: "c-29", Groups: []string{"hook:tea"},
	Extra: map[string]authenticationv1.ExtraValue{"example.org/shift": {"early", "late"}},
}

// requestLog keeps the requests that a service has received.
type requestLog[T any] struct {
	sync.Mutex
	all []T
}

func (r *requestLog[T]) addRequest(v T) {
	r.Lock()
	defer r.Unlock()
	r.all = append(r.all, v)
}

// matching returns the requests for which f returns true.
func (r *requestLog[T]) matching(f func(*T) bool) []T {
	r.Lock()
	defer r.Unlock()
	var out []T
	for i := range r.all {
		if f(&r.all[i]) {
			out = append(out, r.all[i])
		}
	}
	return out
}

// serveTokenReviews starts a service that responds to TokenReviews.
func serveTokenReviews(t *testing.T) (asked *requestLog[authenticationv1.TokenReview], stop func()) {
	asked = &requestLog[authenticationv1.TokenReview]{}
	return asked, outside.serveHTTPS(t, tokensPort, func(w http.ResponseWriter, r *http.Request) {
		var q authenticationv1.TokenReview
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.URL.Path != "/tokens" {
			http.Error(w, "not a review", http.StatusBadRequest)
			return
		}
		asked.addRequest(q)
		if q.Spec.Token == "carol-s" {
			q.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: carol}
		}
		_ = json.NewEncoder(w).Encode(q)
	})
}

// servePolicy starts a service that responds to SubjectAccessReviews. Users who drink tea may do
// everything with ConfigMaps, and nothing with Secrets; for other requests it has no opinion.
func servePolicy(t *testing.T) (asked *requestLog[authorizationv1.SubjectAccessReview], stop func()) {
	asked = &requestLog[authorizationv1.SubjectAccessReview]{}
	return asked, outside.serveHTTPS(t, policyPort, func(w http.ResponseWriter, r *http.Request) {
		var q authorizationv1.SubjectAccessReview
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.URL.Path != "/policy" {
			http.Error(w, "not a review", http.StatusBadRequest)
			return
		}
		asked.addRequest(q)
		resource := q.Spec.ResourceAttributes.Resource
		q.Status = authorizationv1.SubjectAccessReviewStatus{
			Allowed: resource == "configmaps", Denied: resource == "secrets", Reason: "tea and " + resource,
		}
		_ = json.NewEncoder(w).Encode(q)
	})
}

// policyFile returns the configuration of an authorization webhook that is called before RBAC for
// one namespace.
func policyFile(ns, onFailure string) string {
	return strings.NewReplacer("NAMESPACE", ns, "POLICY", onFailure).Replace(`apiVersion: apiserver.config.k8s.io/v1
kind: AuthorizationConfiguration
authorizers:
- type: Webhook
  name: policy.example.org
  webhook:
    timeout: 30s
    authorizedTTL: 1h
    unauthorizedTTL: 1h
    subjectAccessReviewVersion: v1
    matchConditionSubjectAccessReviewVersion: v1
    failurePolicy: POLICY
    connectionInfo: {type: KubeConfigFile, kubeConfigFile: /etc/keelson/policy.kubeconfig}
    matchConditions:
    - expression: request.user.startsWith('hook:')
    - expression: has(request.resourceAttributes) && request.resourceAttributes.namespace == 'NAMESPACE'
- {type: Node, name: node}
- {type: RBAC, name: rbac}
`)
}

// F24 F26 F33: a user whose token a webhook authenticates has the returned name, UID, groups and
// extra attributes at every replica, in authorization, admission and audit, and the webhook is
// called once. An authorization webhook decides before RBAC for the configured requests; without a
// response the configured failure policy applies.
func TestServicesThatKnowUsers(t *testing.T) {
	t.Parallel()
	ns := testenv.Namespace(t)
	tokensAsked, stopTokens := serveTokenReviews(t)
	policyAsked, stopPolicy := servePolicy(t)
	outside.setFile(t, "authorization.yaml", policyFile(ns, "NoOpinion"))
	grantReads(t, ns)
	for _, replica := range testenv.Replicas() { // the file is followed: then RBAC is not asked about config maps
		cs := testenv.TokenClientAt(t, replica, "carol-s")
		testenv.Eventually(t, soon, func() error {
			_, err := cs.CoreV1().ConfigMaps(ns).List(context.Background(), metav1.ListOptions{})
			return err
		})
		_, err := cs.CoreV1().Secrets(ns).List(context.Background(), metav1.ListOptions{})
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "tea and secrets") {
			t.Errorf("%s: what the service denies and RBAC allows: %v", replica, err)
		}
		testenv.Eventually(t, soon, func() error { // each replica receives the permissions independently
			_, err := cs.CoreV1().Services(ns).List(context.Background(), metav1.ListOptions{})
			if err != nil {
				err = fmt.Errorf("%s: what RBAC allows and the service has no opinion of: %w", replica, err)
			}
			return err
		})
		if _, err := cs.CoreV1().Pods(ns).List(context.Background(),
			metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s: a request that no rule allows: %v", replica, err)
		}
	}
	before := len(policyAsked.matching(func(*authorizationv1.SubjectAccessReview) bool { return true }))
	checkIdentity(t, ns, policyAsked)

	requireUser(t, "a token that the service does not know", "mallory-s", "")
	requireUser(t, "a token that the service does not know", "mallory-s", "")
	stopTokens()
	requireUser(t, "a token for which the service was called", "carol-s", carol.Username)
	requireUser(t, "a token while the service is not reachable", "dave-s", "")
	for _, token := range []string{"carol-s", "mallory-s"} {
		n := len(tokensAsked.matching(func(q *authenticationv1.TokenReview) bool { return q.Spec.Token == token }))
		if n != len(testenv.Replicas()) {
			t.Errorf("%d replicas asked for %s %d times", len(testenv.Replicas()), token, n)
		}
	}
	for _, replica := range testenv.Replicas() {
		cs := testenv.TokenClientAt(t, replica, "carol-s")
		for range 2 {
			if _, err := cs.CoreV1().ConfigMaps(ns).List(context.Background(), metav1.ListOptions{}); err != nil {
				t.Error(err)
			}
		}
	}
	lists := len(policyAsked.matching(func(q *authorizationv1.SubjectAccessReview) bool {
		return q.Spec.ResourceAttributes.Verb == "list" && q.Spec.ResourceAttributes.Resource == "configmaps"
	}))
	if lists != len(testenv.Replicas()) || before == 0 {
		t.Errorf("%d replicas asked %d times whether config maps may be listed", len(testenv.Replicas()), lists)
	}
	stopPolicy()
	checkFailurePolicies(t, ns)
	strangers := policyAsked.matching(func(q *authorizationv1.SubjectAccessReview) bool {
		return q.Spec.User != carol.Username || q.Spec.ResourceAttributes.Namespace != ns
	})
	if len(strangers) > 0 {
		t.Errorf("the service was called for requests that the file does not name: %+v", strangers[0].Spec)
	}
}

// grantReads makes RBAC allow carol to read Secrets and Services.
func grantReads(t *testing.T, ns string) {
	t.Helper()
	rbac := testenv.Client(t).RbacV1()
	_, err := rbac.Roles(ns).Create(context.Background(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets", "services"},
			Verbs: []string{"list", "get"}}},
	}, metav1.CreateOptions{})
	if err == nil {
		_, err = rbac.RoleBindings(ns).Create(context.Background(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "reader"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "reader"},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: carol.Username}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// checkFailurePolicies checks both failure policies while the service is not reachable.
func checkFailurePolicies(t *testing.T, ns string) {
	t.Helper()
	for _, replica := range testenv.Replicas() {
		cs := testenv.TokenClientAt(t, replica, "carol-s")
		if _, err := cs.CoreV1().Services(ns).Get(context.Background(), "x",
			metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s: with NoOpinion what RBAC allows is %v", replica, err)
		}
		if _, err := cs.CoreV1().ConfigMaps(ns).Get(context.Background(), "x",
			metav1.GetOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s: with NoOpinion what the service alone would allow is %v", replica, err)
		}
	}
	outside.setFile(t, "authorization.yaml", policyFile(ns, "Deny"))
	for _, replica := range testenv.Replicas() {
		cs := testenv.TokenClientAt(t, replica, "carol-s")
		testenv.Eventually(t, soon, func() error {
			if _, err := cs.CoreV1().Services(ns).Get(context.Background(), "x",
				metav1.GetOptions{}); !apierrors.IsForbidden(err) {
				return fmt.Errorf("%s: with Deny what RBAC allows is %w", replica, err)
			}
			return nil
		})
		services := testenv.ClientAt(t, replica).CoreV1().Services(ns)
		if _, err := services.Get(context.Background(), "x", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s: with Deny an administrator has %v", replica, err)
		}
	}
}

// checkIdentity checks carol's identity in kubectl, authorization, admission and the audit log.
func checkIdentity(t *testing.T, ns string, policyAsked *requestLog[authorizationv1.SubjectAccessReview]) {
	t.Helper()
	admitted := serveRecorder(t, ns)
	for _, replica := range testenv.Replicas() { // each replica may receive the requests of a command
		probe, maps := newConfigMap("probe-"+replica), testenv.ClientAt(t, replica).CoreV1().ConfigMaps(ns)
		testenv.Eventually(t, soon, func() error {
			_, err := maps.Create(context.Background(), probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err == nil && len(admitted.matching(func(r *admissionv1.AdmissionRequest) bool {
				return r.Name ==
					probe.Name
			})) == 0 {
				err = fmt.Errorf("%s has not received the webhook's configuration", replica)
			}
			return err
		})
	}
	for i, program := range kubectlPrograms() {
		requireWhoAmI(t, program, "carol-s", carol.Username, carol.UID, "[hook:tea system:authenticated]",
			"Extra: example.org/shift", "[early late]")
		name := fmt.Sprintf("%s-%d", ns, i)
		if out, err := runWithToken(t, program, "carol-s", "-n", ns, "create", "configmap", name); err != nil {
			t.Fatalf("%s: %v\n%s", filepath.Base(program), err, out)
		}
		var seen []authenticationv1.UserInfo
		testenv.Eventually(t, soon, func() error { // the log is written behind the request
			seen = auditedUsers(t, name)
			if len(seen) == 0 {
				return fmt.Errorf("no audit record is about %s", name)
			}
			return nil
		})
		for _, r := range admitted.matching(func(r *admissionv1.AdmissionRequest) bool { return r.Name == name }) {
			seen = append(seen, r.UserInfo)
		}
		if len(seen) != 2 {
			t.Errorf("audit and admission together saw %s %d times", name, len(seen))
		}
		for _, u := range seen {
			requireCarol(t, name, u.Username, u.UID, u.Groups, u.Extra)
		}
	}
	creates := policyAsked.matching(func(q *authorizationv1.SubjectAccessReview) bool {
		return q.Spec.ResourceAttributes.Verb == "create"
	})
	if len(creates) == 0 {
		t.Error("the service was never asked whether carol may create")
	}
	for _, q := range creates {
		requireCarol(t, "authorization", q.Spec.User, q.Spec.UID, q.Spec.Groups, q.Spec.Extra)
	}
}

func requireCarol[V ~[]string](t *testing.T, where, name, uid string, groups []string, extra map[string]V) {
	t.Helper()
	want := fmt.Sprint(carol.Username, carol.UID, append(carol.Groups[:1:1], "system:authenticated"), carol.Extra)
	if got := fmt.Sprint(name, uid, groups, extra); got != want {
		t.Errorf("%s sees %s, want %s", where, got, want)
	}
}

// serveRecorder starts an admission webhook by URL that records the requests of a namespace and
// allows all.
func serveRecorder(t *testing.T, ns string) *requestLog[admissionv1.AdmissionRequest] {
	t.Helper()
	all := &requestLog[admissionv1.AdmissionRequest]{}
	outside.serveHTTPS(t, recorderPort, func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
			http.Error(w, "not a review", http.StatusBadRequest)
			return
		}
		all.addRequest(*review.Request)
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
		review.Request = nil
		_ = json.NewEncoder(w).Encode(review)
	})
	installValidating(t, ns, "recorder", webhook{
		url:   fmt.Sprintf("https://%s:%d/record", outsideIP, recorderPort),
		ca:    outside.ca,
		rules: `[{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]`,
	})
	return all
}

// auditedUsers returns the users that the replicas' audit logs name as the creator of a ConfigMap.
func auditedUsers(t *testing.T, name string) (out []authenticationv1.UserInfo) {
	t.Helper()
	for _, line := range auditLines(t, name) {
		var e struct {
			Verb      string
			User      authenticationv1.UserInfo
			ObjectRef struct{ Name, Resource string }
		}
		if json.Unmarshal(line, &e) != nil {
			continue // it is being written
		}
		if e.Verb == "create" && e.ObjectRef.Resource == "configmaps" && e.ObjectRef.Name == name {
			out = append(out, e.User)
		}
	}
	return out
}
