package devices

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/fake"
	"keelson.dev/keelson/internal/await"
)

// driverBinary is run in separate processes, as on a node.
var driverBinary = fake.Program{Package: "test/e2e/devicedriver"}

func TestMain(m *testing.M) {
	code := m.Run()
	if err := driverBinary.Remove(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// spawn runs a driver until the returned function is called. Its registration socket exists when
// spawn returns.
func spawn(t *testing.T, dir, name, mode string, more ...string) (stop func()) {
	t.Helper()
	path, err := driverBinary.Path()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, append(more, "--name="+name, "--registry="+dir,
		"--socket="+filepath.Join(dir, name+".sock.dra"), "--log="+filepath.Join(dir, name+".log"), "--mode="+mode)...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			_ = os.Remove(filepath.Join(dir, name+"-reg.sock"))
		}
	}
	t.Cleanup(stop)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for _, s := range []string{name + "-reg.sock", name + ".sock.dra"} {
		await.Until(ctx, t, await.Patience, 5*time.Millisecond, "the driver's socket", func() error {
			conn, err := net.Dial("unix", filepath.Join(dir, s))
			if err != nil {
				return err
			}
			return conn.Close()
		})
	}
	return stop
}

func logOf(t *testing.T, dir, name string) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name+".log"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "registered") {
			out = append(out, line)
		}
	}
	return out
}

// short returns a directory whose path leaves room for the names of sockets.
func short(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func claimOf(name string, drivers ...string) *resourcev1.ResourceClaim {
	c := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name,
		UID: types.UID("uid-" + name)}}
	c.Status.Allocation = &resourcev1.AllocationResult{}
	for _, d := range drivers {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results,
			resourcev1.DeviceRequestAllocationResult{Request: "r", Driver: d, Pool: "w1", Device: "gpu-of-" + name})
	}
	return c
}

func podOf(name string, claims ...*resourcev1.ResourceClaim) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("pod-" + name)}}
	for _, c := range claims {
		c.Status.ReservedFor = append(c.Status.ReservedFor,
			resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: name, UID: p.UID})
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims,
			v1.PodResourceClaim{Name: c.Name, ResourceClaimName: &c.Name})
	}
	return p
}

// Drivers prepare a claim once for all of its pods on the node and unprepare it after the last of
// them. This holds across restarts of the agent and while the driver is unavailable.
func TestPrepareAndRelease(t *testing.T) {
	dir, state, cluster := short(t), t.TempDir(), fake.NewCluster()
	stop := spawn(t, dir, "a.example.com", "")
	spawn(t, dir, "b.example.com", "")
	d := New(Config{Registration: dir, State: state, Objects: cluster})
	one, both := claimOf("one", "a.example.com"), claimOf("both", "a.example.com", "b.example.com", "a.example.com")
	p, q := podOf("p", one, both), podOf("q", both)
	cluster.Put(one, both)
	ctx := t.Context()
	got, err := d.Prepare(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	if len(got["one"]) != 1 || got["one"][0].CDI[0] != "a.example.com/gpu=uid-one" ||
		got["one"][0].Requests[0] != "r" ||
		len(got["both"]) != 2 || got["both"][1].CDI[0] != "b.example.com/gpu=uid-both" {
		t.Errorf("prepared %+v", got)
	}
	d = New(Config{Registration: dir, State: state, Objects: cluster}) // a restarted agent
	if again, err := d.Prepare(ctx, p); err != nil || fmt.Sprint(again) != fmt.Sprint(got) {
		t.Errorf("in another life %+v, %v", again, err)
	}
	if _, err := d.Prepare(ctx, q); err != nil {
		t.Fatal(err)
	}
	if pods, err := d.Pods(); err != nil || !slices.Equal(pods, []types.UID{"pod-p", "pod-q"}) {
		t.Errorf("pods %v, %v", pods, err)
	}
	if want := []string{"prepare ns/one uid-one",
		"prepare ns/both uid-both"}; !slices.Equal(logOf(t, dir, "a.example.com"), want) {
		t.Errorf("driver a was asked %q", logOf(t, dir, "a.example.com"))
	}
	stop()
	d.folder.Scan(ctx)
	if err := d.Release(ctx, p); !errors.Is(err, ErrNoDriver) ||
		!strings.Contains(err.Error(), "resourceclaim ns/one") {
		t.Errorf("without its driver: %v", err)
	}
	if pods, err := d.Pods(); err != nil || !slices.Equal(pods, []types.UID{"pod-p", "pod-q"}) {
		t.Errorf("pods %v, %v", pods, err)
	}
	spawn(t, dir, "a.example.com", "")
	d = New(Config{Registration: dir, State: state, Objects: fake.NewCluster()}) // an agent that has none of the claims
	for _, pod := range []types.UID{"pod-p", "pod-p", "pod-q", "pod-x"} {
		if err := d.Release(ctx, &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: pod}}); err != nil {
			t.Errorf("release of %s: %v", pod, err)
		}
	}
	if want := []string{"prepare ns/one uid-one", "prepare ns/both uid-both", "unprepare ns/one uid-one",
		"unprepare ns/both uid-both"}; !slices.Equal(logOf(t, dir, "a.example.com"), want) {
		t.Errorf("driver a was asked %q", logOf(t, dir, "a.example.com"))
	}
	if want := []string{"prepare ns/both uid-both",
		"unprepare ns/both uid-both"}; !slices.Equal(logOf(t, dir, "b.example.com"), want) {
		t.Errorf("driver b was asked %q", logOf(t, dir, "b.example.com"))
	}
	if files, err := os.ReadDir(state); err != nil || len(files) > 0 {
		t.Errorf("left are %v, %v", files, err)
	}
}

