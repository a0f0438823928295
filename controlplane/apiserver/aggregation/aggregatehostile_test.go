package aggregation_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/forward"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/memory/memtest"
	"keelson.dev/keelson/internal/virtual"
)

// A server that says one byte a second is not waited for longer than the caller's time, however it
// drips: its head, or its body. The bubble's clock runs as fast as it can.
func TestForwardOfSlowServers(t *testing.T) {
	for _, part := range []string{"head", "body"} {
		t.Run(part, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) { slowServer(t, part) })
		})
	}
}

// slowServer proxies one request to a server that never completes its response.
func slowServer(t *testing.T, part string) {
	asked := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	rt := dripping{part == "body"}
	var failed error
	w := &sink{head: http.Header{}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://here.example.com/x", nil)
	if err != nil {
		t.Fatal(err)
	}
	target := *req.URL
	func() {
		defer func() {
			if r := recover(); r != nil && r != http.ErrAbortHandler { // an answer that was begun is cut off
				panic(r)
			}
		}()
		forward.Forward{Target: &target, Transport: rt,
			Failed: func(_ http.ResponseWriter, _ *http.Request, err error) { failed = err }}.ServeHTTP(w, req)
	}()
	if took := time.Since(asked); took > 5*time.Minute+2*time.Second {
		t.Errorf("it took %s", took)
	}
	if part == "head" && !errors.Is(failed, context.DeadlineExceeded) {
		t.Errorf("failed: %v", failed)
	}
	if part == "body" && (w.n == 0 || failed != nil) {
		t.Errorf("%d bytes, %v", w.n, failed)
	}
}

// dripping responds in small parts, or never.
type dripping struct{ answers bool }

// RoundTrip implements http.RoundTripper.
func (d dripping) RoundTrip(r *http.Request) (*http.Response, error) {
	if !d.answers {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	return &http.Response{StatusCode: 200, ProtoMajor: 1, Header: http.Header{}, Request: r, ContentLength: -1,
		Body: io.NopCloser(&trickle{ctx: r.Context()})}, nil
}

type trickle struct{ ctx context.Context }

// Read implements io.Reader: a byte a second.
func (s *trickle) Read(p []byte) (int, error) {
	select {
	case <-s.ctx.Done():
		return 0, s.ctx.Err()
	case <-time.After(time.Second):
		p[0] = 'x'
		return 1, nil
	}
}

// sink is a ResponseWriter that counts bytes.
type sink struct {
	head http.Header
	n    int
}

func (s *sink) Header() http.Header         { return s.head }
func (s *sink) WriteHeader(int)             {}
func (s *sink) Write(p []byte) (int, error) { s.n += len(p); return len(p), nil }
func (s *sink) Flush()                      {}

// An endless body is proxied in both directions without being buffered. When the client
// disconnects, the connection to the aggregated API server is closed.
func TestEndlessBodies(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	gone, got := make(chan struct{}, 1), make(chan int64, 1)
	b.Extension("endless", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodPost:
			n, _ := io.Copy(io.Discard, r.Body)
			got <- n
		case strings.HasSuffix(r.URL.Path, "/flood"):
			_, _ = io.Copy(w, endless{})
			gone <- struct{}{}
		default:
			apiservertest.DiscoveryOf("endless.example.com")(w, r)
		}
	}))
	b.AddAPIService("endless.example.com", "endless", nil)
	before := memtest.LiveHeap()
	resp, err := b.Replica.AdminHTTP().Get("https://" + b.Replica.Addr + "/apis/endless.example.com/v1/flood")
	if err != nil {
		t.Fatal(err)
	}
	const much = 256 << 20
	if n, err := io.CopyN(io.Discard, resp.Body, much); err != nil {
		t.Errorf("after %d bytes: %v", n, err)
	}
	if grown := memtest.LiveHeap() - before; grown > 32<<20 {
		t.Errorf("the heap has grown by %d MiB", grown>>20)
	}
	resp.Body.Close()
	<-gone
	up, err := http.NewRequest("POST", "https://"+b.Replica.Addr+"/apis/endless.example.com/v1/flunders",
		io.LimitReader(endless{}, much))
	if err != nil {
		t.Fatal(err)
	}
	if resp, err = b.Replica.AdminHTTP().Do(up); err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if n := <-got; n != much {
		t.Errorf("%d bytes arrived", n)
	}
	if grown := memtest.LiveHeap() - before; grown > 32<<20 {
		t.Errorf("the heap has grown by %d MiB", grown>>20)
	}
}

