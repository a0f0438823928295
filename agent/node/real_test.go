package node

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	ggcr "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/csi/privatemounts"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/reservedspace"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
)

func TestMain(m *testing.M) { privatemounts.Main(suite{m}) }

// suite runs the tests and removes the programs that they built.
type suite struct{ *testing.M }

func (s suite) Run() int {
	code := s.M.Run()
	if dir := programsDir.Load(); dir != nil {
		if err := os.RemoveAll(*dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}

// testNode is a node with real containers, images and volumes; only network and control plane are
// simulated.
type testNode struct {
	t       *testing.T
	cfg     Config
	cluster *fake.Cluster
	net     *fake.Network
	node    *Node
	stop    func()
	looks   wakeup.Signal // has a value when the node's levels were read
}

func newTestNode(t *testing.T) *testNode {
	privatemounts.SkipUnlessPrivate(t)
	if _, err := os.Stat("/bin/busybox"); err != nil {
		t.Skip("needs /bin/busybox (Debian: busybox-static)")
	}
	programs, err := buildPrograms()
	if err != nil {
		t.Fatal(err)
	}
	// The path is short because it contains sockets.
	dir, err := os.MkdirTemp("", "knode-")
	if err != nil {
		t.Fatal(err)
	}
	var id [4]byte
	if _, err := rand.Read(id[:]); err != nil {
		t.Fatal(err)
	}
	b := &testNode{t: t, cluster: fake.NewCluster(), net: &fake.Network{}}
	b.cfg = Config{NodeName: "w1", NodeIPs: []string{"192.0.2.1"},
		Dirs: DirConfig{State: filepath.Join(dir, "s"), Run: filepath.Join(dir, "r"), Logs: filepath.Join(dir, "l"),
			Archives: filepath.Join(dir, "a"), Runtime: programs, DevicePlugins: filepath.Join(dir, "d"),
			PodResources: filepath.Join(dir, "pr", "s"), CgroupRoot: "/keelson-test-" + hex.EncodeToString(id[:])},
		Pods:  PodConfig{ResolvConf: os.DevNull},
		Parts: Parts{Session: b.cluster},
		// the disk of the test's machine may be full
		Node:       ObjectConfig{DiskFloor: reservedspace.Percent(1), InodeFloor: reservedspace.Percent(1)},
		PodNetwork: NetworkConfig{New: func(agent.Objects) agent.Network { return b.net }},
		Log:        slog.New(slog.NewTextHandler(logWriter{t}, nil))}
	t.Cleanup(func() {
		b.cleanUp()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	writeArchive(t, b.cfg.Dirs.Archives)
	b.startAgent()
	return b
}

type logWriter struct{ t *testing.T }

func (w logWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// programsDir is the folder of buildPrograms after its first call.
var programsDir atomic.Pointer[string]

// buildPrograms builds shim, pause and keelson-oci once for all tests and returns their folder.
var buildPrograms = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "knode-bin-")
	if err != nil {
		return "", err
	}
	programsDir.Store(&dir)
	for _, b := range [][]string{
		{"CGO_ENABLED=0", "-ldflags=-s -w", "keelson-shim", "keelson.dev/keelson/cmd/shim"},
		{"CGO_ENABLED=0", "-ldflags=-s -w -E main.start", "keelson-pause", "keelson.dev/keelson/cmd/pause"},
		{"CGO_ENABLED=1", "-ldflags=-s -w -linkmode external -extldflags -static", "keelson-oci",
			"keelson.dev/keelson/cmd/oci"},
	} {
		cmd := exec.Command("go", "build", "-trimpath", "-tags=seccomp,netgo,osusergo", b[1], "-o",
			filepath.Join(dir, b[2]), b[3])
		cmd.Env = append(os.Environ(), b[0])
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("building %s: %w\n%s", b[2], err, out)
		}
	}
	return dir, nil
})

// writeArchive writes an image "busybox:1" with only a shell.
func writeArchive(t *testing.T, dir string) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	prog, err := os.ReadFile("/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"bin/", "etc/", "tmp/", "dev/", "proc/", "sys/"} {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}))
	}
	err = errors.Join(err,
		w.WriteHeader(&tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(prog))}))
	_, werr := w.Write(prog)
	err = errors.Join(err, werr,
		w.WriteHeader(&tar.Header{Name: "bin/sh", Typeflag: tar.TypeSymlink, Linkname: "busybox"}), w.Close())
	if err != nil {
		t.Fatal(err)
	}
	saveImage(t, filepath.Join(dir, "busybox.tar"), "busybox:1", layer.Bytes())
}

