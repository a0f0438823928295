package oci

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/podcgroup"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
)

// binaries builds shim, keelson-oci and pause once for all tests. Without a Go toolchain,
// KEELSON_OCI_BIN is their directory.
var binaries = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("KEELSON_OCI_BIN"); dir != "" {
		return dir, nil
	}
	dir, err := os.MkdirTemp("", "keelson-oci-test-")
	if err != nil {
		return "", err
	}
	built.Store(&dir)
	// A static keelson-oci starts faster, and it starts twice for each process.
	static := "-ldflags=-s -w -linkmode external -extldflags -static"
	for _, b := range [][]string{
		{"CGO_ENABLED=0", "-ldflags=-s -w", "keelson-shim", "keelson.dev/keelson/cmd/shim"},
		{"CGO_ENABLED=0", "-ldflags=-s -w -E main.start", "keelson-pause", "keelson.dev/keelson/cmd/pause"},
		{"CGO_ENABLED=1", static, "keelson-oci", "keelson.dev/keelson/cmd/oci"},
	} {
		cmd := exec.Command("go", "build", "-trimpath", "-tags=seccomp,netgo,osusergo", b[1], "-o",
			filepath.Join(dir, b[2]), b[3])
		cmd.Env = append(os.Environ(), b[0])
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build %s: %w\n%s", b[3], err, out)
		}
	}
	return dir, os.Chmod(dir, 0o755)
})

// built is the directory of the binaries, once they are built.
var built atomic.Pointer[string]

func TestMain(m *testing.M) {
	code := m.Run()
	if dir := built.Load(); dir != nil {
		os.RemoveAll(*dir)
	}
	os.Exit(code)
}

// rig is a runtime with real containers, a fake network and images from busybox.
type rig struct {
	*Runtime
	t       *testing.T
	cfg     Config
	stop    func()
	net     *fakeNetwork
	logs    string
	counter int
}

func newRig(t *testing.T) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: containers, namespaces and cgroups are real")
	}
	if _, err := os.Stat("/bin/busybox"); err != nil {
		t.Skip("needs /bin/busybox (Debian: busybox-static)")
	}
	bin, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	var b [4]byte
	_, _ = rand.Read(b[:])
	dir, err := os.MkdirTemp("", "krt-")
	if err != nil {
		t.Fatal(err)
	}
	images := newFakeImages(t, dir)
	r := &rig{t: t, net: &fakeNetwork{added: map[string]bool{}}, logs: filepath.Join(dir, "logs")}
	r.cfg = Config{StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"),
		ShimPath: filepath.Join(bin, "keelson-shim"), OCIPath: filepath.Join(bin, "keelson-oci"),
		PausePath:  filepath.Join(bin, "keelson-pause"),
		CgroupRoot: "/keelson-test-" + hex.EncodeToString(b[:]), Images: images, Network: r.net,
		Logger: slog.New(slog.NewTextHandler(testWriter{t}, nil))}
	before := countLeaks(t, r.cfg)
	r.startRuntime()
	t.Cleanup(func() {
		if t.Failed() {
			r.dumpLogs()
		}
		r.removeAll()
		r.stop()
		after := countLeaks(t, r.cfg)
		if before != after {
			t.Errorf("leak: before %+v, after %+v", before, after)
		}
		if tree, err := podcgroup.Detect(r.cfg.CgroupRoot); err == nil {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			if err := tree.KillProcesses(ctx, ""); err != nil {
				t.Error(err)
			}
			if err := tree.RemoveCgroup(ctx, ""); err != nil {
				t.Error(err)
			}
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return r
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// startRuntime starts a runtime on the rig's directories, as a new agent would.
func (r *rig) startRuntime() {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r.Runtime = New(r.cfg)
	done := make(chan error, 1)
	go func() { done <- r.Runtime.Run(ctx) }()
	r.stop = func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			r.t.Error(err)
		}
		r.stop = func() {}
	}
	select {
	case <-r.Runtime.life.ready:
	case err := <-done:
		done <- nil
		r.t.Fatalf("the runtime did not start: %v", err)
	}
}

// restartRuntime restarts the runtime, as an agent restart does.
func (r *rig) restartRuntime() {
	r.t.Helper()
	r.stop()
	r.startRuntime()
}

func (r *rig) dumpLogs() {
	files, _ := filepath.Glob(r.cfg.RunDir + "/sandboxes/*/shim.log")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		r.t.Logf("%s: %s", f, b)
	}
}

