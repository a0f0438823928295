package authz

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/virtual"
)

// judge responds to SubjectAccessReviews without a network and stores the last request.
type judge struct {
	asked  int
	last   string
	status authorizationv1.SubjectAccessReviewStatus
	err    error
}

func (j *judge) Post(_ context.Context, question, answer any) error {
	j.asked++
	data, err := json.Marshal(question)
	if err != nil {
		return err
	}
	j.last = string(data)
	out, err := json.Marshal(map[string]any{"status": j.status})
	if err != nil {
		return err
	}
	return errors.Join(json.Unmarshal(out, answer), j.err)
}

type matchFunc func(*authorizationv1.SubjectAccessReview) (bool, error)

func (f matchFunc) Eval(_ context.Context, r *authorizationv1.SubjectAccessReview) (bool, error) {
	return f(r)
}

func list(resource string) *Attributes {
	return &Attributes{
		User: api.User{Name: "alice", Groups: []string{"dev"}, Extra: map[string][]string{"k": {"v"}}},
		Verb: "list", Resource: resource, APIVersion: "v1", Namespace: "default",
	}
}

// The webhook's response decides. If the webhook fails, the configured decision applies.
func TestWebhookDecisions(t *testing.T) {
	j := &judge{}
	conf := WebhookConfig{Name: "w", Service: j, Version: "v1", Clock: time.Now}
	decide := func() (Decision, string) {
		t.Helper()
		w, err := NewWebhook(conf)
		if err != nil {
			t.Fatal(err)
		}
		return w.Authorize(t.Context(), list("pods"))
	}
	for _, c := range []struct {
		status authorizationv1.SubjectAccessReviewStatus
		want   Decision
	}{
		{authorizationv1.SubjectAccessReviewStatus{}, NoOpinion},
		{authorizationv1.SubjectAccessReviewStatus{Allowed: true}, Allow},
		{authorizationv1.SubjectAccessReviewStatus{Denied: true, Reason: "no"}, Deny},
		{authorizationv1.SubjectAccessReviewStatus{Allowed: true, Denied: true}, Deny},
	} {
		j.status = c.status
		if d, _ := decide(); d != c.want {
			t.Errorf("%+v: %v", c.status, d)
		}
	}
	j.err = errors.New("down")
	for _, onError := range []Decision{NoOpinion, Deny} {
		conf.OnError = onError
		if d, reason := decide(); d != onError || !strings.Contains(reason, "calling webhook w failed") {
			t.Errorf("%v, %q", d, reason)
		}
		conf.Match = matchFunc(func(*authorizationv1.SubjectAccessReview) (bool, error) {
			return false, errors.New("cannot tell")
		})
		before := j.asked
		if d, reason := decide(); d != onError || j.asked != before || strings.Contains(reason, "cannot tell") {
			t.Errorf("a condition that fails: %v, %q", d, reason)
		}
		conf.Match = matchFunc(func(*authorizationv1.SubjectAccessReview) (bool, error) { return false, nil })
		if d, _ := decide(); d != NoOpinion || j.asked != before {
			t.Errorf("a question that is not for the service: %v", d)
		}
		conf.Match = nil
	}
	if _, err := NewWebhook(WebhookConfig{Version: "v3"}); err == nil {
		t.Error("a version that is none is taken")
	}
}

// The review contains the user, the attributes and the selectors, in the form of its version.
func TestWebhookQuestions(t *testing.T) {
	j := &judge{}
	for version, words := range map[string][]string{
		"v1": {`"apiVersion":"authorization.k8s.io/v1"`, `"groups":["dev"]`,
			`"fieldSelector":{"requirements":[{"key":"spec.nodeName","operator":"In","values":["a"]}]}`},
		"v1beta1": {`"apiVersion":"authorization.k8s.io/v1beta1"`, `"group":["dev"]`,
			`"labelSelector":{"requirements":[{"key":"app","operator":"In","values":["x","y"]}]}`},
	} {
		w, err := NewWebhook(WebhookConfig{Service: j, Version: version, Clock: time.Now})
		if err != nil {
			t.Fatal(err)
		}
		a := list("pods")
		a.FieldSelector, a.LabelSelector = fields.OneTermEqualSelector("spec.nodeName", "a"), "app in (x,y)"
		w.Authorize(t.Context(), a)
		for _, word := range append(words, `"user":"alice"`, `"extra":{"k":["v"]}`, `"verb":"list"`,
			`"namespace":"default"`) {
			if !strings.Contains(j.last, word) {
				t.Errorf("%s: %s lacks %s", version, j.last, word)
			}
		}
		w.Authorize(t.Context(), &Attributes{User: api.User{Name: "alice"}, Verb: "get", Path: "/metrics"})
		if !strings.Contains(j.last, `"nonResourceAttributes":{"path":"/metrics","verb":"get"}`) {
			t.Errorf("%s: %s", version, j.last)
		}
	}
}

