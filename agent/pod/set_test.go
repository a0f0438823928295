package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
	"keelson.dev/keelson/internal/virtual"
)

// F93, F111, F115: a bound pod runs at once. Pending, ContainerCreating, Running and Ready are
// reported in this order, with a timeline.
func TestPodBecomesReady(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Delay("RunPodSandbox", 20*time.Millisecond)
		n.rt.Delay("CreateContainer", 10*time.Millisecond)
		n.rt.Delay("StartContainer", 5*time.Millisecond)
		n.vol.Delay("MountAll", 15*time.Millisecond)
		n.startAgent()
		defer func() { n.stop() }()
		virtual.Wait()
		begin := time.Now()
		p := simplePod("u1", v1.Container{Name: "app", Image: "hello:1", ReadinessProbe: &v1.Probe{}})
		n.cluster.Put(p)
		if err := n.cluster.Await(t.Context(), "Ready", func() bool {
			return strings.Contains(statusSummary(&n.reportedPod("u1").Status), " Ready")
		}); err != nil {
			t.Fatal(err)
		}
		// Volumes are prepared in parallel with the sandbox: 20 + 10 + 5 ms in total.
		if took := time.Since(begin); took != 35*time.Millisecond {
			t.Errorf("Ready after %s, want 35ms", took)
		}
		n.expectStatus("u1", running)
		var seen []string
		for _, st := range n.cluster.History("u1") {
			s := string(st.Phase)
			if w := st.ContainerStatuses[0].State.Waiting; w != nil {
				s += " " + w.Reason
			}
			if len(seen) == 0 || seen[len(seen)-1] != s {
				seen = append(seen, s)
			}
		}
		if got := strings.Join(seen, ", "); got != "Pending ContainerCreating, Running" {
			t.Errorf("states: %s", got)
		}
		events := n.cluster.Events("u1")
		want := []string{`Pulled Container image "hello:1" already present on machine x1`,
			"Created Created container: app x1", "Started Started container app x1"}
		if !slices.Equal(events, want) {
			t.Errorf("events: %q", events)
		}
		var stages []string
		for _, s := range n.cluster.StageNames() {
			name, _, _ := strings.Cut(s, "  ")
			stages = append(stages, strings.TrimSpace(name))
		}
		wantStages := []string{"received", "image hello:1 present", "volumes 0", "sandbox cni 20ms",
			"network 10.88.0.2", "container started app", "probe passed app readiness",
			"ready 35ms after it was received"}
		if !slices.Equal(stages, wantStages) {
			t.Errorf("stages: %q", stages)
		}
	})
}

// F94, P23: an ended container is restarted without a control plane, after 0, 1, 2 and 4 s; the
// wait is reported.
func TestRestartWithBackoff(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		n.expectStatus("u1", running)
		for i, delay := range []time.Duration{0, time.Second, 2 * time.Second, 4 * time.Second} {
			virtual.Wait()
			if err := n.rt.Exit("u1", "app", 1, ""); err != nil {
				t.Fatal(err)
			}
			if delay > 0 {
				virtual.Wait()
				w := n.reportedPod("u1").Status.ContainerStatuses[0].State.Waiting
				if w == nil || w.Reason != "CrashLoopBackOff" ||
					w.Message != fmt.Sprintf("back-off %s restarting failed container=app pod=web-u1_default(u1)",
						delay) {
					t.Fatalf("restart %d: waiting is %+v", i+1, w)
				}
				time.Sleep(delay - time.Millisecond) // virtual time
				virtual.Wait()
				if n.rt.Running("u1", "app") != "" {
					t.Fatalf("restart %d came before %s: %q", i+1, delay, n.rt.Journal())
				}
				time.Sleep(time.Millisecond)
			}
			virtual.Wait()
			if n.rt.Running("u1", "app") == "" {
				t.Fatalf("restart %d did not come after %s", i+1, delay)
			}
			if got := n.reportedPod("u1").Status.ContainerStatuses[0].RestartCount; got != int32(i+1) {
				t.Fatalf("restartCount = %d after %d restarts: %q", got, i+1, n.rt.Journal())
			}
		}
		if _, c := n.rt.Left(); c != 2 {
			t.Errorf("%d container records are kept, want the running one and one before", c)
		}
		if n.rt.MaxRunning() != 1 {
			t.Errorf("%d instances ran at once", n.rt.MaxRunning())
		}
	})
}