func (r *rig) removeAll() {
	ctx := r.ctx()
	list, err := r.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		r.t.Error(err)
		return
	}
	for _, s := range list.Items {
		if _, err := r.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: s.Id}); err != nil {
			r.t.Error(err)
		}
	}
}

func (r *rig) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	r.t.Cleanup(cancel)
	return ctx
}

// leaks counts resources that must be unchanged after a test.
type leaks struct{ mounts, processes, folders int }

func countLeaks(t *testing.T, cfg Config) leaks {
	t.Helper()
	var l leaks
	base := filepath.Dir(cfg.RunDir)
	// A process belongs to the test if it runs one of the test's binaries or from one of its
	// directories. It may take a moment to be reaped.
	_ = wait.For(testCtx(t, time.Minute), 5*time.Millisecond, func() error {
		l.processes = 0
		procs, _ := filepath.Glob("/proc/[0-9]*/cgroup")
		for _, p := range procs {
			b, _ := os.ReadFile(p)
			// The thread that forks shims is there as well, as part of this process.
			if strings.Contains(string(b), cfg.CgroupRoot+"/") &&
				filepath.Dir(p) != fmt.Sprintf("/proc/%d", os.Getpid()) {
				l.processes++
			}
		}
		if l.processes > 0 {
			return errors.New("processes are left")
		}
		return nil
	})
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	l.mounts = strings.Count(string(mounts), base)
	for _, dir := range []string{"netns", "sandboxes", "containers", "libcontainer"} {
		e, _ := os.ReadDir(filepath.Join(cfg.RunDir, dir))
		l.folders += len(e)
	}
	for _, dir := range []string{"volumes", "etc", "ended"} {
		e, _ := os.ReadDir(filepath.Join(cfg.StateDir, dir))
		l.folders += len(e)
	}
	if tree, err := podcgroup.Detect(cfg.CgroupRoot); err == nil {
		for _, p := range tree.CgroupPaths("") {
			e, _ := filepath.Glob(p + "/pod*")
			l.folders += len(e)
		}
	}
	return l
}

func testCtx(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// runSandbox runs a sandbox; change may modify its configuration.
func (r *rig) runSandbox(change ...func(*cri.PodSandboxConfig)) (string, *cri.PodSandboxConfig) {
	r.t.Helper()
	r.counter++
	c := &cri.PodSandboxConfig{
		Metadata: &cri.PodSandboxMetadata{Name: fmt.Sprintf("pod%d", r.counter), Namespace: "test",
			Uid: fmt.Sprintf("uid%d", r.counter)},
		Hostname: fmt.Sprintf("pod%d", r.counter), LogDirectory: r.logs,
		DnsConfig: &cri.DNSConfig{Servers: []string{"192.0.2.1"}, Searches: []string{"test.svc"},
			Options: []string{"ndots:5"}},
		Linux: &cri.LinuxPodSandboxConfig{SecurityContext: &cri.LinuxSandboxSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}}},
	}
	for _, f := range change {
		f(c)
	}
	out, err := r.RunPodSandbox(r.ctx(), &cri.RunPodSandboxRequest{Config: c})
	if err != nil {
		r.t.Fatal(err)
	}
	return out.PodSandboxId, c
}

