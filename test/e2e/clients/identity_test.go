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

// carol is whom the token service knows by the token "carol-s".
var carol = authenticationv1.UserInfo{
	Username: "hook:carol", UID: "c-29", Groups: []string{"hook:tea"},
	Extra: map[string]authenticationv1.ExtraValue{"example.org/shift": {"early", "late"}},
}

// records keeps what a service was asked, until the test has looked.
type records[T any] struct {
	sync.Mutex
	all []T
}

func (r *records[T]) add(v T) {
	r.Lock()
	defer r.Unlock()
	r.all = append(r.all, v)
}

// where are the ones that f is about.
func (r *records[T]) where(f func(*T) bool) []T {
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

// tokens is a service that answers TokenReviews.
func tokens(t *testing.T) (asked *records[authenticationv1.TokenReview], stop func()) {
	asked = &records[authenticationv1.TokenReview]{}
	return asked, outside.serve(t, tokensPort, func(w http.ResponseWriter, r *http.Request) {
		var q authenticationv1.TokenReview
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.URL.Path != "/tokens" {
			http.Error(w, "not a review", http.StatusBadRequest)
			return
		}
		asked.add(q)
		if q.Spec.Token == "carol-s" {
			q.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: carol}
		}
		_ = json.NewEncoder(w).Encode(q)
	})
}

// policy is a service that answers SubjectAccessReviews: who drinks tea may do everything with config maps, and nothing
// with Secrets; about the rest it has no opinion.
func policy(t *testing.T) (asked *records[authorizationv1.SubjectAccessReview], stop func()) {
	asked = &records[authorizationv1.SubjectAccessReview]{}
	return asked, outside.serve(t, policyPort, func(w http.ResponseWriter, r *http.Request) {
		var q authorizationv1.SubjectAccessReview
		if err := json.NewDecoder(r.Body).Decode(&q); err != nil || r.URL.Path != "/policy" {
			http.Error(w, "not a review", http.StatusBadRequest)
			return
		}
		asked.add(q)
		resource := q.Spec.ResourceAttributes.Resource
		q.Status = authorizationv1.SubjectAccessReviewStatus{
			Allowed: resource == "configmaps", Denied: resource == "secrets", Reason: "tea and " + resource,
		}
		_ = json.NewEncoder(w).Encode(q)
	})
}

// policyFile has a service outside be asked before RBAC about one namespace.
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

// F24 F26 F33: whom a service knows by a token has the name, uid, groups and further attributes that it says, at every
// replica, in authorization, admission and audit, and the service is asked once. A service decides before RBAC what the
// file has it asked about; when it cannot be asked it is as the file says.
func TestServicesThatKnowUsers(t *testing.T) {
	t.Parallel()
	ns := testenv.Namespace(t)
	tokensAsked, stopTokens := tokens(t)
	policyAsked, stopPolicy := policy(t)
	outside.say(t, "authorization.yaml", policyFile(ns, "NoOpinion"))
	grant(t, ns)
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
		testenv.Eventually(t, soon, func() error { // each replica hears of the rights by itself
			_, err := cs.CoreV1().Services(ns).List(context.Background(), metav1.ListOptions{})
			if err != nil {
				err = fmt.Errorf("%s: what RBAC allows and the service has no opinion of: %w", replica, err)
			}
			return err
		})
		if _, err := cs.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s: what nobody allows: %v", replica, err)
		}
	}
	before := len(policyAsked.where(func(*authorizationv1.SubjectAccessReview) bool { return true }))
	identity(t, ns, policyAsked)

	is(t, "a token that the service does not know", "mallory-s", "")
	is(t, "a token that the service does not know", "mallory-s", "")
	stopTokens()
	is(t, "a token about which the service was asked", "carol-s", carol.Username)
	is(t, "a token about which the service cannot be asked", "dave-s", "")
	for _, token := range []string{"carol-s", "mallory-s"} {
		n := len(tokensAsked.where(func(q *authenticationv1.TokenReview) bool { return q.Spec.Token == token }))
		if n != len(testenv.Replicas()) {
			t.Errorf("%d replicas asked about %s %d times", len(testenv.Replicas()), token, n)
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
	lists := len(policyAsked.where(func(q *authorizationv1.SubjectAccessReview) bool {
		return q.Spec.ResourceAttributes.Verb == "list" && q.Spec.ResourceAttributes.Resource == "configmaps"
	}))
	if lists != len(testenv.Replicas()) || before == 0 {
		t.Errorf("%d replicas asked %d times whether config maps may be listed", len(testenv.Replicas()), lists)
	}
	stopPolicy()
	failures(t, ns)
	strangers := policyAsked.where(func(q *authorizationv1.SubjectAccessReview) bool {
		return q.Spec.User != carol.Username || q.Spec.ResourceAttributes.Namespace != ns
	})
	if len(strangers) > 0 {
		t.Errorf("the service was asked about what the file does not name: %+v", strangers[0].Spec)
	}
}

// grant has RBAC allow carol to read Secrets and Services.
func grant(t *testing.T, ns string) {
	t.Helper()
	rbac := testenv.Client(t).RbacV1()
	_, err := rbac.Roles(ns).Create(context.Background(), &rbacv1.Role{
		ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"secrets", "services"}, Verbs: []string{"list", "get"}}},
	}, metav1.CreateOptions{})
	if err == nil {
		_, err = rbac.RoleBindings(ns).Create(context.Background(), &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "reader"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "reader"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: carol.Username}},
		}, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// failures shows both policies for a service that cannot be asked.
