package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/wait"
)

func TestAgentRestartTouchesNothing(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	stays := r.runContainer(sb, sc, r.containerConfig("stays",
		"trap 'exit 3' TERM; echo armed; while :; do echo tick; usleep 50000; done"))
	ends := r.runContainer(sb, sc, r.containerConfig("ends", "usleep 300000; exit 42"))
	waits := r.createContainer(sb, sc, r.containerConfig("waits", "exit 5"))
	pid := r.pidOf(stays)
	r.waitLog("stays", "armed")
	r.stop()
	c, err := r.Runtime.findContainer(ends)
	if err != nil {
		t.Fatal(err)
	}
	await.Until(t.Context(), t, await.Patience, 5*time.Millisecond, "an exit that the shim records while no agent runs",
		func() error {
			_, err := os.Stat(r.paths.exitFile(c.rec.ID))
			return err
		})
	r.startRuntime()
	if st := r.inspectContainer(stays); st.State != cri.ContainerState_CONTAINER_RUNNING || r.pidOf(stays) != pid ||
		st.StartedAt == 0 {
		t.Errorf("a running container after the restart: %v", st)
	}
	if st := r.inspectContainer(ends); st.State != cri.ContainerState_CONTAINER_EXITED || st.ExitCode != 42 ||
		st.StartedAt == 0 || st.FinishedAt < st.StartedAt {
		t.Errorf("a container that ended meanwhile: %v", st)
	}
	if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: waits}); err != nil {
		t.Error(err)
	}
	if st := r.waitExit(waits); st.ExitCode != 5 {
		t.Errorf("a container created before and started after: %v", st)
	}
	if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: stays, Timeout: 10}); err != nil {
		t.Error(err)
	}
	if st := r.inspectContainer(stays); st.ExitCode != 3 {
		t.Errorf("stopped after the restart: %v", st)
	}
	sst, err := r.PodSandboxStatus(r.ctx(), &cri.PodSandboxStatusRequest{PodSandboxId: sb})
	if err != nil || sst.Status.State != cri.PodSandboxState_SANDBOX_READY || sst.Status.Network.Ip != "192.0.2.7" {
		t.Errorf("the sandbox after the restart: %v, %v", sst, err)
	}
}

func TestShimKilled(t *testing.T) {
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprint("agent away=", away), func(t *testing.T) {
			r := newRig(t)
			sb, sc := r.runSandbox()
			id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
			done := r.runContainer(sb, sc, r.containerConfig("b", "exit 6"))
			r.waitExit(done)
			pid := r.pidOf(id)
			s, _ := r.Runtime.findSandbox(sb)
			if away {
				r.stop()
			}
			killIfNamed(s.rec.ShimPID, "keelson-shim")
			if away {
				r.startRuntime()
			}
			st := r.waitExit(id)
			if st.ExitCode != 137 || st.Reason != "ContainerStatusUnknown" {
				t.Errorf("a container without shim: %v", st)
			}
			if st := r.inspectContainer(done); st.ExitCode != 6 {
				t.Errorf("an end that was recorded: %v", st)
			}
			if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)); err == nil &&
				strings.Contains(string(b), "(sleep)") && !strings.Contains(string(b), ") Z ") {
				t.Errorf("its process lives on: %s", b)
			}
			sst, err := r.PodSandboxStatus(r.ctx(), &cri.PodSandboxStatusRequest{PodSandboxId: sb})
			if err != nil || sst.Status.State != cri.PodSandboxState_SANDBOX_NOTREADY {
				t.Errorf("the sandbox: %v, %v", sst, err)
			}
		})
	}
}

// A container may end before the agent has recorded its start. The next agent still gets its exit
// status, with and without the shim.
func TestEndedBeforeItsStartWasNoted(t *testing.T) {
	for _, shim := range []bool{true, false} {
		t.Run(fmt.Sprint("shim=", shim), func(t *testing.T) {
			r := newRig(t)
			sb, sc := r.runSandbox()
			id := r.runContainer(sb, sc, r.containerConfig("a", "exit 6"))
			r.waitExit(id)
			c, err := r.findContainer(id)
			if err != nil {
				t.Fatal(err)
			}
			rec := c.updateRecord(func(*containerRecord) {})
			if rec.State != ContainerExited {
				t.Fatalf("its record says %q", rec.State)
			}
			if err := r.paths.saveContainer(&rec); err != nil { // as in StartContainer if the end is reported first
				t.Fatal(err)
			}
			s, _ := r.Runtime.findSandbox(sb)
			r.stop()
			rec.State = ContainerExited // as earlier releases wrote it
			if err := saveJSON(filepath.Join(r.paths.containerDir(id), "container.json"), &rec); err != nil {
				t.Fatal(err)
			}
			if !shim {
				killIfNamed(s.rec.ShimPID, "keelson-shim")
			}
			r.startRuntime()
			if st := r.waitExit(id); st.ExitCode != 6 || st.FinishedAt == 0 {
				t.Errorf("it ended as %v", st)
			}
			if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: id}); err != nil {
				t.Errorf("stopping what has ended: %v", err)
			}
		})
	}
}