// What servers say in OpenAPI v2 stands in the document; those that are broken are left out of it
// and break nothing.
func TestSwaggerOfAggregatedServers(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	says := map[string]func(w http.ResponseWriter){
		"good": func(w http.ResponseWriter) {
			fmt.Fprint(w,
				`{"swagger":"2.0","info":{"title":"Good","version":"v1"},"paths":{"/apis/good.example.com/v1/flunders":{"get":{"operationId":"list","responses":{"200":{"description":"OK"}}}},
				"/api/v1/stolen":{"get":{"responses":{"200":{"description":"OK"}}}}}}`)
		},
		"huge": func(w http.ResponseWriter) { _, _ = io.Copy(w, io.LimitReader(endless{}, 100<<20)) },
		"junk": func(w http.ResponseWriter) { fmt.Fprint(w, `{"swagger":7,"paths":[]}`) },
		"none": func(w http.ResponseWriter) { w.WriteHeader(http.StatusNotFound) },
	}
	for name, say := range says {
		b.Extension(name, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/openapi/v2" {
				say(w)
				return
			}
			apiservertest.DiscoveryOf(name+".example.com")(w, r)
		}))
		b.AddAPIService(name+".example.com", name, nil)
	}
	a := b.Heard("/openapi/v2", `"/apis/good.example.com/v1/flunders"`)
	for _, want := range []string{`"/apis/good.example.com/v1/flunders"`, `"io.k8s.api.core.v1.Pod"`} {
		if a.Code != 200 || !strings.Contains(a.Body, want) {
			t.Errorf("%d, %s is missing", a.Code, want)
		}
	}
	if strings.Contains(a.Body, "stolen") {
		t.Error("a server speaks for what is not its own")
	}
}

// The status alone may be written by who may only do that, and nothing else of the object is
// changed by it.
func TestAPIServiceStatusAlone(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Extension("good", apiservertest.DiscoveryOf("good.example.com"))
	b.AddAPIService("good.example.com", "good", nil)
	b.Replica.Must(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "writes-status"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{apiregistrationv1.GroupName}, Resources: []string{"apiservices/status"},
			Verbs: []string{"get", "patch"}}}})
	b.Replica.Must(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "writes-status"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "writes-status"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "writer"}}})
	b.Replica.Await(func() bool {
		d, _ := b.Replica.Server.Authorizer().Authorize(t.Context(),
			&authz.Attributes{User: api.User{Name: "writer"}, Verb: "patch",
				APIGroup: apiregistrationv1.GroupName, APIVersion: "v1", Resource: "apiservices",
				Subresource: "status"})
		return d == authz.Allow
	})
	cert := b.Replica.Cert(pki.Client("writer"))
	c := b.Replica.HTTP(&cert)
	const path = "/apis/apiregistration.k8s.io/v1/apiservices/v1.good.example.com"
	const patch = `{"metadata":{"labels":{"a":"b"}},"spec":{"versionPriority":7},` +
		`"status":{"conditions":[{"type":"Available","status":"False","reason":"Test"}]}}`
	if a := b.Replica.Call(c, "PATCH", path, patch, "Content-Type", "application/merge-patch+json"); a.Code != 403 {
		t.Errorf("the object by who may write its status: %d %s", a.Code, a.Body)
	}
	if a := b.Replica.Call(c, "PATCH", path+"/status", patch, "Content-Type", "application/merge-patch+json"); a.Code !=
		200 {
		t.Fatalf("%d %s", a.Code, a.Body)
	}
	read := func() (s apiregistrationv1.APIService) {
		if err := json.Unmarshal([]byte(b.Replica.Call(b.Replica.AdminHTTP(), "GET", path, "").Body), &s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := read()
	if s.Spec.VersionPriority != 200 || s.Labels["a"] != "" || len(s.Status.Conditions) != 1 ||
		s.Status.Conditions[0].Reason != "Test" {
		t.Errorf("%+v", s)
	}
	if a := b.Replica.Call(b.Replica.AdminHTTP(), "PATCH", path,
		`{"spec":{"versionPriority":8},"status":{"conditions":[]}}`, "Content-Type",
		"application/merge-patch+json"); a.Code != 200 {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	s = read()
	if s.Spec.VersionPriority != 8 || len(s.Status.Conditions) != 1 {
		t.Errorf("after the object was written: %+v", s)
	}
	if a := b.Replica.Call(c, "DELETE", path, ""); a.Code != 403 {
		t.Errorf("deleted by who may write its status: %d", a.Code)
	}
}