func failures(t *testing.T, ns string) {
	t.Helper()
	for _, replica := range testenv.Replicas() {
		cs := testenv.TokenClientAt(t, replica, "carol-s")
		if _, err := cs.CoreV1().Services(ns).Get(context.Background(), "x", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s: with NoOpinion what RBAC allows is %v", replica, err)
		}
		if _, err := cs.CoreV1().ConfigMaps(ns).Get(context.Background(), "x", metav1.GetOptions{}); !apierrors.IsForbidden(err) {
			t.Errorf("%s: with NoOpinion what the service alone would allow is %v", replica, err)
		}
	}
	outside.say(t, "authorization.yaml", policyFile(ns, "Deny"))
	for _, replica := range testenv.Replicas() {
		cs := testenv.TokenClientAt(t, replica, "carol-s")
		testenv.Eventually(t, soon, func() error {
			if _, err := cs.CoreV1().Services(ns).Get(context.Background(), "x", metav1.GetOptions{}); !apierrors.IsForbidden(err) {
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

// identity follows carol through kubectl, authorization, admission and audit.
func identity(t *testing.T, ns string, policyAsked *records[authorizationv1.SubjectAccessReview]) {
	t.Helper()
	admitted := recorder(t, ns)
	for _, replica := range testenv.Replicas() { // any of them may be the one that a command line asks
		probe, maps := configMap("probe-"+replica), testenv.ClientAt(t, replica).CoreV1().ConfigMaps(ns)
		testenv.Eventually(t, soon, func() error {
			_, err := maps.Create(context.Background(), probe, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err == nil && len(admitted.where(func(r *admissionv1.AdmissionRequest) bool { return r.Name == probe.Name })) == 0 {
				err = fmt.Errorf("%s has not heard of the webhook", replica)
			}
			return err
		})
	}
	for i, program := range commandLines() {
		whoami(t, program, "carol-s", carol.Username, carol.UID, "[hook:tea system:authenticated]", "Extra: example.org/shift", "[early late]")
		name := fmt.Sprintf("%s-%d", ns, i)
		if out, err := as(t, program, "carol-s", "-n", ns, "create", "configmap", name); err != nil {
			t.Fatalf("%s: %v\n%s", filepath.Base(program), err, out)
		}
		var seen []authenticationv1.UserInfo
		testenv.Eventually(t, soon, func() error { // the log is written behind the request
			seen = audited(t, name)
			if len(seen) == 0 {
				return fmt.Errorf("no audit record is about %s", name)
			}
			return nil
		})
		for _, r := range admitted.where(func(r *admissionv1.AdmissionRequest) bool { return r.Name == name }) {
			seen = append(seen, r.UserInfo)
		}
		if len(seen) != 2 {
			t.Errorf("audit and admission together saw %s %d times", name, len(seen))
		}
		for _, u := range seen {
			same(t, name, u.Username, u.UID, u.Groups, u.Extra)
		}
	}
	creates := policyAsked.where(func(q *authorizationv1.SubjectAccessReview) bool { return q.Spec.ResourceAttributes.Verb == "create" })
	if len(creates) == 0 {
		t.Error("the service was never asked whether carol may create")
	}
	for _, q := range creates {
		same(t, "authorization", q.Spec.User, q.Spec.UID, q.Spec.Groups, q.Spec.Extra)
	}
}

func same[V ~[]string](t *testing.T, where, name, uid string, groups []string, extra map[string]V) {
	t.Helper()
	want := fmt.Sprint(carol.Username, carol.UID, append(carol.Groups[:1:1], "system:authenticated"), carol.Extra)
	if got := fmt.Sprint(name, uid, groups, extra); got != want {
		t.Errorf("%s sees %s, want %s", where, got, want)
	}
}

// recorder is an admission webhook by URL that keeps what it is asked about a namespace and allows all.
func recorder(t *testing.T, ns string) *records[admissionv1.AdmissionRequest] {
	t.Helper()
	all := &records[admissionv1.AdmissionRequest]{}
	outside.serve(t, recorderPort, func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil {
			http.Error(w, "not a review", http.StatusBadRequest)
			return
		}
		all.add(*review.Request)
		review.Response = &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
		review.Request = nil
		_ = json.NewEncoder(w).Encode(review)
	})
	validating(t, ns, "recorder", hook{
		url:   fmt.Sprintf("https://%s:%d/record", outsideIP, recorderPort),
		ca:    outside.ca,
		rules: `[{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]`,
	})
	return all
}

// audited is whom the replicas' audit logs name as the one who created a config map.
func audited(t *testing.T, name string) (out []authenticationv1.UserInfo) {
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