// F101: after the pause process has ended, a new sandbox is created with a new attempt and the
// container.
func TestSandboxRebuilt(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		n.expectStatus("u1", running)
		time.Sleep(time.Minute)
		if err := n.rt.KillSandbox("u1"); err != nil {
			t.Fatal(err)
		}
		n.expectStatus("u1", "Running 10.88.0.3 PodReadyToStartContainers Initialized ContainersReady Ready; app "+
			"runs, ready, 1 restarts, before: Error 143")
		if n.net.InUse() != 1 {
			t.Errorf("%d addresses in use, want 1", n.net.InUse())
		}
		if n.rt.MaxRunning() != 1 {
			t.Error("two instances ran at once")
		}
	})
}

// P9: a restarted agent does not touch containers, and reports containers that have ended in the
// meantime with their exit code.
func TestAdoption(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		for i := range 5 {
			// With and without a readiness probe: the pod must not be reported as unready at any
			// time.
			c := v1.Container{Name: "app", Image: "hello:1"}
			if i%2 == 1 {
				c.ReadinessProbe = &v1.Probe{}
			}
			n.cluster.Put(simplePod(fmt.Sprintf("u%d", i), c))
		}
		virtual.Wait()
		told0 := len(n.cluster.History("u0"))
		before := n.rt.Running("u1", "app")
		n.stop()
		if err := n.rt.Exit("u2", "app", 42, ""); err != nil {
			t.Fatal(err)
		}
		starts, sandboxes, told := n.rt.Count("StartContainer"), n.rt.Count("RunPodSandbox"),
			len(n.cluster.History("u1"))
		n.startAgent()
		virtual.Wait()
		if now := n.rt.Running("u1", "app"); now != before || now == "" {
			t.Errorf("container of u1 was %q, is %q", before, now)
		}
		if got := n.rt.Count("StartContainer") - starts; got != 1 {
			t.Errorf("%d containers were started, want only that of u2", got)
		}
		if got := n.rt.Count("RunPodSandbox") - sandboxes; got != 0 {
			t.Errorf("%d sandboxes were made", got)
		}
		cs := n.reportedPod("u2").Status.ContainerStatuses[0]
		if cs.RestartCount != 1 || cs.LastTerminationState.Terminated == nil ||
			cs.LastTerminationState.Terminated.ExitCode != 42 {
			t.Errorf("status of u2: %+v", cs)
		}
		for uid, from := range map[types.UID]int{"u0": told0, "u1": told} {
			for _, st := range n.cluster.History(uid)[from:] {
				if !strings.Contains(statusSummary(&st), " Ready;") {
					t.Errorf("%s was told to be %s", uid, statusSummary(&st))
				}
			}
		}
		if r := lifecycle.FindCondition(n.reportedPod("u1").Status.Conditions, v1.PodReady); r == nil ||
			r.Status != v1.ConditionTrue {
			t.Errorf("u1 lost its readiness: %+v", r)
		}
	})
}

// P20: SIGTERM is not sent before the proxies have removed the pod, for at most a second.
// Afterwards nothing is left.
func TestDeletion(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cluster.HoldGates()
		n.startAgent()
		defer func() { n.stop() }()
		hook := &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"/drain"}}}}
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1", Lifecycle: hook}), simplePod("u2"))
		virtual.Wait()
		begin := time.Now()
		deletePod(n, "u1", 30)
		deletePod(n, "u2", 30)
		virtual.Wait()
		if n.rt.Count("StopContainer") != 0 || n.rt.Count("ExecSync") != 0 {
			t.Fatalf("stopped before the gate opened: %q", n.rt.Journal())
		}
		n.cluster.OpenGate("u1")
		virtual.Wait()
		if !n.cluster.Gone("u1") || time.Since(begin) != 0 {
			t.Fatalf("u1 is not gone after its gate opened")
		}
		j := strings.Join(n.rt.Journal(), "\n")
		if hookAt, stopAt := strings.Index(j, "ExecSync app /drain"),
			strings.Index(j, "StopContainer app#0 30s"); hookAt < 0 || stopAt < hookAt {
			t.Errorf("preStop hook and stop: %s", j)
		}
		if err := n.cluster.Await(t.Context(), "u2 gone", func() bool { return n.cluster.Gone("u2") }); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begin); took != time.Second {
			t.Errorf("u2 waited %s for its gate, want 1s", took)
		}
		if s, c := n.rt.Left(); s != 0 || c != 0 || n.net.InUse() != 0 {
			t.Errorf("left: %d sandboxes, %d containers, %d addresses", s, c, n.net.InUse())
		}
		if v, _ := n.vol.Pods(); len(v) != 0 {
			t.Errorf("volumes left: %v", v)
		}
		for _, dir := range []string{filepath.Join(n.cfg.Paths.State, "pods"), n.cfg.Paths.Logs} {
			if left, _ := os.ReadDir(dir); len(left) != 0 {
				t.Errorf("left in %s: %v", dir, left)
			}
		}
	})
}