// The error for a claim that is missing, not allocated or not reserved for the pod names the claim,
// and no driver is called.
func TestPrepareRefuses(t *testing.T) {
	dir, template := short(t), "t"
	for want, change := range map[string]func(p *v1.Pod, c *resourcev1.ResourceClaim){
		`resourceclaim "c" not found`: func(_ *v1.Pod, c *resourcev1.ResourceClaim) { c.Namespace = "other" },
		`resourceclaim "c" has no devices yet`: func(_ *v1.Pod, c *resourcev1.ResourceClaim) {
			c.Status.Allocation = nil
		},
		`resourceclaim "c" is not reserved`: func(_ *v1.Pod, c *resourcev1.ResourceClaim) {
			c.Status.ReservedFor[0].UID = "x"
		},
		`registered DRA drivers: a.example.com`: func(*v1.Pod, *resourcev1.ResourceClaim) {},
		`ResourceClaim not created yet`: func(p *v1.Pod, _ *resourcev1.ResourceClaim) {
			p.Spec.ResourceClaims[0] = v1.PodResourceClaim{Name: "c", ResourceClaimTemplateName: &template}
		},
		`was not created for Pod ns/p (Pod is not ow`: func(p *v1.Pod, c *resourcev1.ResourceClaim) {
			p.Spec.ResourceClaims[0] = v1.PodResourceClaim{Name: "c", ResourceClaimTemplateName: &template}
			p.Status.ResourceClaimStatuses = []v1.PodResourceClaimStatus{{Name: "c", ResourceClaimName: &c.Name}}
		},
	} {
		cluster := fake.NewCluster()
		d := New(Config{Registration: dir, State: t.TempDir(), Objects: cluster})
		c := claimOf("c", "a.example.com")
		p := podOf("p", c)
		change(p, c)
		cluster.Put(c)
		if _, err := d.Prepare(t.Context(), p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
}

// A driver that returns nothing, too much or garbage, or does not respond, only prevents the pods
// of its claims from starting.
func TestHostileDrivers(t *testing.T) {
	for mode, want := range map[string]string{
		"silent": "the response does not contain the claim", "refuses": "NodePrepareResources: no no ",
		"floods": "200 devices: 128 at most",
		"huge":   "received message larger than max", "path": `"../../etc/shadow" is not a CDI device name`,
		"old":   "registered DRA drivers: a.example.com",
		"hangs": "DeadlineExceeded",
	} {
		t.Run(mode, func(t *testing.T) {
			dir, cluster := short(t), fake.NewCluster()
			spawn(t, dir, "a.example.com", mode)
			d := New(Config{Registration: dir, State: t.TempDir(), Objects: cluster})
			c := claimOf("c", "a.example.com")
			p := podOf("p", c)
			cluster.Put(c)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if mode == "hangs" {
				d.folder.Scan(ctx) // the time until it is found does not count toward its response
				ctx, cancel = context.WithTimeout(ctx, time.Second)
				defer cancel()
			}
			_, err := d.Prepare(ctx, p)
			if err == nil || !strings.Contains(err.Error(), want) || len(err.Error()) > 1000 {
				t.Errorf("%v, want %s", err, want)
			}
			if mode == "old" {
				b, _ := os.ReadFile(filepath.Join(dir, "a.example.com.log"))
				if !strings.Contains(string(b), "registered false DRA driver a.example.com supports versions "+
					"[\"v1beta1.DRAPlugin\"], and v1.DRAPlugin is required") {
					t.Errorf("the driver was told %s", b)
				}
				return
			}
			if err := d.Release(t.Context(), p); err != nil { // the devices that it may have prepared are unprepared
				t.Error(err)
			}
			if log := logOf(t, dir, "a.example.com"); !slices.Contains(log, "unprepare ns/c uid-c") {
				t.Errorf("the driver was asked %q", log)
			}
		})
	}
}

// While a driver fails to unprepare a device, the pod is not released.
func TestReleaseFails(t *testing.T) {
	dir, cluster := short(t), fake.NewCluster()
	stop := spawn(t, dir, "a.example.com", "keeps")
	d := New(Config{Registration: dir, State: t.TempDir(), Objects: cluster})
	c := claimOf("c", "a.example.com")
	p := podOf("p", c)
	cluster.Put(c)
	if _, err := d.Prepare(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if err := d.Release(t.Context(), p); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("%v", err)
	}
	stop()
	spawn(t, dir, "a.example.com", "")
	d.folder.Scan(t.Context())
	if err := d.Release(t.Context(), p); err != nil {
		t.Error(err)
	}
	if pods, err := d.Pods(); err != nil || len(pods) > 0 {
		t.Errorf("pods %v, %v", pods, err)
	}
}

// A damaged record blocks the pods that it may concern. Their error names the file and the remedy,
// and the log contains it once. Other pods start and end, also after a restart of the agent. After
// the file is removed, the blocked pods end too.
func TestDamagedRecord(t *testing.T) {
	for name, content := range map[string]string{
		"empty": "", "cut": `{"version":1,"uid":"uid-bad","na`, "of another version": `{"version":7,"uid":"uid-bad"}`,
		"of another claim": `{"version":1,"uid":"uid-good"}`,
		"huge":             `{"version":1,"uid":"uid-bad","name":"` + strings.Repeat("x", maxRecord) + `"}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir, state, cluster := short(t), t.TempDir(), fake.NewCluster()
			spawn(t, dir, "a.example.com", "")
			bad, good := claimOf("bad", "a.example.com"), claimOf("good", "a.example.com")
			held, free, none := podOf("held", bad), podOf("free", good), podOf("none")
			for _, p := range []*v1.Pod{held, free, none} {
				p.Spec.Containers = []v1.Container{{Name: "c"}}
			}
			cluster.Put(bad, good)
			ctx := t.Context()
			d := New(Config{Registration: dir, State: state, Objects: cluster})
			for _, p := range []*v1.Pod{held, free} {
				if _, err := d.Prepare(ctx, p); err != nil {
					t.Fatal(err)
				}
			}
			file := filepath.Join(state, "uid-bad.json")
			if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
			var log bytes.Buffer
			d = New(Config{Registration: dir, State: state, Objects: cluster,
				Log: slog.New(slog.NewTextHandler(&log, nil))})
			if pods, err := d.Pods(); err != nil || !slices.Equal(pods, []types.UID{"pod-free"}) {
				t.Errorf("pods %v, %v", pods, err)
			}
			if err := errors.Join(d.Release(ctx, free), d.Release(ctx, none)); err != nil {
				t.Errorf("pods without a part in it: %v", err)
			}
			_, again := d.Prepare(ctx, held)
			gone := &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: held.UID}} // a pod of which only the UID is known
			for _, err := range []error{again, d.Release(ctx, held), d.Release(ctx, gone)} {
				if !errors.Is(err, agent.ErrDamagedRecord) || !strings.Contains(err.Error(), file) ||
					!strings.Contains(err.Error(), "then remove the file") || len(err.Error()) > 1000 {
					t.Errorf("a pod that it may be about: %v", err)
				}
			}
			if n := strings.Count(log.String(), file); n != 1 {
				t.Errorf("the log tells %d times: %s", n, log.String())
			}
			if err := os.Remove(file); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(d.Release(ctx, held), d.Release(ctx, gone)); err != nil {
				t.Errorf("without the file: %v", err)
			}
		})
	}
}
