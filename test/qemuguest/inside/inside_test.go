//go:build guest

package inside

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"

	"keelson.dev/keelson/agent/volume/nfs/nfstest"
	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/internal/memory"
	"keelson.dev/keelson/internal/wait"
)

const (
	programs   = "/opt/keelson"
	kubeconfig = "/tmp/kubeconfig"
	soon       = 6 * time.Minute // qemu is slow, and the machine below it may be busy
)

// labOutput writes the lab's output to a test's log.
type labOutput struct{ t *testing.T }

func (w labOutput) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

func createLab(t *testing.T, change func(*lab.Config)) *lab.Lab {
	t.Helper()
	cfg := lab.Config{ControlPlanes: 1, Workers: 1, Listen: "127.0.0.1:6443", BinDir: programs,
		CNIBinDir: filepath.Join(programs, "cni"), ImageDir: filepath.Join(programs, "images"), CPU: "2",
		Memory:          "512Mi",
		EvictionSeconds: 5, Kubeconfig: kubeconfig}
	change(&cfg)
	l, err := lab.New(cfg, labOutput{t})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := l.Up(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, h := range l.Config.Hosts {
				raw, _ := os.ReadFile(h.LogFile())
				t.Logf("%s said: %s", h.Name, raw[max(0, len(raw)-8<<10):])
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := l.Down(ctx); err != nil {
			t.Error(err)
		}
		if left := lab.ListLeftovers(); len(left) > 0 {
			t.Errorf("the deleted lab left behind: %v", left)
		}
	})
	return l
}

// newPod returns a pod with one container, with requests and limits such as "cpu 100m memory 64Mi".
func newPod(name, requests, limits string, command ...string) *v1.Pod {
	list := func(text string) v1.ResourceList {
		out := v1.ResourceList{}
		for f := strings.Fields(text); len(f) > 1; f = f[2:] {
			out[v1.ResourceName(f[0])] = resource.MustParse(f[1])
		}
		return out
	}
	now := int64(0)
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PodSpec{
		RestartPolicy: v1.RestartPolicyNever, TerminationGracePeriodSeconds: &now,
		Containers: []v1.Container{{Name: "app", Image: "keelson.dev/tools:v1", Command: command,
			Resources: v1.ResourceRequirements{Requests: list(requests), Limits: list(limits)}}}}}
}

func newClient(t *testing.T) *typed.CoreV1Client {
	t.Helper()
	cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	c, err := typed.NewForConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestOneWorker checks the order of kills when memory runs out, the resources of the tiers, volumes
// with quotas (F104, F110), and folders of file servers.
func TestOneWorker(t *testing.T) {
	l := createLab(t, func(*lab.Config) {})
	var f *nfsServer // deleting its pod takes most of a minute
	if os.Getenv(nfstest.Needed) != "" {
		f = startNFSServer(t, l)
	}
	t.Run("FoldersOfAServer", f.checkFolders)
	t.Run("WhoIsEndedFirst", func(t *testing.T) { checkKillOrder(t, l) })
	t.Run("TheServerHangs", f.awaitPodDeleted)
}

// checkKillOrder: without free memory a daemon is killed after every pod, and pods in the order of
// their QoS classes; a container that exceeds its limit is killed as a whole. The tiers have the
// node's allocatable resources. On the same node a pod with a volume of "backing: directory" writes
// as much as it requested and not more.
func checkKillOrder(t *testing.T, l *lab.Lab) {
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	pods := newClient(t).Pods("default")
	for _, p := range []*v1.Pod{
		newPod("besteffort", "", "", "sleep", "1000"),
		newPod("burstable", "cpu 100m memory 128Mi", "", "sleep", "1000"),
		newPod("guaranteed", "", "cpu 100m memory 64Mi", "sleep", "1000"),
		newPod("hog", "", "memory 32Mi", "sh", "-c", "tail /dev/zero & wait $!; echo survived; exec sleep 1000"),
	} {
		// On a machine as slow as this one, requests miss the server's deadlines for
		// unauthenticated clients.
		if err := wait.For(ctx, 250*time.Millisecond, func() error {
			_, err := pods.Create(ctx, p, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				return nil
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	list := map[string]v1.Pod{}
	var missing error // error of the last list
	err := wait.For(ctx, time.Second, func() error {
		all, err := pods.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		missing = nil
		for _, p := range all.Items {
			list[p.Name] = p
			want := v1.PodRunning
			if p.Name == "hog" {
				want = v1.PodFailed
			}
			if p.Status.Phase != want {
				missing = errors.Join(missing, fmt.Errorf("%s is %s: %v", p.Name, p.Status.Phase,
					p.Status.ContainerStatuses))
			}
		}
		return missing
	})
	if err != nil {
		t.Fatal(err, missing)
	}
	end := list["hog"].Status.ContainerStatuses[0].State.Terminated
	if end == nil || end.Reason != "OOMKilled" || end.ExitCode != 137 {
		t.Errorf("the hog ended with %v", end)
	}
	for name, want := range map[string]int{"besteffort": 1000, "burstable": 750, "guaranteed": -997} {
		expectScore(t, "a process of "+name, want, processesBelow(t, "kubepods", string(list[name].UID)))
	}
	expectScore(t, "a shim or pause", -998, processesBelow(t, "shims", ""))
	for _, h := range l.Status(t.Context()) {
		if h.Role != lab.RoleRegistry {
			expectScore(t, "the daemon of "+h.Name, memory.DaemonOOMScore, []int{h.PID})
		}
	}
	for file, want := range map[string]string{"cpu.weight": "1600", "cp1/cpu.weight": "400",
		"cp1/system/cpu.weight": "400", "w1/system/cpu.weight": "400",
		"w1/kubepods/memory.max": strconv.Itoa(512 << 20), "w1/kubepods/besteffort/cpu.weight": "1"} {
		got, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/keelson-lab", file))
		if err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("%s is %q, want %s (%v)", file, got, want, err)
		}
	}
	checkProjectQuota(t, l)
}

// processesBelow returns the PIDs below a cgroup of the worker, in cgroups with paths that contain
// a text.
func processesBelow(t *testing.T, group, of string) (pids []int) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join("/sys/fs/cgroup/keelson-lab/w1", group),
		func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // of the hog, which is being taken away
			}
			if err != nil || !d.IsDir() || !strings.Contains(path, of) {
				return err
			}
			raw, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
				return nil
			}
			for _, f := range strings.Fields(string(raw)) {
				pid, aerr := strconv.Atoi(f)
				pids, err = append(pids, pid), errors.Join(err, aerr)
			}
			return err
		})
	if err != nil || len(pids) == 0 {
		t.Errorf("processes of %s %s: %v, %v", group, of, pids, err)
	}
	return pids
}

func expectScore(t *testing.T, what string, want int, pids []int) {
	t.Helper()
	for _, pid := range pids {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // it has ended meanwhile, as the hog's shim does
		}
		if got := strings.TrimSpace(string(raw)); err != nil || got != strconv.Itoa(want) {
			t.Errorf("%s has oom_score_adj %s, want %d (%v)", what, got, want, err)
		}
	}
}
