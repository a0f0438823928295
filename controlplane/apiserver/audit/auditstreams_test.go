package audit_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/audit"
)

// aboutPods matches the records of a subresource of pods.
func aboutPods(sub string, stage audit.Stage, code int32) func(*audit.Event) bool {
	return func(e *audit.Event) bool {
		return e.ObjectRef != nil && e.ObjectRef.Resource == "pods" && e.ObjectRef.Subresource == sub &&
			e.Stage == stage &&
			e.ResponseStatus != nil && e.ResponseStatus.Code == code
	}
}

// Streams have records as they begin and as they end, by either protocol, and so has one that never
// begins.
func TestAuditOfStreams(t *testing.T) {
	j := &apiservertest.Journal{}
	r, _ := apiservertest.StreamingWith(t, func(c *apiserver.Config) {
		c.Process.Audit = audit.New(audit.Default(), j, time.Now)
	})
	for protocol, e := range apiservertest.Executors(t, r,
		&corev1.PodExecOptions{Command: []string{"cat"}, Stdin: true, Stdout: true}) {
		var out bytes.Buffer
		if err := e.StreamWithContext(apiservertest.Within(t),
			remotecommand.StreamOptions{Stdin: strings.NewReader("x"), Stdout: &out}); err != nil {
			t.Errorf("%s: %v", protocol, err)
		}
	}
	apiservertest.Eventually(t, func() error {
		begun := j.All(t, aboutPods("exec", audit.StageResponseStarted, 101))
		ended := j.All(t, aboutPods("exec", audit.StageResponseComplete, 101))
		if len(begun) != 2 || len(ended) != 2 {
			return fmt.Errorf("two execs have %d and %d records", len(begun), len(ended))
		}
		for _, e := range begun {
			if e.Verb != "create" || e.User.Username != "admin" || e.ObjectRef.Name != "p" ||
				!strings.Contains(e.RequestURI, "command=cat") {
				t.Errorf("%+v", e)
			}
		}
		return nil
	})
	trip, upgrader, err := spdy.RoundTripperFor(r.ClientConfig("admin", api.GroupMasters))
	if err != nil {
		t.Fatal(err)
	}
	u := r.Admin().CoreV1().RESTClient().Post().Resource("pods").Namespace("default").Name("p").SubResource(
		"portforward").URL()
	stop, ready := make(chan struct{}), make(chan struct{})
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: trip}, "POST", u)
	forward, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{":80"}, stop, ready,
		io.Discard, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- forward.ForwardPorts() }()
	select {
	case <-ready:
	case err := <-ended:
		t.Fatal(err)
	}
	j.One(t, "a port-forward begins", aboutPods("portforward", audit.StageResponseStarted, 101))
	close(stop)
	<-ended
	j.One(t, "a port-forward ends", aboutPods("portforward", audit.StageResponseComplete, 101))
	apiservertest.Refused(t, r.Call(r.AdminHTTP(), "POST",
		"/api/v1/namespaces/default/pods/absent/exec?command=x&stdout=true", ""), 404, "")
	j.One(t, "an exec in a pod that is absent", aboutPods("exec", audit.StageResponseComplete, 404))
}

// What meets a conflict, what a budget holds back, and what finds no room has a record.
func TestAuditOfConflicts(t *testing.T) {
	r, j := apiservertest.Audited(t, "")
	admin := r.AdminHTTP()
	const maps, body = "/api/v1/namespaces/default/configmaps", `{"metadata":{"name":"twice"}}`
	if got := r.Call(admin, "POST", maps, body); got.Code != 201 {
		t.Fatal(got.Body)
	}
	apiservertest.Refused(t, r.Call(admin, "POST", maps, body), 409, "already exists")
	apiservertest.Refused(t, r.Call(admin, "PUT", maps+"/twice",
		`{"metadata":{"name":"twice","resourceVersion":"1"},"data":{"a":"b"}}`), 409, "")
	for _, verb := range []string{"create", "update"} {
		j.One(t, verb, func(e *audit.Event) bool {
			return e.ObjectRef != nil && e.ObjectRef.Name == "twice" && e.Verb == verb && e.ResponseStatus.Code == 409
		})
	}
	p := apiservertest.NewPod("p")
	p.Labels = map[string]string{"app": "p"}
	r.Must(p)
	if err := r.Admin().CoreV1().Pods("default").Bind(apiservertest.Within(t), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: "p"}, Target: corev1.ObjectReference{Kind: "Node", Name: "n"},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := r.Call(admin, "PATCH", "/api/v1/namespaces/default/pods/p/status", `{"status":{"phase":"Running"}}`,
		"Content-Type", "application/merge-patch+json"); got.Code != 200 {
		t.Fatal(got.Body)
	}
	all := intstr.FromInt32(1)
	r.Must(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "p"}},
		}})
	apiservertest.Refused(t, r.Call(admin, "POST", "/api/v1/namespaces/default/pods/p/eviction",
		`{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"p"}}`), 429, "")
	j.One(t, "an eviction", aboutPods("eviction", audit.StageResponseComplete, 429))
}

// The level Request has the body of the request and not that of the answer; the stages that a rule
// leaves out are left out beside those of the policy.
func TestAuditLevelRequest(t *testing.T) {
	r, j := apiservertest.Audited(t, `omitStages: [RequestReceived]
rules:
- level: Request
  resources: [{group: "", resources: [configmaps]}]
  verbs: [create, get]
- level: RequestResponse
  verbs: [watch]
  omitStages: [ResponseStarted]
`)
	admin := r.AdminHTTP()
	made := r.Call(admin, "POST", "/api/v1/namespaces/default/configmaps",
		`{"metadata":{"name":"m"},"data":{"a":"canary"}}`)
	if made.Code != 201 {
		t.Fatal(made.Body)
	}
	of := func(verb string) func(*audit.Event) bool {
		return func(e *audit.Event) bool {
			return e.Verb == verb && e.User.Username == "admin" && e.ObjectRef.Resource == "configmaps" &&
				e.ObjectRef.Namespace == "default"
		}
	}
	e := j.One(t, "create", of("create"))
	if e.Level != audit.LevelRequest || !bytes.Contains(e.RequestObject, []byte("canary")) || e.ResponseObject != nil {
		t.Errorf("%s: %s, %s", e.Level, e.RequestObject, e.ResponseObject)
	}
	r.Call(admin, "GET", "/api/v1/namespaces/default/configmaps/m", "")
	if e := j.One(t, "get", of("get")); e.RequestObject != nil || e.ResponseObject != nil {
		t.Errorf("a read: %s, %s", e.RequestObject, e.ResponseObject)
	}
	r.Call(admin, "GET", "/api/v1/namespaces/default/configmaps?watch=true&timeoutSeconds=1", "")
	if e := j.One(t, "watch", of("watch")); e.Stage != audit.StageResponseComplete {
		t.Errorf("%+v", e)
	}
	r.Call(admin, "DELETE", "/api/v1/namespaces/default/configmaps/m", "")
	if got := j.All(t, of("delete")); len(got) > 0 {
		t.Errorf("recorded against the policy: %+v", got)
	}
}