// saveImage writes an archive of an image with one layer.
func saveImage(t *testing.T, file, called string, layer []byte) {
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(layer)), nil
	})
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err == nil {
		img, err = mutate.Config(img, ggcr.Config{Cmd: []string{"/bin/sh"}, Env: []string{"PATH=/bin"}})
	}
	if err == nil {
		err = os.MkdirAll(filepath.Dir(file), 0o755)
	}
	var tag name.Tag
	if err == nil {
		tag, err = name.NewTag("docker.io/library/" + called)
	}
	if err == nil {
		err = tarball.WriteToFile(file, tag, img)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// startAgent runs an agent on the node's folders, as a new process would.
func (b *testNode) startAgent() {
	var err error
	if b.node, err = New(b.cfg); err != nil {
		b.t.Fatal(err)
	}
	looks, read := wakeup.New(), b.node.facts.pressure.read
	b.looks, b.node.facts.pressure.read = looks, func() [eviction.Signals]eviction.Level {
		looks.Send()
		return read()
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.node.Run(ctx) }()
	b.stop = func() {
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			b.t.Errorf("Run returned %v", err)
		}
		b.stop = func() {}
	}
}

// cleanUp deletes all pods, and kills what remains if that fails.
func (b *testNode) cleanUp() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, p := range b.cluster.Pods() {
		b.deletePod(p.UID, 0)
	}
	if err := b.cluster.Await(ctx, "all pods gone", func() bool { return len(b.cluster.Pods()) == 0 }); err != nil {
		b.t.Error(err)
	}
	b.stop()
	// The tmpfs of secrets stays for the next agent, but there is none.
	if err := unix.Unmount(filepath.Join(b.cfg.Dirs.Run, "secrets"), unix.MNT_DETACH); err != nil &&
		!errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		b.t.Error(err)
	}
	for _, h := range cgroupDirs(b.cfg.Dirs.CgroupRoot) {
		killTree(h)
		if err := wait.For(ctx, 10*time.Millisecond, func() error { return removeTree(h) }); err != nil {
			b.t.Error(err)
		}
	}
}

func cgroupDirs(root string) []string {
	all, err := filepath.Glob("/sys/fs/cgroup/*" + root)
	if err != nil {
		return nil
	}
	return append(all, "/sys/fs/cgroup"+root)
}

func killTree(dir string) {
	_ = filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err == nil && filepath.Base(path) == "cgroup.procs" {
			b, _ := os.ReadFile(path)
			for _, f := range strings.Fields(string(b)) {
				// The thread of this process that starts shims exists until it has ended.
				if pid, err := strconv.Atoi(f); err == nil && pid != os.Getpid() {
					if p, err := os.FindProcess(pid); err == nil {
						_ = p.Kill()
					}
				}
			}
		}
		return nil
	})
}

func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.Remove(dir)
}

func (b *testNode) deletePod(uid types.UID, grace int64) {
	p, ok := b.cluster.Pod(uid)
	if !ok {
		return
	}
	p = p.DeepCopy()
	now := metav1.Now()
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &now, &grace
	b.cluster.Put(p)
}

func (b *testNode) awaitPod(what string, uid types.UID, cond func(*v1.Pod) bool) *v1.Pod {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), time.Minute)
	defer cancel()
	var seen *v1.Pod
	if err := b.cluster.Await(ctx, what, func() bool {
		p, ok := b.cluster.Pod(uid)
		if ok {
			seen = p
		}
		return ok && cond(p)
	}); err != nil {
		b.t.Fatalf("%v; status: %+v; events: %q", err, seen.Status, b.cluster.Events(uid))
	}
	return seen
}

