package apiserver_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// F133: /metrics/slis has the result of each health check, of requests for the health endpoints and
// of its own. Only clients with the right for the path read it, and paths that clients invent make
// no series.
func TestSLIs(t *testing.T) {
	var broken atomic.Bool
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.State.Ready = func(context.Context) error {
			if broken.Load() {
				return errors.New("no leader")
			}
			return nil
		}
	})
	c := r.AdminHTTP()
	for _, path := range []string{"/livez", "/readyz", "/readyz/etcd", "/readyz/invented", "/healthz/ping"} {
		r.Call(r.Unauthenticated(), "GET", path, "")
	}
	expect := func(want ...string) string {
		t.Helper()
		got := r.Call(c, "GET", "/metrics/slis", "")
		for _, line := range want {
			if !strings.Contains(got.Body, "\n"+line+"\n") {
				t.Errorf("no %s in %d:\n%s", line, got.Code, got.Body)
			}
		}
		return got.Body
	}
	body := expect(`kubernetes_healthcheck{name="ping",type="livez"} 1`,
		`kubernetes_healthcheck{name="ping",type="healthz"} 1`,
		`kubernetes_healthcheck{name="replica",type="readyz"} 1`, `kubernetes_healthcheck{name="etcd",type="readyz"} 1`,
		`kubernetes_healthchecks_total{name="ping",status="success",type="livez"} 2`,
		`kubernetes_healthchecks_total{name="etcd",status="success",type="readyz"} 2`,
		`kubernetes_healthchecks_total{name="replica",status="success",type="readyz"} 2`)
	if strings.Contains(body, "invented") || !strings.Contains(body, "\nprocess_start_time_seconds ") {
		t.Errorf("SLIs:\n%s", body)
	}
	broken.Store(true)
	expect(`kubernetes_healthcheck{name="replica",type="readyz"} 0`,
		`kubernetes_healthcheck{name="ping",type="readyz"} 1`,
		`kubernetes_healthchecks_total{name="replica",status="error",type="readyz"} 1`,
		`kubernetes_healthchecks_total{name="replica",status="success",type="readyz"} 2`)
	if got := r.Call(r.Unauthenticated(), "GET", "/metrics/slis", ""); got.Code != 403 && got.Code != 401 {
		t.Errorf("an unauthenticated client: %d", got.Code)
	}
	for group, want := range map[string]int{"system:monitoring": 200, "tenants": 403} {
		cert := r.Cert(pki.Client("prometheus", group))
		if got := r.Call(r.HTTP(&cert), "GET", "/metrics/slis", ""); got.Code != want {
			t.Errorf("a member of %s: %d, want %d", group, got.Code, want)
		}
	}
	if root := r.Call(c, "GET", "/", "").Body; !strings.Contains(root, `"/metrics/slis"`) {
		t.Errorf("the list of paths: %s", root)
	}
}
