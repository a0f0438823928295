package pod

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

// statusRecorder records every reported status.
type statusRecorder struct {
	agent.Reporter
	mu    sync.Mutex
	heard []string
}

func (e *statusRecorder) PodStatus(p *v1.Pod) {
	e.mu.Lock()
	e.heard = append(e.heard, statusSummary(&p.Status))
	e.mu.Unlock()
	e.Reporter.PodStatus(p)
}

func (e *statusRecorder) takeStatuses() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := e.heard
	e.heard = nil
	return out
}

// A pod's life causes one status write per change that a client waits for, and none in between.
// F115
func TestReportsAreFew(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		for verb, d := range map[string]time.Duration{"RunPodSandbox": 5, "AttachNetwork": 12, "CreateContainer": 20,
			"StopContainer": 10, "StopPodSandbox": 15, "RemovePodSandbox": 5} {
			n.rt.Delay(verb, d*time.Millisecond)
		}
		e := &statusRecorder{Reporter: n.cluster}
		n.cfg.Deps.Reporter = e
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1", ReadinessProbe: &v1.Probe{}}))
		time.Sleep(time.Second)
		want := []string{"Pending Initialized; app waits: ContainerCreating",
			"Running 10.88.0.2 PodReadyToStartContainers Initialized ContainersReady Ready; app runs, ready"}
		if got := e.takeStatuses(); !slices.Equal(got, want) {
			t.Errorf("on the way up: %q", got)
		}
		deletePod(n, "u1", 30)
		time.Sleep(3 * time.Second)
		if got := e.takeStatuses(); !slices.Equal(got,
			[]string{"Failed 10.88.0.2 PodReadyToStartContainers Initialized; app ended: Error 143"}) {
			t.Errorf("on the way down: %q", got)
		}
	})
}

// A delayed status is still reported soon, for example that a pod runs but does not become ready.
func TestHeldBackIsTold(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cfg.Deps.Prober = prober{script: func(ctx context.Context, _ agent.ProbeTarget, on func(agent.ProbeEvent)) {
			on(agent.ProbeEvent{State: agent.ProbeState{Started: true}})
			<-ctx.Done()
		}}
		e := &statusRecorder{Reporter: n.cluster}
		n.cfg.Deps.Reporter = e
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1", ReadinessProbe: &v1.Probe{}}))
		time.Sleep(holdBack - time.Millisecond)
		if got := e.takeStatuses(); len(got) != 1 {
			t.Errorf("at once: %q", got)
		}
		time.Sleep(2 * time.Millisecond)
		virtual.Wait()
		if got := e.takeStatuses(); !slices.Equal(got,
			[]string{"Running 10.88.0.2 PodReadyToStartContainers Initialized; app runs"}) {
			t.Errorf("after a moment: %q", got)
		}
	})
}