func isReady(p *v1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == v1.PodReady {
			return c.Status == v1.ConditionTrue
		}
	}
	return false
}

func newShell(name, script string) v1.Container {
	return v1.Container{Name: name, Image: "busybox:1", Command: []string{"/bin/sh", "-c", script},
		TerminationMessagePath: "/dev/termination-log"}
}

func realPod(uid string, c ...v1.Container) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web-" + uid, Namespace: "default", UID: types.UID(uid),
		CreationTimestamp: metav1.Now(),
		Annotations: map[string]string{
			"keelson.dev/traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}},
		Spec: v1.PodSpec{RestartPolicy: v1.RestartPolicyAlways, DNSPolicy: v1.DNSDefault, Containers: c}}
}

// TestRealPods runs pods through the whole agent. F93, F94, F100, F101, F104, F111, F112, F113, P9
func TestRealPods(t *testing.T) {
	b := newTestNode(t)
	t.Run("ready", b.testReady)
	t.Run("restarts", b.testRestarts)
	t.Run("oom", b.testOOM)
	t.Run("job", b.testJob)
	t.Run("agent restart", b.testAgentRestart)
	t.Run("sandbox rebuilt", b.testSandboxRebuilt)
	t.Run("graceful", b.testGraceful)
	b.t = t
	for _, s := range b.cluster.StageNames() {
		if strings.HasPrefix(s, "ready ") {
			t.Log(s)
		}
	}
}

func (b *testNode) testReady(t *testing.T) {
	b.t = t
	b.cluster.Put(&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "cm"},
		Data: map[string]string{"greeting": "hello"}},
		&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"},
			Data: map[string][]byte{"key": []byte("geheim")}})
	c := newShell("app", `cat /cm/greeting /secret/key /empty/from-init /one > /empty/out; echo out; echo err >&2; `+
		`touch /tmp/up; exec /bin/busybox sleep 1000`)
	c.VolumeMounts = []v1.VolumeMount{{Name: "cm", MountPath: "/cm"}, {Name: "secret", MountPath: "/secret"},
		{Name: "empty", MountPath: "/empty"}, {Name: "cm", MountPath: "/one", SubPath: "greeting"}}
	c.ReadinessProbe =
		&v1.Probe{ProbeHandler: v1.ProbeHandler{
			Exec: &v1.ExecAction{Command: []string{"/bin/busybox", "test", "-f", "/tmp/up"}}}}
	c.Command[2] = "set -e; alias cat='/bin/busybox cat' touch='/bin/busybox touch'; " + c.Command[2]
	p := realPod("ready", c)
	p.Spec.InitContainers = []v1.Container{newShell("init", "echo -n made > /empty/from-init")}
	p.Spec.InitContainers[0].VolumeMounts = []v1.VolumeMount{{Name: "empty", MountPath: "/empty"}}
	p.Spec.Volumes = []v1.Volume{{Name: "cm",
		VolumeSource: v1.VolumeSource{
			ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}}},
		{Name: "secret", VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "s"}}},
		{Name: "empty", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}}
	b.cluster.Put(p)
	got := b.awaitPod("Ready", "ready", isReady)
	t.Logf("timeline: %q", b.cluster.StageNames())
	if !strings.HasPrefix(got.Status.ContainerStatuses[0].ContainerID, "keelson://") || got.Status.PodIP == "" ||
		got.Status.QOSClass != v1.PodQOSBestEffort {
		t.Errorf("status: %+v", got.Status)
	}
	out, err := os.ReadFile(filepath.Join(b.cfg.Dirs.State, "volumes", "ready", "empty", "empty", "out"))
	if err != nil || string(out) != "hellogeheimmadehello" {
		t.Errorf("the container saw %q, %v", out, err)
	}
	var log bytes.Buffer
	srv := newServer(b)
	if err := srv.Logs(t.Context(), agent.LogRequest{PodUID: "ready", Namespace: "default", Pod: "web-ready",
		Container: "app", TailLines: -1}, &log); err != nil || !strings.Contains(log.String(), "out\n") ||
		!strings.Contains(log.String(), "err\n") {
		t.Errorf("log: %q, %v", log.String(), err)
	}
	var said bytes.Buffer
	err = srv.Exec(t.Context(), "ready", "app", []string{"/bin/sh", "-c", "echo -n hi; exit 7"}, false, false,
		agent.Streams{Stdout: &said})
	if e := (*agent.ExitError)(nil); !errors.As(err, &e) || e.Code != 7 || said.String() != "hi" {
		t.Errorf("exec: %q, %v", said.String(), err)
	}
}