// Sandboxes and volumes without a pod of this node are removed after a restart.
func TestOrphansRemoved(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"), simplePod("u2"))
		virtual.Wait()
		n.stop()
		n.cluster.Delete(n.reportedPod("u1"))
		if _, err := n.vol.MountAll(t.Context(), simplePod("u9")); err != nil {
			t.Fatal(err)
		}
		n.startAgent()
		virtual.Wait()
		if s, _ := n.rt.Left(); s != 1 {
			t.Errorf("%d sandboxes, want that of u2", s)
		}
		if v, _ := n.vol.Pods(); !slices.Equal(v, []types.UID{"u2"}) {
			t.Errorf("volumes of %v, want u2", v)
		}
		if n.cluster.Gone("u1") {
			t.Error("the control plane was told of a pod that it had forgotten itself")
		}
		n.expectStatus("u2", strings.Replace(running, "10.88.0.2", n.reportedPod("u2").Status.PodIP, 1))
	})
}

// Of a pod that ended in a power failure and was deleted in the meantime, only files and logs are
// left. They are removed once a control plane has sent the assignment. Unrelated files and logs of
// assigned pods stay.
func TestLogsOfOrphansRemoved(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.cluster.Put(simplePod("u2"))
		pods, logs := filepath.Join(n.cfg.Paths.State, "pods"), n.cfg.Paths.Logs
		for _, dir := range []string{filepath.Join(pods, "u1"), filepath.Join(logs, "default_web_u1/app"),
			filepath.Join(logs, "default_web-u2_u2/app"),
			filepath.Join(logs, "other_web_u9"), filepath.Join(logs, "of_somebody_else_u1"),
			filepath.Join(logs, "u1")} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		confirm := n.cluster.Unconfirmed()
		n.recordConfirmation() // only the agent was restarted, not the machine
		n.startAgent()
		defer func() { n.stop() }()
		left := func() (names []string) {
			virtual.Wait()
			for _, dir := range []string{pods, logs} {
				entries, err := os.ReadDir(dir)
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range entries {
					names = append(names, e.Name())
				}
			}
			return names
		}
		kept := []string{"u2", "default_web-u2_u2", "of_somebody_else_u1", "other_web_u9", "u1"}
		if got, want := left(), []string{"u1", "u2", "default_web-u2_u2", "default_web_u1", "of_somebody_else_u1",
			"other_web_u9", "u1"}; !slices.Equal(got, want) {
			t.Errorf("before a control plane was heard there are %v, want %v", got, want)
		}
		confirm()
		if got := left(); !slices.Equal(got, kept) {
			t.Errorf("left are %v, want %v", got, kept)
		}
	})
}

// P9: an outdated checkpoint causes no removal; only the control plane's assignment does.
func TestCheckpointRemovesNothing(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"), simplePod("u2"))
		virtual.Wait()
		n.stop()
		kept := n.reportedPod("u1")
		n.cluster.Delete(kept) // the checkpoint is older than the assignment of u1
		n.cluster.Delete(n.reportedPod("u2"))
		confirm := n.cluster.Unconfirmed()
		n.startAgent()
		virtual.Wait()
		if s, _ := n.rt.Left(); s != 2 {
			t.Fatalf("%d sandboxes before a control plane was heard, want both", s)
		}
		n.cluster.Put(kept)
		confirm()
		virtual.Wait()
		if s, _ := n.rt.Left(); s != 1 {
			t.Errorf("%d sandboxes, want that of u1", s)
		}
		if got := n.reportedPod("u1").Status.ContainerStatuses[0].RestartCount; got != 0 {
			t.Errorf("u1 was restarted %d times", got)
		}
	})
}

