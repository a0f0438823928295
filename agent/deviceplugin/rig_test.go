package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/await"
)

const thing = "example.com/thing"

// binary is run in separate processes, as on a node.
var binary = fake.Program{Package: "test/e2e/deviceplugin"}

func TestMain(m *testing.M) {
	code := m.Run()
	if err := binary.Remove(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// rig is a manager with its own directories.
type rig struct {
	*testing.T
	dir     string // a short path, because sockets are below it
	cfg     Config
	m       *Manager
	cluster *fake.Cluster
	end     func()
}

func newRig(t *testing.T, change ...func(*Config)) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "dp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	r := &rig{T: t, dir: dir, cluster: fake.NewCluster()}
	r.cfg = Config{Dir: filepath.Join(dir, "p"), Registration: filepath.Join(dir, "r"), State: filepath.Join(dir, "s"),
		Objects: r.cluster,
		Log:     slog.New(slog.NewTextHandler(writer{t}, nil)), ReturnWait: time.Millisecond}
	for _, f := range change {
		f(&r.cfg)
	}
	for _, d := range []string{r.cfg.Dir, r.cfg.Registration} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { r.end() })
	r.begin()
	return r
}

type writer struct{ t *testing.T }

func (w writer) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// begin runs a new manager on the rig's directories, like a restarted agent. The manager accepts
// registrations when begin returns. A plugin that registered earlier would have its socket removed
// and would register twice.
func (r *rig) begin() {
	r.Helper()
	if r.end != nil {
		r.end()
	}
	r.m = New(r.cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.m.Run(ctx) }()
	r.end = sync.OnceFunc(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			r.Errorf("Run: %v", err)
		}
	})
	r.eventually(func() error { _, err := os.Stat(filepath.Join(r.cfg.Dir, socketName)); return err })
}

// process is a running plugin.
type process struct {
	*exec.Cmd
	log  string
	list string
	once func()
}

// plugin runs a plugin until the test ends.
func (r *rig) plugin(name string, args ...string) *process {
	r.Helper()
	path, err := binary.Path()
	if err != nil {
		r.Fatal(err)
	}
	p := &process{log: filepath.Join(r.dir, name+".log")}
	p.Cmd = exec.Command(path, append([]string{"--name=" + name, "--folder=" + r.cfg.Dir, "--log=" + p.log},
		args...)...)
	p.Stderr = writer{r.T}
	if err := p.Start(); err != nil {
		r.Fatal(err)
	}
	p.once = sync.OnceFunc(func() { _, _ = p.Process.Kill(), p.Wait() })
	r.Cleanup(p.once)
	return p
}

// asked returns the calls that the plugin received. The plugin logs its registration
// asynchronously.
func (p *process) asked(t *testing.T) string {
	t.Helper()
	return strings.Join(slices.DeleteFunc(p.lines(t), func(l string) bool {
		return l == "" || strings.HasPrefix(l, "registered ")
	}), "; ")
}

// registered waits until the plugin has received the given number of responses to its registration.
func (r *rig) registered(p *process, well bool, times int) {
	r.Helper()
	want := fmt.Sprint("registered ", well)
	r.eventually(func() error {
		all := p.lines(r.T)
		if got := len(all) - len(slices.DeleteFunc(slices.Clone(all), func(l string) bool {
			return l == want
		})); got != times {
			return fmt.Errorf("%q %d times, want %d", want, got, times)
		}
		return nil
	})
}

func (p *process) lines(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile(p.log)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return strings.Split(strings.TrimSpace(string(b)), "\n")
}

// eventually waits until f returns nil.
func (r *rig) eventually(f func() error) {
	r.Helper()
	await.Until(r.Context(), r, await.Patience, 5*time.Millisecond, "the node", f)
}

// has waits until the node advertises the given numbers of devices and healthy devices.
func (r *rig) has(name string, all, healthy int64) {
	r.Helper()
	r.eventually(func() error {
		capacity, allocatable := r.m.Resources()
		c, a := capacity[v1.ResourceName(name)], allocatable[v1.ResourceName(name)]
		if _, ok := capacity[v1.ResourceName(name)]; !ok || c.Value() != all || a.Value() != healthy {
			return fmt.Errorf("%s: %s devices, %s healthy (%t): want %d and %d", name, c.String(), a.String(),
				ok, all, healthy)
		}
		return nil
	})
}

// asks returns a container that requests devices. Its name determines its kind: "init-", "side-" or
// another.
func asks(name string, n int64, of ...string) v1.Container {
	c := v1.Container{Name: name, Resources: v1.ResourceRequirements{Limits: v1.ResourceList{}}}
	for _, o := range append(of, thing)[:max(1, len(of))] {
		c.Resources.Limits[v1.ResourceName(o)] = *resource.NewQuantity(n, resource.DecimalSI)
	}
	c.Resources.Requests = c.Resources.Limits
	if strings.HasPrefix(name, "side-") {
		always := v1.ContainerRestartPolicyAlways
		c.RestartPolicy = &always
	}
	return c
}

func podOf(uid string, containers ...v1.Container) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "pod-" + uid, UID: types.UID(uid)}}
	for _, c := range containers {
		if strings.HasPrefix(c.Name, "init-") || strings.HasPrefix(c.Name, "side-") {
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		} else {
			p.Spec.Containers = append(p.Spec.Containers, c)
		}
	}
	return p
}

// given returns the devices of the containers of a pod according to its record.
func (r *rig) given(p *v1.Pod) string {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	var out []string
	for _, list := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for _, c := range list {
			if has, ok := r.m.pods[p.UID].containerDevices(c.Name)[thing]; ok {
				out = append(out, c.Name+":"+strings.Join(has.IDs, ","))
			}
		}
	}
	return strings.Join(out, " ")
}

func (p *process) signal(t *testing.T) {
	t.Helper()
	if err := p.Process.Signal(syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
