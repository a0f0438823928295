package oci

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/oci/containerspec"
	"keelson.dev/keelson/agent/oci/shimclient"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
)

// A shim and records of the release without protocol versions. The bytes are literals, not made by
// this release's code.
const (
	oldSandbox   = "5a5a"
	oldContainer = "c0c0"
	// A ready sandbox of pod test/old, uid olduid. %d is the shim's PID, %s the boot ID. "later" is
	// a field of a later release.
	oldSandboxRecord = `{"id":"5a5a","state":"ready","config":"ChMKA29sZBIGb2xkdWlkGgR0ZXN0","created":1000,` +
		`"ips":["192.0.2.9"],` +
		`"pausePID":0,"shimPID":%d,"boot":%q,"later":{"a":[1]}}`
	// A container "a" of that sandbox, created and started.
	oldContainerRecord = `{"id":"c0c0","sandbox":"5a5a","state":"running","config":"CgMKAWE=","created":1001,` +
		`"started":1002,` +
		`"imageID":"sha256:1","imageRef":"","cgroup":"/podolduid/c0c0","stop":10,"sharePID":false,"user":{"uid":0,` +
		`"gid":0},"later":1}`
)

// oldShim simulates a shim of version 0. Pause is process 7; the container is process 8, running
// since 1002. The container ends with code 9 when it gets a signal.
type oldShim struct {
	t        *testing.T
	listener *net.UnixListener
	mute     chan struct{} // if not nil, Hello is answered only after it is closed

	mu    sync.Mutex
	asked []string // kind and body of each request
}

func newOldShim(t *testing.T, dir string, mute chan struct{}) *oldShim {
	t.Helper()
	if err := os.MkdirAll(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, shimclient.SocketName), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	s := &oldShim{t: t, listener: l, mute: mute}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go s.serve(c)
		}
	}()
	return s
}

func (s *oldShim) serve(c net.Conn) {
	defer c.Close()
	var buf []byte
	chunk := make([]byte, 4096)
	for {
		n, err := c.Read(chunk)
		if err != nil {
			return
		}
		buf = append(buf, chunk[:n]...)
		for len(buf) >= 9 && len(buf) >= int(buf[0]) {
			frame := buf[:buf[0]]
			buf = bytes.Clone(buf[buf[0]:])
			kind, id, body := frame[4], frame[5], hex.EncodeToString(frame[9:])
			s.mu.Lock()
			s.asked = append(s.asked, fmt.Sprintf("%d %s", kind, body))
			s.mu.Unlock()
			switch kind {
			case 1: // Hello → Snapshot
				if s.mute != nil {
					<-s.mute
				}
				sendFrame(c, 14, id, "0e0002"+"0463306330"+"04"+"10"+"d40f"+"00"+"00"+"00"+"00")
			case 5: // Signal → Done, then a notification of the end
				sendFrame(c, 12, id, "0002")
				sendFrame(c, 15, 0, "0463306330"+"12"+"d80f"+"00")
			case 11: // Shutdown → Done
				sendFrame(c, 12, id, "0002")
				s.listener.Close()
				return
			default:
				sendFrame(c, 12, id, "0002")
			}
		}
	}
}

func sendFrame(c net.Conn, kind, id byte, body string) {
	b, err := hex.DecodeString(body)
	if err != nil {
		panic(err)
	}
	_, _ = c.Write(append([]byte{byte(9 + len(b)), 0, 0, 0, kind, id, 0, 0, 0}, b...))
}

// plantRecords writes records of the previous release into the runtime's state directory.
func (r *rig) plantRecords(shimPID int) (sandboxDir string) {
	r.t.Helper()
	sb, c := filepath.Join(r.cfg.RunDir, "sandboxes", oldSandbox),
		filepath.Join(r.cfg.RunDir, "containers", oldContainer)
	for _, d := range []string{sb, c} {
		if err := os.MkdirAll(d, 0o711); err != nil {
			r.t.Fatal(err)
		}
	}
	for path, text := range map[string]string{sb + "/sandbox.json": fmt.Sprintf(oldSandboxRecord, shimPID,
		containerspec.BootID()), c + "/container.json": oldContainerRecord} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			r.t.Fatal(err)
		}
	}
	return sb
}