// F106: pull policies, and the status if an image is not available.
func TestImages(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.img.Fail("PullImage", fmt.Errorf("%w: registry.example/none:1: manifest unknown", agent.ErrImagePull))
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(
			simplePod("pull", v1.Container{Name: "app", Image: "registry.example/none:1"}),
			simplePod("never", v1.Container{Name: "app", Image: "absent:1", ImagePullPolicy: v1.PullNever}),
			simplePod("bad", v1.Container{Name: "app", Image: "not an image"}),
		)
		virtual.Wait()
		reason := func(uid types.UID) string {
			virtual.Wait()
			if w := n.reportedPod(uid).Status.ContainerStatuses[0].State.Waiting; w != nil {
				return w.Reason
			}
			return "runs"
		}
		for uid, want := range map[types.UID]string{"pull": "ErrImagePull", "never": "ErrImageNeverPull",
			"bad": "InvalidImageName"} {
			if got := reason(uid); got != want {
				t.Errorf("%s waits for %s, want %s", uid, got, want)
			}
		}
		shows := func(want string) {
			t.Helper()
			if w := n.reportedPod("pull").Status.ContainerStatuses[0].State.Waiting; w == nil || w.Message != want {
				t.Errorf("waiting %+v, want %q", w, want)
			}
		}
		shows("registry.example/none:1: manifest unknown")
		time.Sleep(time.Second)
		if got := reason("pull"); got != "ImagePullBackOff" {
			t.Errorf("after a second: %s", got)
		}
		shows(`Back-off pulling image "registry.example/none:1": ErrImagePull: registry.example/none:1: ` +
			`manifest unknown`)
		time.Sleep(time.Second)
		if got := reason("pull"); got != "runs" {
			t.Errorf("after the second try: %s", got)
		}
		n.expectEvents("pull", `Pulling Pulling image "registry.example/none:1" x2`,
			`Failed Failed to pull image "registry.example/none:1": registry.example/none:1: manifest unknown`,
			"Failed Error: ErrImagePull x1", "Successfully pulled")
	})
}

// F106: an image removed before the container is created is looked up again and pulled.
func TestImageRemovedBeforeItsContainer(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Delay("RunPodSandbox", time.Second)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		virtual.Wait() // the image is present, the sandbox is not ready yet
		if _, err := n.img.RemoveImage(t.Context(),
			&cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: "hello:1"}}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second + 2*lifecycle.RestartMin)
		n.expectStatus("u1", running)
		if got := n.img.Count("PullImage"); got != 1 {
			t.Errorf("%d pulls, want that of the removed image", got)
		}
	})
}

// CreateContainerConfigError for a missing ConfigMap ends as soon as the ConfigMap exists.
func TestConfigErrorMended(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		ref :=
			&v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{
				LocalObjectReference: v1.LocalObjectReference{Name: "settings"}, Key: "k"}}
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1",
			Env: []v1.EnvVar{{Name: "K", ValueFrom: ref}}}))
		// virtual time: the container may fail before the sandbox's network is ready, which is
		// reported later
		time.Sleep(2 * holdBack)
		n.expectStatus("u1", `Pending 10.88.0.2 PodReadyToStartContainers Initialized; app waits: `+
			`CreateContainerConfigError "configmap \"settings\" not found"`)
		n.cluster.Put(&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "settings"},
			Data: map[string]string{"k": "v"}})
		n.expectStatus("u1", running)
		c := n.rt.ContainerConfig(n.rt.Running("u1", "app"))
		if got := envValue(c, "K"); got != "v" {
			t.Errorf("K = %q", got)
		}
	})
}

// F114: a failed liveness probe ends the container, which is restarted.
func TestLivenessRestarts(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		fail := make(chan struct{})
		n.cfg.Deps.Prober = prober{func(ctx context.Context, tg agent.ProbeTarget, on func(agent.ProbeEvent)) {
			on(agent.ProbeEvent{State: agent.ProbeState{Started: true, Ready: true}})
			select {
			case <-ctx.Done():
				return
			case <-fail:
			}
			on(agent.ProbeEvent{State: agent.ProbeState{Started: true, Ready: true, FailedProbe: "liveness"},
				Probe: "liveness", Message: "HTTP probe failed with statuscode: 500"})
		}}
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1", LivenessProbe: &v1.Probe{}}))
		n.expectStatus("u1", running)
		fail <- struct{}{}
		n.expectStatus("u1", running+", 1 restarts, before: Error 143")
		n.expectEvents("u1", "Unhealthy Liveness probe failed: HTTP probe failed with statuscode: 500",
			"Killing Container app failed liveness probe, will be restarted")
	})
}

