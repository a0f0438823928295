package pod

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/podevents"
	"keelson.dev/keelson/internal/virtual"
)

var chaosSeeds = flag.Uint64("chaos.seeds", 3, "how many seeds TestChaos runs, each for an hour of virtual time")

// TestChaos injects failures of runtime calls, container exits, pause exits and agent restarts at
// random for an hour of virtual time. At most one instance of a container runs at any time.
// Afterwards all pods become Ready, and after their deletion nothing is left. F94, F101, F123,
// F125, P9, P15
func TestChaos(t *testing.T) {
	for seed := range *chaosSeeds {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) { runChaos(t, rand.New(rand.NewPCG(seed, 1))) })
		})
	}
}

func runChaos(t *testing.T, r *rand.Rand) {
	n := newNode(t)
	for verb, d := range map[string]time.Duration{"RunPodSandbox": 20, "CreateContainer": 10, "StartContainer": 5,
		"StopContainer": 30, "StopPodSandbox": 10} {
		n.rt.Delay(verb, d*time.Millisecond)
	}
	n.vol.Delay("MountAll", 15*time.Millisecond)
	n.rt.Delay("AttachNetwork", 40*time.Millisecond) // containers are created in the meantime
	// The worker's observations are outdated: actions complete in between.
	n.rt.Delay("ListContainers", 7*time.Millisecond)
	n.rt.Delay("ListPodSandbox", 4*time.Millisecond)
	n.startAgent()
	defer func() { n.stop() }()
	const pods = 6
	uid := func(i int) types.UID { return types.UID(fmt.Sprintf("u%d", i)) }
	for i := range pods {
		p := simplePod(string(uid(i)), v1.Container{Name: "app", Image: "hello:1", ReadinessProbe: &v1.Probe{}},
			v1.Container{Name: "log", Image: "tools:1"})
		always := v1.ContainerRestartPolicyAlways
		p.Spec.InitContainers = []v1.Container{{Name: "proxy", Image: "tools:1", RestartPolicy: &always}}
		n.cluster.Put(p)
	}
	boom := errors.New("boom")
	verbs := []string{"RunPodSandbox", "CreateContainer", "StartContainer", "StopContainer", "RemoveContainer",
		"StopPodSandbox", "RemovePodSandbox"}
	for range 300 {
		time.Sleep(time.Duration(r.IntN(12_000)) * time.Millisecond)
		who := uid(r.IntN(pods))
		switch r.IntN(9) {
		case 8:
			n.net.Fail("Add", boom)
		case 0, 1:
			n.rt.Fail(verbs[r.IntN(len(verbs))], boom)
		case 2:
			n.vol.Fail([]string{"MountAll", "UnmountAll"}[r.IntN(2)], boom)
		case 3, 4, 5:
			// it may not be running
			_ = n.rt.Exit(who, []string{"app", "log", "proxy"}[r.IntN(3)], int32(r.IntN(2)), "")
		case 6:
			_ = n.rt.KillSandbox(who)
		case 7:
			n.startAgent()
		}
	}
	time.Sleep(10 * time.Minute)
	virtual.Wait()
	for i := range pods {
		if s := statusSummary(&n.reportedPod(uid(i)).Status); !strings.Contains(s, " Ready;") {
			t.Errorf("after ten minutes of peace %s is %s; events: %q", uid(i), s, n.cluster.Events(uid(i)))
		}
	}
	if m := n.rt.MaxRunning(); m != 1 {
		t.Errorf("%d instances of one container ran at once", m)
	}
	// A dead sandbox is kept while it holds the previous instance of a container.
	if sb, c := n.rt.Left(); sb > pods*4 || c > pods*6 || n.net.InUse() != pods {
		t.Errorf("%d pods have %d sandboxes, %d container records and %d addresses", pods, sb, c, n.net.InUse())
	}
	for i := range pods {
		deletePod(n, uid(i), 30)
		if r.IntN(2) == 0 {
			n.startAgent()
		}
	}
	time.Sleep(5 * time.Minute)
	virtual.Wait()
	if left := n.cluster.Pods(); len(left) != 0 {
		t.Errorf("%d pods are left; the first: %s", len(left), statusSummary(&left[0].Status))
	}
	sb, c := n.rt.Left()
	v, _ := n.vol.Pods()
	if sb != 0 || c != 0 || n.net.InUse() != 0 || len(v) != 0 {
		t.Errorf("left: %d sandboxes, %d containers, %d addresses, volumes of %v", sb, c, n.net.InUse(), v)
	}
	for _, dir := range []string{filepath.Join(n.cfg.Paths.State, "pods"), n.cfg.Paths.Logs} {
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("left in %s: %v", dir, left)
		}
	}
}