func (r *rig) sandboxState(id string) cri.PodSandboxState {
	r.t.Helper()
	st, err := r.PodSandboxStatus(r.ctx(), &cri.PodSandboxStatusRequest{PodSandboxId: id})
	if err != nil {
		r.t.Fatal(err)
	}
	return st.Status.State
}

// A new agent adopts the pods of the previous release: its shims and its records.
func TestAdoptsShimsOfThePreviousRelease(t *testing.T) {
	r := newRig(t)
	r.stop()
	old := newOldShim(t, r.plantRecords(0), nil)
	r.startRuntime()
	if s := r.sandboxState(oldSandbox); s != cri.PodSandboxState_SANDBOX_READY {
		t.Fatalf("the sandbox is %s", s)
	}
	st := r.inspectContainer(oldContainer)
	if st.State != cri.ContainerState_CONTAINER_RUNNING || st.StartedAt != 1002 || st.Metadata.Name != "a" {
		t.Fatalf("the container: %v", st)
	}
	if _, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: oldContainer, Timeout: 10}); err !=
		nil {
		t.Fatal(err)
	}
	if st := r.inspectContainer(oldContainer); st.State != cri.ContainerState_CONTAINER_EXITED || st.ExitCode != 9 ||
		st.FinishedAt != 1004 {
		t.Errorf("the container after its stop: %v", st)
	}
	if _, err := r.RemovePodSandbox(r.ctx(), &cri.RemovePodSandboxRequest{PodSandboxId: oldSandbox}); err != nil {
		t.Fatal(err)
	}
	old.mu.Lock()
	defer old.mu.Unlock()
	// After Hello, the body of which is ignored, the agent uses version 0: the signal, then
	// shutdown.
	if len(old.asked) < 3 || old.asked[1] != "5 0463306330"+"00"+"14" || old.asked[len(old.asked)-1] != "11 " {
		t.Errorf("asked of the old shim: %q", old.asked)
	}
}

// suspendShim stops the runtime and suspends the shim of a sandbox. It returns the shim's PID.
func (r *rig) suspendShim(sandbox string) (pid int) {
	r.t.Helper()
	s, err := r.Runtime.findSandbox(sandbox)
	if err != nil {
		r.t.Fatal(err)
	}
	pid = s.rec.ShimPID
	r.stop()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGCONT) })
	return pid
}

// An unresponsive shim delays no other sandbox, is not considered dead, and is adopted when it
// answers.
func TestHangingShimHoldsUpNobody(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	hangs, hsc := r.runSandbox()
	running := r.runContainer(hangs, hsc, r.containerConfig("b", "exec sleep 1000"))
	pid := r.suspendShim(hangs)
	begin := time.Now()
	r.startRuntime()
	if took := time.Since(begin); took > teardownTimeout {
		t.Errorf("the start took %s", took)
	}
	if _, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 20}); err !=
		nil {
		t.Errorf("another pod is not served: %v", err)
	}
	if s, st := r.sandboxState(hangs), r.inspectContainer(running); s != cri.PodSandboxState_SANDBOX_READY ||
		st.State != cri.ContainerState_CONTAINER_RUNNING {
		t.Errorf("while its shim hangs, the sandbox is %s, its container %v", s, st)
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	await.Until(t.Context(), t, 30*time.Second, 10*time.Millisecond,
		"a response of the shim that was stopped", func() error {
			_, err := r.ExecSync(r.ctx(),
				&cri.ExecSyncRequest{ContainerId: running, Cmd: []string{"true"}, Timeout: 20})
			return err
		})
}

