package apiserver

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/flow"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
)

// One user's watches are bounded; over the bound is 429 with Retry-After, and
// neither another user nor an administrator notices. What is given up can be had again.
func TestWatchesOfOneUserAreBounded(t *testing.T) {
	r := start(t, func(c *Config) { c.MemoryLimit = 1 })
	for _, user := range []string{"tenant", "other"} {
		r.must(&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: user},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"}})
	}
	cert := func(user string, groups ...string) *http.Client {
		c := r.cert(pki.Client(user, groups...))
		return r.http(&c)
	}
	ctx, cancel := context.WithCancel(t.Context())
	open := func(c *http.Client, ctx context.Context) *http.Response {
		req, err := http.NewRequestWithContext(ctx, "GET", "https://"+r.addr+"/api/v1/configmaps?watch=true", nil)
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
	if want := flow.ForMemory(1).Seats[flow.Watch] * 3 / 8; let != want || last.StatusCode != http.StatusTooManyRequests || last.Header.Get("Retry-After") != "1" {
		t.Errorf("%d watches, want %d; then %d, Retry-After %q", let, want, last.StatusCode, last.Header.Get("Retry-After"))
	}
	for name, c := range map[string]*http.Client{"another user": cert("other"), "an administrator": r.adminHTTP()} {
		if resp := open(c, t.Context()); resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d", name, resp.StatusCode)
		}
	}
	if got := r.call(tenant, "GET", "/api/v1/namespaces/default/configmaps", ""); got.code != http.StatusOK {
		t.Errorf("the tenant's list: %d %s", got.code, got.body)
	}
	metrics := r.call(r.adminHTTP(), "GET", "/metrics", "").body
	for _, want := range []string{`apiserver_current_inflight_requests{request_kind="watch"} `, `keelson_requests_refused_total{request_kind="watch"} 1`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics has no %s", want)
		}
	}
	cancel()
	soon, done := context.WithTimeout(t.Context(), 20*time.Second)
	defer done()
	if err := wait.For(soon, 10*time.Millisecond, func() error {
		if n, _ := r.gate.Stats(flow.Watch); n > 2 {
			return fmt.Errorf("%d places are taken", n)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if resp := open(tenant, t.Context()); resp.StatusCode != http.StatusOK {
		t.Errorf("after the others ended: %d", resp.StatusCode)
	}
}