func (b *testNode) testRestarts(t *testing.T) {
	b.t = t
	b.cluster.Put(realPod("crash", newShell("app", "echo -n why > /dev/termination-log; exit 3")))
	got := b.awaitPod("a second restart", "crash", func(p *v1.Pod) bool {
		return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount >= 2
	})
	if l := got.Status.ContainerStatuses[0].LastTerminationState.Terminated; l == nil || l.ExitCode != 3 ||
		l.Message != "why" || l.Reason != "Error" {
		t.Errorf("last state: %+v", l)
	}
	b.awaitPod("CrashLoopBackOff", "crash", func(p *v1.Pod) bool {
		w := p.Status.ContainerStatuses[0].State.Waiting
		return w != nil && w.Reason == "CrashLoopBackOff"
	})
	b.cluster.Put(realPod("absent", v1.Container{Name: "app", Image: "busybox:1",
		Command: []string{"/no/such/program"}}))
	b.awaitPod("an error that names the program", "absent", func(p *v1.Pod) bool {
		for _, e := range b.cluster.Events("absent") {
			if strings.HasPrefix(e, "Failed") && strings.Contains(e, "/no/such/program") {
				return true
			}
		}
		return false
	})
	b.deletePod("absent", 0)
	b.deletePod("crash", 0)
}

func (b *testNode) testOOM(t *testing.T) {
	b.t = t
	c := newShell("app", "x=aaaaaaaaaaaaaaaa; while true; do x=$x$x; done")
	c.Resources.Limits = v1.ResourceList{v1.ResourceMemory: resource.MustParse("16Mi")}
	p := realPod("oom", c)
	p.Spec.RestartPolicy = v1.RestartPolicyNever
	b.cluster.Put(p)
	got := b.awaitPod("its end", "oom", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodFailed })
	if s := got.Status.ContainerStatuses[0].State.Terminated; s == nil || s.Reason != "OOMKilled" || s.ExitCode != 137 {
		t.Errorf("state: %+v", s)
	}
	b.deletePod("oom", 0)
}

func (b *testNode) testJob(t *testing.T) {
	b.t = t
	p := realPod("job", newShell("app", "exit 0"))
	p.Spec.RestartPolicy = v1.RestartPolicyOnFailure
	b.cluster.Put(p)
	got := b.awaitPod("Succeeded", "job", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodSucceeded })
	if s := got.Status.ContainerStatuses[0].State.Terminated; s == nil || s.Reason != "Completed" {
		t.Errorf("state: %+v", s)
	}
	b.deletePod("job", 0)
}

// agentRestart: P9.
func (b *testNode) testAgentRestart(t *testing.T) {
	b.t = t
	b.cluster.Put(realPod("keep", newShell("app", "exec /bin/busybox sleep 1000")),
		realPod("ends", newShell("app", "while [ ! -e /tmp/end ]; do /bin/busybox usleep 10000; done; exit 42")))
	keep := b.awaitPod("Ready", "keep", isReady)
	b.awaitPod("Ready", "ends", isReady)
	if err := newServer(b).Exec(t.Context(), "ends", "app",
		[]string{"/bin/sh", "-c", "(/bin/busybox sleep 1; > /tmp/end) &"}, false, false, agent.Streams{}); err != nil {
		t.Fatal(err)
	}
	b.stop()
	b.startAgent()
	got := b.awaitPod("the exit code of a container that ended without an agent", "ends", func(p *v1.Pod) bool {
		l := p.Status.ContainerStatuses[0].LastTerminationState.Terminated
		return l != nil && l.ExitCode == 42
	})
	if n := got.Status.ContainerStatuses[0].RestartCount; n != 1 {
		t.Errorf("%d restarts", n)
	}
	again, _ := b.cluster.Pod("keep")
	if again.Status.ContainerStatuses[0].ContainerID != keep.Status.ContainerStatuses[0].ContainerID ||
		again.Status.ContainerStatuses[0].RestartCount != 0 || !isReady(again) {
		t.Errorf("the agent's restart touched a container: %+v", again.Status.ContainerStatuses[0])
	}
	b.deletePod("keep", 0)
	b.deletePod("ends", 0)
}