// A container stopped while its shim does not answer gets the signal when the shim answers again,
// within the grace period.
func TestStopReachesAHangingShim(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a",
		"trap 'exit 0' TERM; touch /ready; while true; do sleep 0.1; done"))
	if _, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id,
		Cmd: []string{"sh", "-c", "until [ -e /ready ]; do sleep 0.05; done"}, Timeout: 20}); err != nil {
		t.Fatal(err)
	}
	pid := r.suspendShim(sb)
	r.startRuntime()
	begun, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		close(begun)
		_, err := r.StopContainer(r.ctx(), &cri.StopContainerRequest{ContainerId: id, Timeout: 20})
		stopped <- err
	}()
	<-begun
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := <-stopped; err != nil {
		t.Fatal(err)
	}
	if st := r.inspectContainer(id); st.State != cri.ContainerState_CONTAINER_EXITED || st.ExitCode != 0 {
		t.Errorf("the container ended so: %v, want exit code 0", st)
	}
}

// A shim is considered dead only if its process has ended and its socket accepts no connection.
func TestOnlyADeadShimIsDead(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	r.stop()
	socket := filepath.Join(r.cfg.RunDir, "sandboxes", sb, shimclient.SocketName)
	for _, away := range []string{"moved", "in the way"} {
		if err := os.Rename(socket, socket+".away"); err != nil {
			t.Fatal(err)
		}
		if away == "in the way" {
			if err := os.WriteFile(socket, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		r.startRuntime()
		if s, st := r.sandboxState(sb), r.inspectContainer(id); s != cri.PodSandboxState_SANDBOX_READY ||
			st.State != cri.ContainerState_CONTAINER_RUNNING {
			t.Errorf("%s: the sandbox is %s, its container %v", away, s, st)
		}
		if err := os.Rename(socket+".away", socket); err != nil {
			t.Fatal(err)
		}
		err := wait.For(testCtx(t, 30*time.Second), 10*time.Millisecond, func() error {
			_, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 20})
			return err
		})
		if err != nil {
			t.Errorf("%s: %v", away, err)
		}
		r.stop()
	}
	r.startRuntime()
}

// The end of a connection does not mean the end of the shim.
func TestLostConnectionKillsNothing(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	pid := r.pidOf(id)
	s, err := r.Runtime.findSandbox(sb)
	if err != nil {
		t.Fatal(err)
	}
	r.Runtime.mu.Lock()
	shim := s.shim
	r.Runtime.mu.Unlock()
	shim.Conn.Close()
	<-shim.Gone
	err = wait.For(testCtx(t, 30*time.Second), time.Millisecond, func() error {
		_, err := r.ExecSync(r.ctx(), &cri.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 20})
		return err
	})
	if st := r.inspectContainer(id); err != nil || st.State != cri.ContainerState_CONTAINER_RUNNING ||
		r.pidOf(id) != pid {
		t.Errorf("after the connection was lost: %v, %v", err, st)
	}
}

