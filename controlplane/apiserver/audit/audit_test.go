package audit_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/audit"
)

// Every request that changes something and every one that is refused has a record: who, as whom,
// what, and what came of it; also those of callers in this process. Bodies have none, and reads
// that succeed have none.
func TestAudit(t *testing.T) {
	r, j := apiservertest.Audited(t, "")
	ctx := apiservertest.Within(t)
	admin := r.Admin()
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"},
		Data: map[string][]byte{"k": []byte("canary-in-a-body")}}
	if _, err := admin.CoreV1().Secrets("default").Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	e := j.One(t, "creating a secret", func(e *audit.Event) bool {
		return e.ObjectRef != nil && e.ObjectRef.Resource == "secrets"
	})
	if e.Level != audit.LevelMetadata || e.Stage != audit.StageResponseComplete || e.Verb != "create" ||
		e.User.Username != "admin" || e.ObjectRef.Name != "s" ||
		e.ObjectRef.Namespace != "default" || e.ResponseStatus.Code != 201 || len(e.SourceIPs) != 1 ||
		e.SourceIPs[0] != "127.0.0.1" ||
		!strings.HasPrefix(e.RequestURI, "/api/v1/namespaces/default/secrets") || e.AuditID == "" ||
		e.Stamp.Time.Before(e.Received.Time) || e.UserAgent == "" {
		t.Errorf("%+v", e)
	}
	if _, err := admin.CoreV1().Secrets("default").Get(ctx, "s", metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	}

	status := func(code int32) func(*audit.Event) bool {
		return func(e *audit.Event) bool { return e.ResponseStatus != nil && e.ResponseStatus.Code == code }
	}
	apiservertest.Refused(t, r.Call(r.HTTP(nil), "GET", "/api/v1/nodes", "", "Authorization", "Bearer nonsense"), 401,
		"")
	if e := j.One(t, "a bad token", status(401)); e.Verb != "list" || e.ObjectRef.Resource != "nodes" ||
		e.User.Username != "" {
		t.Errorf("401: %+v", e)
	}
	apiservertest.Refused(t, r.Call(r.HTTP(nil), "GET", "/api/v1/nodes", "", "Authorization", "Bearer alice-token",
		"Audit-Id", "my-own"), 403, "")
	if e := j.One(t, "no right", status(403)); e.User.Username != "alice" ||
		!slices.Contains(e.User.Groups, "dev-team") || e.AuditID != "my-own" ||
		e.Annotations["authorization.k8s.io/decision"] != "forbid" ||
		e.ResponseStatus.Reason != metav1.StatusReasonForbidden ||
		!strings.Contains(e.ResponseStatus.Message, `cannot list resource "nodes"`) {
		t.Errorf("403: %+v %+v", e, e.ResponseStatus)
	}
	apiservertest.Refused(t, r.Call(r.AdminHTTP(), "POST", "/api/v1/namespaces/default/configmaps",
		`{"metadata":{"name":"UPPER"}}`), 422, "")
	if e := j.One(t, "an invalid object", status(422)); e.ObjectRef.Name != "UPPER" {
		t.Errorf("422: %+v", e)
	}
	apiservertest.Refused(t, r.Call(r.AdminHTTP(), "GET", "/api/v1/namespaces/default/configmaps/absent", ""), 404, "")
	j.One(t, "an absent object", status(404))
	apiservertest.Refused(t, r.Call(r.AdminHTTP(), "POST", "/nowhere", ""), 405, "")
	j.One(t, "a path", func(e *audit.Event) bool { return e.RequestURI == "/nowhere" && e.ResponseStatus.Code == 405 })

	conf := r.ClientConfig("admin", api.GroupMasters)
	conf.Impersonate.UserName = "alice"
	as, err := kubernetes.NewForConfig(conf)
	if err != nil {
		t.Fatal(err)
	}
	if err := as.CoreV1().Pods("default").Delete(ctx, "p", metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
		t.Fatal(err)
	}
	e = j.One(t, "impersonation", func(e *audit.Event) bool { return e.ImpersonatedUser != nil })
	if e.User.Username != "admin" || e.ImpersonatedUser.Username != "alice" || e.Verb != "delete" {
		t.Errorf("impersonation: %+v", e)
	}

	inside := &api.Request{User: api.User{Name: api.UserScheduler}, Verb: api.VerbDelete, Namespace: "default",
		Name: "inside"}
	inside.Kind = r.Kinds.ByResource(corev1.SchemeGroupVersion.WithResource("pods"))
	if _, err := r.Server.Backend().Do(ctx, inside); err == nil {
		t.Error("a pod that is not there was deleted")
	}
	e = j.One(t, "a caller in this process", func(e *audit.Event) bool {
		return e.ObjectRef != nil && e.ObjectRef.Name == "inside"
	})
	if e.User.Username != api.UserScheduler || e.RequestURI != "/api/v1/namespaces/default/pods/inside" ||
		e.ResponseStatus.Code < 400 {
		t.Errorf("inside: %+v %+v", e, e.ResponseStatus)
	}

	for _, e := range j.All(t, func(*audit.Event) bool { return true }) {
		if reads := e.Verb == "get" || e.Verb == "list" || e.Verb == "watch"; reads && e.ResponseStatus.Code < 400 {
			t.Errorf("a read that succeeded is recorded: %+v", e)
		}
	}
	if strings.Contains(j.Text.String(), "canary-in-a-body") {
		t.Error("a body is recorded")
	}
}