// A failing postStart hook ends the container, which is restarted; an event reports it.
func TestPostStartFails(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Fail("ExecSync", errors.New("hook is broken"))
		n.startAgent()
		defer func() { n.stop() }()
		hook := &v1.Lifecycle{PostStart: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"/hook"}}}}
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1", Lifecycle: hook}))
		time.Sleep(time.Second)
		n.expectStatus("u1", running+", 1 restarts, before: Error 143")
		if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e,
			"FailedPostStartHook PostStartHook failed x1") {
			t.Errorf("events: %s", e)
		}
	})
}

// A pod deleted during an image pull is removed at once, and the pull is cancelled.
func TestDeletedWhilePulling(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.img.Delay("PullImage", time.Hour)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "big:1"}))
		virtual.Wait()
		begin := time.Now()
		deletePod(n, "u1", 30)
		if err := n.cluster.Await(t.Context(), "gone", func() bool { return n.cluster.Gone("u1") }); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took != 0 {
			t.Errorf("it took %s", took)
		}
	})
}

// A second deletion with a shorter grace period cuts the first one short.
func TestGraceShortened(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.IgnoreTerm = map[string]bool{"app": true}
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		virtual.Wait()
		begin := time.Now()
		deletePod(n, "u1", 3600)
		time.Sleep(time.Second)
		deletePod(n, "u1", 2)
		if err := n.cluster.Await(t.Context(), "gone", func() bool { return n.cluster.Gone("u1") }); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took != 3*time.Second {
			t.Errorf("it took %s, want 1s + 2s", took)
		}
	})
}

// If a killed container does not end because of a file server, the waits for that server are
// cancelled and the container is killed again. No other failure cancels them, because other pods
// may need them.
func TestWhatHoldsAKilledContainerIsGivenUp(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		for i, failure := range []error{fmt.Errorf("stop: %w", agent.ErrStillRunning), errors.New("no connection")} {
			n := newNode(t)
			n.rt.Fail("StopContainer", failure)
			n.startAgent()
			n.cluster.Put(simplePod("u1"))
			virtual.Wait()
			deletePod(n, "u1", 1)
			if err := n.cluster.Await(t.Context(), "gone", func() bool { return n.cluster.Gone("u1") }); err != nil {
				t.Fatal(err)
			}
			if got := n.vol.Count("GiveUp u1"); got != 1-i || n.rt.Count("StopContainer") != 2 {
				t.Errorf("%v: given up %d times; %v", failure, got, n.rt.Journal())
			}
			n.stop()
		}
	})
}

// Readiness changes reach the status without delay and restart no container. F113
func TestReadinessFollows(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		states := make(chan agent.ProbeState)
		n.cfg.Deps.Prober = prober{func(ctx context.Context, _ agent.ProbeTarget, on func(agent.ProbeEvent)) {
			for {
				select {
				case <-ctx.Done():
					return
				case st := <-states:
					on(agent.ProbeEvent{State: st})
				}
			}
		}}
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1", ReadinessProbe: &v1.Probe{}}))
		notReady := strings.Replace(strings.Replace(running, " ContainersReady Ready", "", 1), ", ready", "", 1)
		for _, ready := range []bool{true, false, true} {
			states <- agent.ProbeState{Started: true, Ready: ready}
			want := notReady
			if ready {
				want = running
			}
			n.expectStatus("u1", want)
		}
		if c := n.rt.Count("StartContainer"); c != 1 {
			t.Errorf("%d starts", c)
		}
	})
}

// A pod that crashes for a day causes a bounded number of events, and still causes one
// occasionally.
func TestEventsAreBounded(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Lifetime = func(*cri.ContainerConfig) (time.Duration, int32, bool) { return time.Second, 1, true }
		n.startAgent()
		defer func() { n.stop() }()
		told := func() (sum int) {
			for _, e := range n.cluster.Events("u1") {
				_, count, _ := strings.Cut(e[strings.LastIndexByte(e, ' '):], "x")
				c, err := strconv.Atoi(count)
				if err != nil {
					t.Fatal(err)
				}
				sum += c
			}
			return sum
		}
		n.cluster.Put(simplePod("u1"))
		time.Sleep(time.Hour)
		virtual.Wait()
		if got := told(); got < podevents.Burst || got > podevents.Burst+13 {
			t.Errorf("%d events in the first hour", got)
		}
		time.Sleep(time.Hour)
		virtual.Wait()
		if got := told(); got < podevents.Burst+13 || got > podevents.Burst+26 {
			t.Errorf("%d events in two hours", got)
		}
	})
}

// An observation that started before an action completed does not cause the action again.
func TestOldPictureStartsNothingTwice(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Delay("ListContainers", 20*time.Millisecond)
		n.rt.Delay("StartContainer", 30*time.Millisecond)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1"},
			v1.Container{Name: "log", Image: "tools:1"}))
		for range 100 {
			time.Sleep(7 * time.Millisecond)
			n.rt.Poke("u1") // observations start at any time
		}
		if a, l := n.rt.Count("StartContainer app"), n.rt.Count("StartContainer log"); a != 1 || l != 1 {
			t.Errorf("started %d and %d times: %q", a, l, n.rt.Journal())
		}
	})
}