// containerConfig returns a container configuration that runs a shell script in the tools image.
func (r *rig) containerConfig(name, script string, change ...func(*cri.ContainerConfig)) *cri.ContainerConfig {
	c := &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: "tools"},
		Command: []string{"/bin/sh", "-c", script}, LogPath: name + ".log",
		Linux: &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{
			NamespaceOptions: &cri.NamespaceOption{Pid: cri.NamespaceMode_CONTAINER}}},
	}
	for _, f := range change {
		f(c)
	}
	return c
}

func (r *rig) createContainer(sandbox string, sc *cri.PodSandboxConfig, c *cri.ContainerConfig) string {
	r.t.Helper()
	out, err := r.CreateContainer(r.ctx(), &cri.CreateContainerRequest{PodSandboxId: sandbox, Config: c,
		SandboxConfig: sc})
	if err != nil {
		r.t.Fatal(err)
	}
	return out.ContainerId
}

// runContainer creates and starts a container and returns its ID.
func (r *rig) runContainer(sandbox string, sc *cri.PodSandboxConfig, c *cri.ContainerConfig) string {
	r.t.Helper()
	id := r.createContainer(sandbox, sc, c)
	if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); err != nil {
		r.t.Fatal(err)
	}
	return id
}

func (r *rig) inspectContainer(id string) *cri.ContainerStatus {
	r.t.Helper()
	out, err := r.ContainerStatus(r.ctx(), &cri.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		r.t.Fatal(err)
	}
	return out.Status
}

// waitExit waits for the end of a container and returns its status.
func (r *rig) waitExit(id string) *cri.ContainerStatus {
	r.t.Helper()
	var st *cri.ContainerStatus
	await.Until(r.t.Context(), r.t, await.Patience, 2*time.Millisecond, "the exit of container "+id, func() error {
		if st = r.inspectContainer(id); st.State != cri.ContainerState_CONTAINER_EXITED {
			return fmt.Errorf("container is %s", st.State)
		}
		return nil
	})
	return st
}

// readLog returns a container's log without time stamps.
func (r *rig) readLog(name string) string {
	b, err := os.ReadFile(filepath.Join(r.logs, name+".log"))
	if err != nil {
		r.t.Fatal(err)
	}
	var out strings.Builder
	for _, line := range strings.Split(strings.TrimSuffix(string(b), "\n"), "\n") {
		stamp, rest, _ := strings.Cut(line, " ")
		if _, err := time.Parse(time.RFC3339Nano, stamp); err != nil && line != "" {
			r.t.Errorf("log line %q: %v", line, err)
		}
		out.WriteString(rest + "\n")
	}
	return out.String()
}

// waitLog waits until a container has logged a text.
func (r *rig) waitLog(name, text string) {
	r.t.Helper()
	await.Until(r.t.Context(), r.t, await.Patience, time.Millisecond, "the log of "+name, func() error {
		if b, err := os.ReadFile(filepath.Join(r.logs, name+".log")); err != nil || !strings.Contains(string(b), text) {
			return fmt.Errorf("%q is not in the log: %s %v", text, b, err)
		}
		return nil
	})
}

// runToEnd runs a script to its end and returns its log.
func (r *rig) runToEnd(
	sandbox string, sc *cri.PodSandboxConfig, name, script string, change ...func(*cri.ContainerConfig),
) (string, *cri.ContainerStatus) {
	r.t.Helper()
	id := r.runContainer(sandbox, sc, r.containerConfig(name, script, change...))
	st := r.waitExit(id)
	return r.readLog(name), st
}

// fakeNetwork counts attached sandboxes and can fail or block on request.
type fakeNetwork struct {
	mu      sync.Mutex
	added   map[string]bool
	fail    error // result of Add
	failDel error
	blocked chan struct{} // if set, Add waits until it is closed
}