// A container record on disk alone never marks a container as ended.
func TestRecordsDoNotEndContainers(t *testing.T) {
	r := newRig(t)
	rec := containerRecord{ID: "x", State: ContainerExited}
	if err := os.MkdirAll(r.paths.containerDir("x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := r.paths.saveContainer(&rec); err != nil {
		t.Fatal(err)
	}
	var got containerRecord
	if err := durable.ReadJSON(filepath.Join(r.paths.containerDir("x"), "container.json"), &got); err != nil ||
		got.State != ContainerRunning {
		t.Errorf("it says %q, %v", got.State, err)
	}
	if err := os.RemoveAll(r.paths.containerDir("x")); err != nil {
		t.Fatal(err)
	}
}

// crashEnv makes the test binary run as the agent that is to be killed.
const crashEnv = "KEELSON_TEST_CRASH_CONFIG"

type crashConfig struct {
	State, Run, Shim, OCI, Pause, Cgroup, Images, Logs string
}

// TestCrashHelper is not a test: it is the agent that TestKilledBetweenAnyTwoSteps kills.
func TestCrashHelper(t *testing.T) {
	text := os.Getenv(crashEnv)
	if text == "" {
		return
	}
	var c crashConfig
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, net: &fakeNetwork{added: map[string]bool{}}, logs: c.Logs, counter: os.Getpid()}
	r.cfg = Config{StateDir: c.State, RunDir: c.Run, ShimPath: c.Shim, OCIPath: c.OCI, PausePath: c.Pause,
		CgroupRoot: c.Cgroup,
		Images:     newFakeImages(t, c.Images), Network: r.net}
	r.startRuntime()
	fmt.Println("ready")
	for i := 0; ; i++ {
		var sb, id string
		if i%2 == 0 {
			sb, id = r.runEarlyContainer(fmt.Sprint("a", i))
		} else {
			var sc *cri.PodSandboxConfig
			sb, sc = r.runSandbox()
			id = r.runContainer(sb, sc, r.containerConfig(fmt.Sprint("a", i), "exec sleep 1000"))
		}
		if _, err := r.RemoveContainer(r.ctx(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.RemovePodSandbox(r.ctx(), &cri.RemovePodSandboxRequest{PodSandboxId: sb}); err != nil {
			t.Fatal(err)
		}
	}
}

// An agent is killed at moments spread over a pod's whole life. The next agent can list everything
// that is left; the rig removes it and checks that nothing else exists.
func TestKilledBetweenAnyTwoSteps(t *testing.T) {
	r := newRig(t)
	r.stop()
	images, err := os.MkdirTemp("", "krt-images-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(images)
	config, err := json.Marshal(crashConfig{State: r.cfg.StateDir, Run: r.cfg.RunDir, Shim: r.cfg.ShimPath,
		OCI: r.cfg.OCIPath, Pause: r.cfg.PausePath,
		Cgroup: r.cfg.CgroupRoot, Images: images, Logs: r.logs})
	if err != nil {
		t.Fatal(err)
	}
	for round := range 24 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestCrashHelper$", "-test.v=false")
		cmd.Env = append(os.Environ(), crashEnv+"="+string(config))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var ready [5]byte
		if _, err := io.ReadFull(out, ready[:]); err != nil || string(ready[:]) != "ready" {
			_ = cmd.Process.Kill()
			rest, _ := io.ReadAll(out)
			_ = cmd.Wait()
			t.Fatalf("the agent to be killed did not start: %q, %v: %s", ready, err, rest)
		}
		if err := wait.Delay(context.Background(), time.Duration(round)*5*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Process.Signal(syscall.SIGKILL)
		_ = cmd.Wait()
		r.startRuntime()
		list, err := r.ListPodSandbox(r.ctx(), &cri.ListPodSandboxRequest{})
		if err != nil {
			t.Fatal(err)
		}
		r.removeAll()
		if l := countLeaks(t, r.cfg); l != (leaks{}) {
			t.Fatalf("killed after %d ms with %d sandboxes known: left %+v", round*5, len(list.Items), l)
		}
		r.stop()
	}
	r.startRuntime()
}

// A shim is killed while it creates a container. Either the call fails or the container ends, and
// nothing is left.
func TestShimKilledWhileCreating(t *testing.T) {
	r := newRig(t)
	failed := 0
	for round := range 14 {
		sb, sc := r.runSandbox()
		s, err := r.Runtime.findSandbox(sb)
		if err != nil {
			t.Fatal(err)
		}
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			_ = wait.Delay(context.Background(), time.Duration(round)*3*time.Millisecond)
			killIfNamed(s.rec.ShimPID, "keelson-shim")
		}()
		out, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sb,
			Config: r.containerConfig("a", "exec sleep 1000"), SandboxConfig: sc})
		if err == nil {
			_, _ = r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: out.ContainerId})
		} else {
			failed++
		}
		<-killed
		begin := time.Now()
		r.removeAll()
		if d := time.Since(begin); d > teardownTimeout { // the teardown must not run into its timeout
			t.Errorf("killed after %d ms: removing took %v", round*3, d)
		}
		if l := countLeaks(t, r.cfg); l != (leaks{}) {
			t.Fatalf("killed after %d ms (create: %v): left %+v", round*3, err, l)
		}
	}
	t.Logf("%d of 14 creations were hit", failed)
	if failed == 0 {
		t.Error("no kill hit a creation")
	}
}