// A policy's levels and stages: bodies where it asks for them, without managed fields, and watches
// as they begin and end.
func TestAuditPolicy(t *testing.T) {
	r, j := apiservertest.Audited(t, `omitManagedFields: true
rules:
- level: RequestResponse
  users: [admin]
  resources: [{group: "", resources: [configmaps]}]
  omitStages: [RequestReceived]
- level: Metadata
  users: [admin]
  verbs: [watch, create]
`)
	ctx := apiservertest.Within(t)
	admin := r.Admin()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "cm-"}, Data: map[string]string{"a": "b"}}
	made, err := admin.CoreV1().ConfigMaps("default").Create(ctx, cm, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	e := j.One(t, "create", func(e *audit.Event) bool {
		return e.Verb == "create" && e.ObjectRef.Resource == "configmaps"
	})
	if e.ObjectRef.Name != made.Name || !bytes.Contains(e.RequestObject, []byte(`"data":{"a":"b"}`)) ||
		!bytes.Contains(e.ResponseObject, []byte(made.Name)) ||
		bytes.Contains(e.ResponseObject, []byte("managedFields")) {
		t.Errorf("%+v\n%s\n%s", e.ObjectRef, e.RequestObject, e.ResponseObject)
	}
	if _, err := admin.CoreV1().ConfigMaps("default").Patch(ctx, made.Name, types.MergePatchType,
		[]byte(`{"data":{"a":"c"}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	if e := j.One(t, "patch", func(e *audit.Event) bool {
		return e.Verb == "patch"
	}); string(e.RequestObject) != `{"data":{"a":"c"}}` {
		t.Errorf("%s", e.RequestObject)
	}
	w, err := admin.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	watching := func(s audit.Stage) func(*audit.Event) bool {
		return func(e *audit.Event) bool { return e.Verb == "watch" && e.Stage == s }
	}
	j.One(t, "a watch is asked for", watching(audit.StageRequestReceived))
	j.One(t, "a watch begins", watching(audit.StageResponseStarted))
	w.Stop()
	j.One(t, "a watch ends", watching(audit.StageResponseComplete))
	apiservertest.Refused(t, r.Call(r.HTTP(nil), "GET", "/api/v1/nodes", "", "Authorization", "Bearer alice-token"),
		403, "")
	if got := j.All(t, func(e *audit.Event) bool { return e.User.Username != "admin" }); len(got) > 0 {
		t.Errorf("recorded against the policy: %+v", got)
	}
}

// F96: what Pod Security notes for the audit stands in the record of the request.
func TestAuditAnnotations(t *testing.T) {
	r, j := apiservertest.Audited(t, "")
	apiservertest.Labelled(r, "watched", "audit", "restricted")
	if _, err := r.Admin().CoreV1().Pods("watched").Create(apiservertest.Within(t),
		apiservertest.PodIn("watched", "p", apiservertest.Privileged), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	e := j.One(t, "the pod", func(e *audit.Event) bool { return e.ObjectRef != nil && e.ObjectRef.Resource == "pods" })
	if !strings.HasPrefix(e.Annotations["pod-security.kubernetes.io/audit-violations"],
		`would violate PodSecurity "restricted:latest": privileged`) ||
		e.Annotations["pod-security.kubernetes.io/enforce-policy"] != "privileged:latest" {
		t.Errorf("%v", e.Annotations)
	}
	// A token that was minted is recorded by its account, and not itself.
	tr, err := r.Admin().CoreV1().ServiceAccounts("default").CreateToken(apiservertest.Within(t), "default",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	j.One(t, "a token", func(e *audit.Event) bool {
		return e.ObjectRef != nil && e.ObjectRef.Subresource == "token" && e.ObjectRef.Name == "default"
	})
	if strings.Contains(j.Text.String(), tr.Status.Token) {
		t.Error("a token is in the log")
	}
}