// A shim answers an agent of the previous release, which sends an empty Hello, in version 0.
func TestShimAnswersThePreviousRelease(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	var c *net.UnixConn
	err := shimclient.WithSocketPath(r.paths.sandboxDir(sb), func(path string) (err error) {
		c, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	ask := func(kind, request byte, body string, wantKind byte) string {
		t.Helper()
		sendFrame(c, kind, request, body)
		head := make([]byte, 9)
		if _, err := io.ReadFull(c, head); err != nil {
			t.Fatal(err)
		}
		rest := make([]byte, int(head[0])-9)
		if _, err := io.ReadFull(c, rest); err != nil || head[4] != wantKind || head[5] != request {
			t.Fatalf("answered %x %x, %v", head, rest, err)
		}
		return hex.EncodeToString(rest)
	}
	// One running container with that ID (64 bytes).
	name := "40" + hex.EncodeToString([]byte(id))
	if got := ask(1, 1, "", 14); !strings.Contains(got, "0002"+name+"04") {
		t.Errorf("the snapshot is %s", got)
	}
	if got := ask(9, 2, name, 12); !strings.HasPrefix(got, "00") {
		t.Errorf("reopening the log: %s", got)
	}
	// Signal 9, then the notification of the end.
	ask(5, 3, name+"00"+"12", 12)
	head := make([]byte, 9)
	if _, err := io.ReadFull(c, head); err != nil || head[4] != 15 {
		t.Fatalf("no note of the end: %x, %v", head, err)
	}
	note := make([]byte, int(head[0])-9)
	if _, err := io.ReadFull(c, note); err != nil || !strings.HasPrefix(hex.EncodeToString(note), name+"9202") {
		t.Errorf("the note is %x, %v", note, err)
	}
}

// A shim answers a request unknown to it, which an agent of a later release may send.
func TestShimAnswersUnknownRequests(t *testing.T) {
	r := newRig(t)
	sb, _ := r.runSandbox()
	s, err := r.Runtime.findSandbox(sb)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.shim.CallDone(r.ctx(), 99, &wire.Target{}); err == nil ||
		errors.Is(err, shimclient.ErrDisconnected) || err.Error() != "this shim does not support requests of kind 99" {
		t.Errorf("answered: %v", err)
	}
	if err := s.shim.SignalProcess(r.ctx(), "", 0); err != nil {
		t.Errorf("after it: %v", err)
	}
}

// eventually waits until f succeeds.
func (r *rig) eventually(f func() error) {
	r.t.Helper()
	await.Until(r.t.Context(), r.t, 30*time.Second, 2*time.Millisecond, "the runtime", f)
}

// An agent that disconnects during a response or sends an invalid message only ends its own
// connection. It may be killed while it starts.
func TestShimOutlivesItsAgents(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("a", "exec sleep 1000"))
	pid := r.pidOf(id)
	s, err := r.Runtime.findSandbox(sb)
	if err != nil {
		t.Fatal(err)
	}
	shim := int(s.rec.ShimPID)
	for _, how := range []struct {
		name string
		say  func(c *net.UnixConn)
	}{
		{"gone before the answer", func(c *net.UnixConn) { sendFrame(c, 1, 1, "") }},
		{"gone before several answers", func(c *net.UnixConn) {
			sendFrame(c, 1, 1, "")
			sendFrame(c, 99, 2, "")
			sendFrame(c, 99, 3, "")
		}},
		{"no Hello", func(c *net.UnixConn) { sendFrame(c, 9, 1, "00"); sendFrame(c, 9, 2, "00") }},
		{"what does not parse", func(c *net.UnixConn) { sendFrame(c, 1, 1, ""); sendFrame(c, 5, 2, "ff") }},
	} {
		var c *net.UnixConn
		err := shimclient.WithSocketPath(r.paths.sandboxDir(sb), func(path string) (err error) {
			c, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
			return err
		})
		if err != nil {
			t.Fatal(how.name, err)
		}
		if err := unix.Kill(shim, unix.SIGSTOP); err != nil {
			t.Fatal(how.name, err)
		}
		r.eventually(func() error {
			raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", shim))
			if err == nil && !strings.Contains(string(raw), ") T ") {
				err = errors.New("the shim has not stopped yet")
			}
			return err
		})
		how.say(c)
		c.Close()
		if err := unix.Kill(shim, unix.SIGCONT); err != nil {
			t.Fatal(how.name, err)
		}
		if _, err := s.shim.CallDone(r.ctx(), 99, &wire.Target{}); err == nil ||
			errors.Is(err, shimclient.ErrDisconnected) {
			t.Errorf("%s: the shim of another connection: %v", how.name, err)
		}
	}
	if st := r.inspectContainer(id); st.State != cri.ContainerState_CONTAINER_RUNNING || r.pidOf(id) != pid {
		t.Errorf("the container: %v", st)
	}
}