// Allowing responses and other responses have separate TTLs; faults are not cached.
func TestWebhookRemembers(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		j := &judge{status: authorizationv1.SubjectAccessReviewStatus{Allowed: true}}
		w, err := NewWebhook(WebhookConfig{Service: j, Version: "v1", Clock: time.Now, AllowedTTL: time.Minute,
			OtherTTL: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		ask := func(resource string, want Decision, asked int) {
			t.Helper()
			if d, _ := w.Authorize(t.Context(), list(resource)); d != want || j.asked != asked {
				t.Errorf("%s: %v after %d questions, want %v after %d", resource, d, j.asked, want, asked)
			}
		}
		ask("pods", Allow, 1)
		ask("pods", Allow, 1)
		j.status = authorizationv1.SubjectAccessReviewStatus{Denied: true}
		ask("secrets", Deny, 2)
		ask("secrets", Deny, 2)
		time.Sleep(time.Second) // on the synctest clock
		ask("secrets", Deny, 3)
		ask("pods", Allow, 3)
		time.Sleep(time.Minute)
		j.err = errors.New("down")
		ask("pods", NoOpinion, 4)
		ask("pods", NoOpinion, 5)
	})
}

// The selectors of an access review become those of the attributes. Invalid requirements are
// omitted and reported.
func TestReviewSelectors(t *testing.T) {
	a, err := OfReview(api.User{}, &authorizationv1.ResourceAttributes{
		FieldSelector: &authorizationv1.FieldSelectorAttributes{Requirements: []metav1.FieldSelectorRequirement{
			{Key: "spec.nodeName", Operator: metav1.FieldSelectorOpIn, Values: []string{"a"}},
			{Key: "x", Operator: "Odd"},
		}},
		LabelSelector: &authorizationv1.LabelSelectorAttributes{Requirements: []metav1.LabelSelectorRequirement{
			{Key: "app", Operator: metav1.LabelSelectorOpExists},
		}},
	}, nil)
	if err == nil || !strings.Contains(err.Error(), "requirements[1]") ||
		a.FieldSelector.String() != "spec.nodeName=a" || a.LabelSelector != "app" {
		t.Errorf("%v; %v; %q", err, a.FieldSelector, a.LabelSelector)
	}
	a, err = OfReview(api.User{}, &authorizationv1.ResourceAttributes{
		FieldSelector: &authorizationv1.FieldSelectorAttributes{RawSelector: "a=b"},
		LabelSelector: &authorizationv1.LabelSelectorAttributes{RawSelector: "((("},
	}, nil)
	if err == nil || a.FieldSelector.String() != "a=b" || a.LabelSelector != "" {
		t.Errorf("%v; %v; %q", err, a.FieldSelector, a.LabelSelector)
	}
}

// Each line of a policy file allows the requests that Kubernetes documents for it.
func TestABAC(t *testing.T) {
	path := filepath.Join(t.TempDir(), "policy")
	read := func(text string) (*ABAC, error) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return ReadABAC(path)
	}
	v1 := func(spec string) string {
		return `{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","spec":` + spec + `}`
	}
	alice := api.User{Name: "alice", Groups: []string{"dev", api.GroupAuthenticated}}
	pods := func(verb, namespace string) *Attributes {
		return &Attributes{User: alice, Verb: verb, Resource: "pods", Namespace: namespace}
	}
	at := func(path string) *Attributes { return &Attributes{User: alice, Verb: "get", Path: path} }
	stranger := &Attributes{User: api.User{Name: "x", Groups: []string{api.GroupUnauthenticated}}, Verb: "get",
		Resource: "pods"}
	for line, want := range map[string]map[*Attributes]bool{
		v1(`{"user":"alice","namespace":"*","resource":"*","apiGroup":"*"}`): {pods("delete", "a"): true,
			at("/api"): false, stranger: false},
		v1(`{"user":"alice","namespace":"a","resource":"pods","readonly":true}`): {pods("watch", "a"): true,
			pods("delete", "a"): false, pods("get", "b"): false},
		v1(`{"user":"alice","namespace":"a","resource":"pods","apiGroup":"apps"}`): {pods("get", "a"): false},
		v1(`{"user":"bob","group":"dev","namespace":"*","resource":"*"}`):          {pods("get", "a"): false},
		v1(`{"group":"dev","nonResourcePath":"/api*"}`): {at("/apis/x"): true,
			at("/version"): false, pods("get", "a"): false},
		v1(`{"group":"*","nonResourcePath":"*"}`): {at("/apis/x"): true},
		v1(`{"user":"*","namespace":"*","resource":"*","apiGroup":"*"}`): {pods("get", "a"): true,
			stranger: false},
		v1(`{"namespace":"*","resource":"*","apiGroup":"*","nonResourcePath":"*"}`): {pods("get", "a"): false,
			at("/api"): false},
		`{"user":"alice","readonly":true}`: {pods("get", "a"): true,
			pods("create", "a"): false, at("/api"): true},
		`{"resource":"pods","namespace":"a"}`: {pods("get", "a"): true,
			stranger: false, at("/api"): false},
	} {
		z, err := read("\n# a comment\n" + line + "\n")
		if err != nil {
			t.Fatal(err)
		}
		for a, allowed := range want {
			if d, _ := z.Authorize(t.Context(), a); (d == Allow) != allowed {
				t.Errorf("%s: %s %s%s by %s: %v", line, a.Verb, a.Resource, a.Path, a.User.Name, d)
			}
		}
	}
	for _, text := range []string{`{"usr":"a"}`, `{`, v1(`{"user":"a"}`) + v1(`{"user":"b"}`),
		`{"apiVersion":"v1","kind":"Policy"}`,
		`{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy","user":"a","spec":{}}`} {
		if _, err := read("# first\n" + text); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%s: %v", text, err)
		}
	}
}