// P15: if the runtime does not answer for one pod, no other pod waits and no action is repeated.
func TestBlindWorkerWaits(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Delay("StopContainer", time.Hour)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("stuck"))
		virtual.Wait()
		deletePod(n, "stuck", 30)
		virtual.Wait()
		n.cluster.Put(simplePod("u1"))
		virtual.Wait()
		if got := n.reportedPod("u1").Status.Phase; got != v1.PodRunning {
			t.Errorf("u1 is %s beside a stuck pod", got)
		}
	})
}

// A container is created while its sandbox's network is being attached, and started afterwards. It
// then finds the pod's address in /etc/hosts. A container with the address in its environment is
// created later. F98, F111
func TestMadeBeforeTheNetwork(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.rt.Delay("AttachNetwork", 40*time.Millisecond)
		n.rt.Delay("CreateContainer", 30*time.Millisecond)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1"}))
		knows := v1.Container{Name: "app", Image: "hello:1",
			Env: []v1.EnvVar{{Name: "IP",
				ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "status.podIP"}}}}}
		n.cluster.Put(simplePod("u2", knows))
		time.Sleep(39 * time.Millisecond)
		if c := n.rt.Count("CreateContainer"); c != 1 {
			t.Errorf("%d containers made before there is a network, want 1", c)
		}
		if c := n.rt.Count("StartContainer"); c != 0 {
			t.Errorf("%d containers started before there is a network", c)
		}
		time.Sleep(2 * time.Millisecond)
		virtual.Wait()
		if s := statusSummary(&n.reportedPod("u1").Status); !strings.Contains(s, " Ready;") {
			t.Errorf("u1 is %s", s)
		}
		if s := statusSummary(&n.reportedPod("u2").Status); !strings.HasPrefix(s, "Pending") {
			t.Errorf("u2 is %s", s)
		}
		time.Sleep(40 * time.Millisecond)
		for _, uid := range []types.UID{"u1", "u2"} {
			b, err := os.ReadFile(filepath.Join(podfiles.PodDirectory(n.cfg.Paths, uid), "etc-hosts"))
			if ip := n.reportedPod(uid).Status.PodIP; err != nil || ip == "" || !strings.Contains(string(b), ip+"\t") {
				t.Errorf("%s has address %q and hosts file %q, %v", uid, ip, b, err)
			}
		}
	})
}

// F126, P10: if a network plugin rejects a pod, an event names pod, plugin and cause. Attempts back
// off and hold no resources in between, and the pod runs when the network is available.
func TestNetworkRefuses(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.net.FailAlways("Add",
			errors.New(`CNI ADD for pod default/u1: plugin type="bridge" failed (add): no IP addresses available`))
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "hello:1"}))
		time.Sleep(time.Minute)
		virtual.Wait()
		tries := n.net.Count("Add")
		if tries < 4 || tries > 12 {
			t.Errorf("%d tries in a minute", tries)
		}
		e := n.expectEvents("u1", "FailedCreatePodSandBox", "default/u1", `plugin type="bridge"`,
			"no IP addresses available")
		if strings.Contains("\n"+e, "\nFailed ") {
			t.Errorf("the container is blamed: %s", e)
		}
		if sb, c := n.rt.Left(); sb != 0 || c != 0 || n.net.InUse() != 0 {
			t.Errorf("held: %d sandboxes, %d containers, %d addresses", sb, c, n.net.InUse())
		}
		n.net.FailAlways("Add", nil)
		time.Sleep(time.Minute)
		virtual.Wait()
		if s := statusSummary(&n.reportedPod("u1").Status); !strings.Contains(s, " Ready;") ||
			strings.Contains(s, "restarts") {
			t.Errorf("after the network was repaired: %s", s)
		}
	})
}

// F126: if an image cannot be unpacked, an event names image, layer and cause.
func TestImageDoesNotUnpack(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.img.FailAlways("PullImage",
			fmt.Errorf("%w: image registry.example/broken:1, layer 2 of 3 (sha256:12): unexpected EOF",
				agent.ErrImageUnpack))
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1", v1.Container{Name: "app", Image: "registry.example/broken:1"}))
		time.Sleep(time.Second)
		virtual.Wait()
		n.expectEvents("u1", "Failed", "registry.example/broken:1", "layer 2 of 3", "unexpected EOF")
		if w := n.reportedPod("u1").Status.ContainerStatuses[0].State.Waiting; w == nil ||
			w.Reason != "ImagePullBackOff" || !strings.Contains(w.Message, "layer 2 of 3") {
			t.Errorf("the container waits: %+v", w)
		}
	})
}
