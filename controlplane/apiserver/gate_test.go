package apiserver_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/await"
)

// One user's watches are bounded; over the bound is 429 with Retry-After, and
// neither another user nor an administrator notices. What is given up can be had again.
func TestWatchesOfOneUserAreBounded(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) { c.Serving.MemoryLimit = 1 })
	for _, user := range []string{"tenant", "other"} {
		r.Must(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"}})
	}
	cert := func(user string, groups ...string) *http.Client {
		c := r.Cert(pki.Client(user, groups...))
		return r.HTTP(&c)
	}
	ctx, cancel := context.WithCancel(t.Context())
	open := func(c *http.Client, ctx context.Context) *http.Response {
		req, err := http.NewRequestWithContext(ctx, "GET", "https://"+r.Addr+"/api/v1/configmaps?watch=true", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := c.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		return resp
	}
	tenant := cert("tenant")
	let := 0
	var last *http.Response
	for let < 1000 {
		if last = open(tenant, ctx); last.StatusCode != http.StatusOK {
			break
		}
		let++
	}
	if want := flowcontrol.ForMemory(1).Seats[flowcontrol.Watch] * 3 / 8; let != want ||
		last.StatusCode != http.StatusTooManyRequests || last.Header.Get("Retry-After") != "1" {
		t.Errorf("%d watches, want %d; then %d, Retry-After %q", let, want, last.StatusCode,
			last.Header.Get("Retry-After"))
	}
	for name, c := range map[string]*http.Client{"another user": cert("other"), "an administrator": r.AdminHTTP()} {
		if resp := open(c, t.Context()); resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d", name, resp.StatusCode)
		}
	}
	if got := r.Call(tenant, "GET", "/api/v1/namespaces/default/configmaps", ""); got.Code != http.StatusOK {
		t.Errorf("the tenant's list: %d %s", got.Code, got.Body)
	}
	metrics := r.Call(r.AdminHTTP(), "GET", "/metrics", "").Body
	for _, want := range []string{`apiserver_current_inflight_requests{request_kind="watch"} `,
		`keelson_requests_refused_total{request_kind="watch"} 1`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	cancel()
	await.Until(t.Context(), t, await.Patience, 10*time.Millisecond, "free places for watches", func() error {
		if n, _ := r.Server.GateStats(flowcontrol.Watch); n > 2 {
			return fmt.Errorf("%d places are taken", n)
		}
		return nil
	})
	if resp := open(tenant, t.Context()); resp.StatusCode != http.StatusOK {
		t.Errorf("after the others ended: %d", resp.StatusCode)
	}
}

// Requests of one node, by HTTP or through the node gateway in this process, use at most a small
// share of the memory limit. A further request gets a 429. Requests of another node, of a user and
// of an administrator are still served.
func TestOneNodeIsBounded(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) { c.Serving.MemoryLimit = 1 })
	hostile, honest := api.NodeUser("hostile"), api.NodeUser("honest")
	kind := kindNamed(t, r, "services")
	list := func(u api.User) error {
		_, err := r.Server.Backend().Do(apiservertest.Within(t),
			&api.Request{User: u, Verb: api.VerbList, Kind: kind, Internal: api.InternalOptions{Pointers: true}})
		return err
	}
	byHTTP := func(u api.User) int {
		c := r.Cert(pki.Client(u.Name, u.Groups...))
		return r.Call(r.HTTP(&c), "GET", "/api/v1/services", "").Code
	}
	if err := list(hostile); err != nil {
		t.Fatal(err)
	}
	var held []endpoints.Pass
	for len(held) < 1000 {
		ctx, done := context.WithTimeout(t.Context(), 10*time.Millisecond)
		p, err := r.Server.EnterGate(ctx, &api.Request{User: hostile, Verb: api.VerbList, Kind: kind}, 64<<10)
		done()
		if err != nil {
			break
		}
		held = append(held, p)
	}
	if most := flowcontrol.ForMemory(1).Seats[flowcontrol.Read] / 8; len(held) != most {
		t.Errorf("one node has %d requests under way, want %d", len(held), most)
	}
	if err := list(hostile); !apierrors.IsTooManyRequests(err) {
		t.Errorf("the fleet's next request for the node: %v", err)
	}
	if code := byHTTP(hostile); code != http.StatusTooManyRequests {
		t.Errorf("the node's next request by HTTP: %d", code)
	}
	if _, err := r.Server.Backend().Watch(apiservertest.Within(t),
		&api.Request{User: hostile, Verb: api.VerbWatch, Kind: kind}); err != nil {
		t.Errorf("its watches are apart: %v", err)
	}
	for _, u := range []api.User{honest, {Name: api.UserController, Groups: []string{api.GroupMasters}}} {
		if err := list(u); err != nil {
			t.Errorf("%s: %v", u.Name, err)
		}
	}
	if code := byHTTP(honest); code != http.StatusOK {
		t.Errorf("another node by HTTP: %d", code)
	}
	for _, p := range held {
		p.Leave()
	}
	if err := list(hostile); err != nil {
		t.Errorf("when the others have ended: %v", err)
	}
}

// A watch for a node has a place as long as it runs.
func TestWatchesForANodeAreBounded(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) { c.Serving.MemoryLimit = 1 })
	kind, node := kindNamed(t, r, "services"), api.NodeUser("hostile")
	var running []watch.Interface
	for len(running) < 1000 {
		w, err := r.Server.Backend().Watch(t.Context(), &api.Request{User: node, Verb: api.VerbWatch, Kind: kind})
		if err != nil {
			if !apierrors.IsTooManyRequests(err) {
				t.Fatal(err)
			}
			break
		}
		running = append(running, w)
	}
	if most := flowcontrol.ForMemory(1).Seats[flowcontrol.Watch] / 8; len(running) != most {
		t.Errorf("one node has %d watches, want %d", len(running), most)
	}
	for _, w := range running {
		w.Stop()
	}
	await.Until(apiservertest.Within(t), t, await.Patience, 10*time.Millisecond,
		"the end of all watches", func() error {
			if n, _ := r.Server.GateStats(flowcontrol.Watch); n != 0 {
				return fmt.Errorf("%d places are taken", n)
			}
			return nil
		})
}

func kindNamed(t *testing.T, r *apiservertest.Replica, resource string) *api.Kind {
	t.Helper()
	for _, k := range r.Kinds.All() {
		if k.Resource == resource {
			return k
		}
	}
	t.Fatalf("no kind %s", resource)
	return nil
}
