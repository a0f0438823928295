package pod

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/internal/virtual"
)

// policyGuard is a policy guard that lets pods pass on request.
type policyGuard struct {
	mu      sync.Mutex
	asked   []string // "uid address"
	refusal error
	open    chan struct{}
}

func (g *policyGuard) Guard(ctx context.Context, pod *v1.Pod, addresses []string) error {
	g.mu.Lock()
	g.asked = append(g.asked, string(pod.UID)+" "+strings.Join(addresses, " "))
	refusal := g.refusal
	g.mu.Unlock()
	if refusal != nil {
		return refusal
	}
	select {
	case <-g.open:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *policyGuard) guardedPods() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.asked)
}

// No container starts before the network policies for the pod's addresses are in force, although it
// is created earlier. If they cannot be enforced, the container reports the reason and is retried.
func TestPoliciesBeforeTheStart(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		g := &policyGuard{open: make(chan struct{})}
		n.cfg.Deps.Policies = g
		n.startAgent()
		defer func() { n.stop() }()
		host := simplePod("u2", v1.Container{Name: "app", Image: "hello:1"})
		host.Spec.HostNetwork = true
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1"}), host)
		virtual.Wait()
		time.Sleep(time.Second)
		virtual.Wait()
		asked := g.guardedPods()
		if len(asked) != 1 || !strings.HasPrefix(asked[0], "u1 10.88.") {
			t.Errorf("asked for %q, want the address of u1 once, and nothing of the host's network", asked)
		}
		if made, started := n.rt.Count("CreateContainer"), n.rt.Count("StartContainer"); made != 2 || started != 1 {
			t.Errorf("%d containers made and %d started: the one of the host's network alone may run", made, started)
		}
		close(g.open)
		virtual.Wait()
		if s := statusSummary(&n.reportedPod("u1").Status); !strings.Contains(s, " Ready;") {
			t.Errorf("let through, and %s", s)
		}

		g.mu.Lock()
		g.refusal = errors.New("not in force: nft is missing")
		g.mu.Unlock()
		n.cluster.Put(simplePod("u3", v1.Container{Name: "app", Image: "hello:1"}))
		time.Sleep(time.Second)
		virtual.Wait()
		w := n.reportedPod("u3").Status.ContainerStatuses[0].State.Waiting
		if w == nil || w.Reason != "NetworkPolicyNotReady" || !strings.Contains(w.Message, "nft is missing") {
			t.Errorf("a container that may not start waits as %+v", w)
		}
		if e := strings.Join(n.cluster.Events("u3"), "\n"); !strings.Contains(e, "nft is missing") {
			t.Errorf("events: %s", e)
		}
		g.mu.Lock()
		g.refusal = nil
		g.mu.Unlock()
		time.Sleep(time.Minute)
		virtual.Wait()
		if s := statusSummary(&n.reportedPod("u3").Status); !strings.Contains(s, " Ready;") {
			t.Errorf("in force at last, and %s", s)
		}
	})
}
