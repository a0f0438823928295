package proxyhealth

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/virtual"
)

type inside = fake.Cluster

// known is a view of a cluster with a node.
type known struct {
	*inside
	node *v1.Node
}

func (k *known) Node() (*v1.Node, bool) { return k.node, k.node != nil }
func (k *known) Cluster() agent.Cluster {
	return agent.Cluster{ServiceCIDRs: []string{"10.96.0.0/16", "fd00:10:96::/112"}}
}

func get(t *testing.T, s *Server, k *known, path string) (int, map[string]any) {
	t.Helper()
	w := httptest.NewRecorder()
	s.newHandler(k).ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	if h := w.Header(); h.Get("Content-Type") != "application/json" || h.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("%s: headers %v", path, h)
	}
	var body map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
		t.Errorf("%s: %v: %q", path, err, w.Body)
	}
	return w.Code, body
}

// F117: /healthz returns 503 while the node is being removed or its rules are late, and /livez only
// while the rules are late.
func TestHealthOfTheProxy(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		s, k := New(Config{}), &known{inside: fake.NewCluster()}
		now := metav1.Now()
		plain, removed := &v1.Node{},
			&v1.Node{Spec: v1.NodeSpec{Taints: []v1.Taint{{Key: "other"}, {Key: taintToBeDeleted}}}}
		deleted := &v1.Node{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}}
		for _, step := range []struct {
			name           string
			do             func()
			node           *v1.Node
			healthz, livez int
		}{
			{"before the node is known", func() {}, nil, 503, 200},
			{"before the first rules", s.Queued, plain, 200, 200},
			{"rules never came", func() { time.Sleep(lateAfter) }, plain, 503, 503},
			{"rules are there", s.Updated, plain, 200, 200},
			{"nothing changes for long", func() { time.Sleep(time.Hour) }, plain, 200, 200},
			{"taint of the autoscaler", func() {}, removed, 503, 200},
			{"node is being deleted", func() {}, deleted, 503, 200},
			{"a change waits", func() { s.Queued(); time.Sleep(lateAfter - 1) }, plain, 200, 200},
			{"the change is late", func() { s.Queued(); time.Sleep(1) }, plain, 503, 503},
			{"late and removed", func() {}, removed, 503, 503},
			{"the change has its rules", s.Updated, plain, 200, 200},
		} {
			step.do()
			k.node = step.node
			healthz, whole := get(t, s, k, pathHealthz)
			livez, part := get(t, s, k, pathLivez)
			if healthz != step.healthz || livez != step.livez {
				t.Errorf("%s: healthz %d %v, livez %d %v; want %d and %d",
					step.name, healthz, whole, livez, part, step.healthz, step.livez)
			}
			if _, told := part["nodeEligible"]; told {
				t.Errorf("%s: livez tells of the node: %v", step.name, part)
			}
			want := step.node == plain
			if whole["nodeEligible"] != want || whole["healthy"] != (livez == 200) {
				t.Errorf("%s: healthz says %v", step.name, whole)
			}
			if status, _ := whole["status"].(map[string]any); s.updated.IsZero() != (len(status) == 0) ||
				len(status) == 1 {
				t.Errorf("%s: status %v", step.name, status)
			}
			at := time.Now().Format(time.RFC3339Nano)
			if whole["currentTime"] != at || (healthz == 200) != (whole["lastUpdated"] == at) &&
				!s.updated.Equal(time.Now()) {
				t.Errorf("%s at %s: healthz says %v", step.name, at, whole)
			}
		}
		var metrics bytes.Buffer
		if err := s.WriteMetrics(&metrics); err != nil ||
			!strings.Contains(metrics.String(), "kubeproxy_proxy_livez_total{code=\"503\"} 3\n") ||
			!strings.Contains(metrics.String(), "kubeproxy_proxy_healthz_total{code=\"200\"} 5\n") {
			t.Errorf("metrics, %v:\n%s", err, &metrics)
		}
	})
}

// F117: the port serves both paths and no others, waits for an address that another program uses,
// and is closed at the end.
func TestHealthPort(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := New(Config{Address: taken.Addr().String(), Log: slog.New(slog.DiscardHandler)})
	ended := make(chan error, 1)
	ctx, stop := context.WithCancel(t.Context())
	go func() { ended <- s.serveHealth(ctx, ln, &known{inside: fake.NewCluster(), node: &v1.Node{}}) }()
	for path, want := range map[string]int{"/healthz": 200, "/livez": 200, "/": 404, "/metrics": 404} {
		res, err := http.Get("http://" + ln.Addr().String() + path)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if res.StatusCode != want {
			t.Errorf("%s: %d, want %d", path, res.StatusCode, want)
		}
	}
	stop()
	if err := <-ended; err == nil {
		t.Error("the server ended without an error")
	}
	if c, err := net.Dial("tcp", ln.Addr().String()); err == nil {
		c.Close()
		t.Error("the port is open after the end")
	}
	short, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := s.waitForAddress(short); err == nil {
		t.Error("an address that another program has was listened on")
	}
	taken.Close()
	later, cancel := context.WithCancel(t.Context())
	defer cancel()
	again, err := s.waitForAddress(later)
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
}