// sandboxRebuilt: F101.
func (b *testNode) testSandboxRebuilt(t *testing.T) {
	b.t = t
	p := realPod("pause", newShell("app", "exec /bin/busybox sleep 1000"))
	zero := int64(0)
	p.Spec.TerminationGracePeriodSeconds = &zero
	b.cluster.Put(p)
	first := b.awaitPod("Ready", "pause", isReady)
	pid := pausePID(t, b.cfg.Dirs.Run, first.Status.PodIP)
	proc, err := os.FindProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	if err := proc.Kill(); err != nil {
		t.Fatal(err)
	}
	second := b.awaitPod("Ready in a new sandbox", "pause", func(p *v1.Pod) bool {
		return isReady(p) && p.Status.PodIP != first.Status.PodIP
	})
	if n := second.Status.ContainerStatuses[0].RestartCount; n != 1 {
		t.Errorf("%d restarts", n)
	}
	b.deletePod("pause", 0)
}

// pausePID returns the PID of the pause process of the sandbox with an address, from the runtime's
// records.
func pausePID(t *testing.T, run, ip string) int {
	files, err := filepath.Glob(filepath.Join(run, "oci", "sandboxes", "*", "sandbox.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		var rec struct {
			IPs      []string `json:"ips"`
			PausePID int      `json:"pausePID"`
		}
		b, err := os.ReadFile(f)
		if err == nil {
			err = json.Unmarshal(b, &rec)
		}
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(rec.IPs, ip) && rec.PausePID > 1 {
			return rec.PausePID
		}
	}
	t.Fatalf("no sandbox with address %s has a pause process", ip)
	return 0
}

// testGraceful: preStop and then SIGTERM within the grace period. A process that exits at once is
// removed at once.
func (b *testNode) testGraceful(t *testing.T) {
	b.t = t
	c := newShell("app", `trap 'echo term >> /data/log; exit 0' TERM; echo up >> /data/log; while true; do `+
		`/bin/busybox usleep 5000; done`)
	c.Lifecycle =
		&v1.Lifecycle{PreStop: &v1.LifecycleHandler{
			Exec: &v1.ExecAction{Command: []string{"/bin/sh", "-c", "echo hook >> /data/log"}}}}
	c.VolumeMounts = []v1.VolumeMount{{Name: "data", MountPath: "/data"}}
	p := realPod("grace", c)
	data := t.TempDir()
	p.Spec.Volumes = []v1.Volume{{Name: "data",
		VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: data}}}}
	b.cluster.Put(p)
	b.awaitPod("its log", "grace", isReady)
	await.Until(t.Context(), t, await.Patience, time.Millisecond, "the container's log", func() error {
		_, err := os.Stat(filepath.Join(data, "log"))
		return err
	})
	begin := time.Now()
	b.deletePod("grace", 30)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.cluster.Await(ctx, "its end", func() bool { return b.cluster.Gone("grace") }); err != nil {
		t.Fatal(err)
	}
	t.Logf("delete → gone: %s", time.Since(begin))
	if log, err := os.ReadFile(filepath.Join(data, "log")); err != nil || string(log) != "up\nhook\nterm\n" {
		t.Errorf("log: %q, %v", log, err)
	}
}

func newServer(b *testNode) agent.NodeServer { return b.node.Server() }