func (n *fakeNetwork) Add(ctx context.Context, q agent.NetworkRequest) (agent.NetworkStatus, error) {
	if n.blocked != nil {
		select {
		case <-n.blocked:
		case <-ctx.Done():
			return agent.NetworkStatus{}, ctx.Err()
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.fail != nil {
		return agent.NetworkStatus{}, n.fail
	}
	if _, err := os.Stat(q.NetNS); err != nil {
		return agent.NetworkStatus{}, err
	}
	n.added[q.SandboxID] = true
	return agent.NetworkStatus{IPs: []string{"192.0.2.7", "2001:db8::7"}}, nil
}
func (n *fakeNetwork) Check(context.Context, agent.NetworkRequest) error { return nil }
func (n *fakeNetwork) Del(_ context.Context, q agent.NetworkRequest) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.failDel != nil {
		return n.failDel
	}
	delete(n.added, q.SandboxID)
	return nil
}

// set sets the results of Add and Del; nil = success.
func (n *fakeNetwork) set(add, del error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail, n.failDel = add, del
}
func (n *fakeNetwork) GC(_ context.Context, keep []string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for id := range n.added {
		found := false
		for _, k := range keep {
			found = found || k == id
		}
		if !found {
			delete(n.added, id)
		}
	}
	return nil
}
func (n *fakeNetwork) Ready() error { return nil }
func (n *fakeNetwork) count() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.added)
}

// fakeImages has one image, "tools": busybox and a few files.
type fakeImages struct {
	agent.Images
	dir    string
	config agent.ImageConfig
}

func newFakeImages(t *testing.T, dir string) *fakeImages {
	t.Helper()
	layer := filepath.Join(dir, "layer")
	for _, d := range []string{"bin", "etc", "tmp", "data", "proc", "sys", "dev"} {
		if err := os.MkdirAll(filepath.Join(layer, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(layer, "tmp"), 0o777|os.ModeSticky); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{"bin/busybox": b, "data/file": []byte("from the image\n"),
		"etc/hosts": nil, "etc/hostname": nil, "etc/resolv.conf": nil,
		"etc/passwd": []byte("root:x:0:0::/root:/bin/sh\napp:x:1000:1001::/home:/bin/sh\n"),
		"etc/group":  []byte("root:x:0:\nappgroup:x:1001:\nextra:x:2000:app\n")} {
		path := filepath.Join(layer, name)
		if _, err := os.Stat(path); err == nil {
			continue // written by a killed agent, and possibly in use
		}
		if err := os.WriteFile(path, content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	list, err := exec.Command("/bin/busybox", "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range strings.Fields(string(list)) {
		if a != "busybox" {
			if err := os.Symlink("busybox", filepath.Join(layer, "bin", a)); err != nil &&
				!errors.Is(err, os.ErrExist) {
				t.Fatal(err)
			}
		}
	}
	return &fakeImages{dir: dir, config: agent.ImageConfig{ID: "sha256:tools", Digest: "tools@sha256:1",
		Env: []string{"FROM_IMAGE=yes", "SHARED=image"},
		Cmd: []string{"/bin/sh"}, Volumes: []string{"/data"}}}
}

func (f *fakeImages) Config(_ context.Context, image string) (agent.ImageConfig, error) {
	if image != "tools" {
		return agent.ImageConfig{}, agent.ErrImageNotPresent
	}
	return f.config, nil
}

func (f *fakeImages) PrepareRootFS(_ context.Context, id, image string) (agent.RootFS, error) {
	dir := filepath.Join(f.dir, "rootfs", id)
	fs := agent.RootFS{Path: dir + "/root", Lower: []string{filepath.Join(f.dir, "layer")}, Upper: dir + "/upper",
		Work: dir + "/work"}
	for _, d := range []string{fs.Path, fs.Upper, fs.Work} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return agent.RootFS{}, err
		}
	}
	return fs, nil
}

func (f *fakeImages) RemoveRootFS(_ context.Context, id string) error {
	_ = unix.Unmount(filepath.Join(f.dir, "rootfs", id, "root"), unix.MNT_DETACH)
	return os.RemoveAll(filepath.Join(f.dir, "rootfs", id))
}
