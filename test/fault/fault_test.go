// Package fault injects faults into a real cluster in the lab and checks its guarantees: no
// acknowledged write is lost, pods outlive their daemons, and traffic outlives the control plane.
package fault

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/testenv"
)

// At the end everything of the lab is killed at once: taking it down must leave nothing behind all the same.
func TestMain(m *testing.M) { os.Exit(testenv.Main(m, killEverything)) }

func killEverything() error {
	killed, err := testenv.KillEverything()
	if err == nil && killed == 0 {
		err = errors.New("nothing of the lab was found to kill")
	}
	if err == nil {
		fmt.Printf("killed all %d processes of the lab\n", killed)
	}
	return err
}

const soon = 3 * time.Minute // for a machine that is three times slower and does other work

func runKctl(t *testing.T, args ...string) (string, error) {
	return testenv.Try(t, filepath.Join(testenv.Lab().Config.BinDir, "kctl"), args...)
}

// leaderAndOthers returns the name of the leader and those of the other replicas.
func leaderAndOthers(t *testing.T) (string, []string) {
	t.Helper()
	return testenv.Leader(t, soon)
}

func awaitReplicas(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		var errs []error
		for _, s := range testenv.Lab().Status(context.Background()) {
			if s.Role == lab.RoleControlPlane && s.Ready != "yes" {
				errs = append(errs, fmt.Errorf("replica %s: %s", s.Name, s.Ready))
			}
		}
		return errors.Join(errs...)
	})
}

func awaitNodes(t *testing.T, cs kubernetes.Interface, want map[string]v1.ConditionStatus) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		l, err := cs.CoreV1().Nodes().List(context.Background(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range l.Items {
			for _, c := range n.Status.Conditions {
				if w, asked := want[n.Name]; asked && c.Type == v1.NodeReady &&
					(c.Status == v1.ConditionTrue) != (w == v1.ConditionTrue) {
					return fmt.Errorf("node %s is Ready=%s, want %s", n.Name, c.Status, w)
				}
			}
		}
		return nil
	})
}

type acknowledgedWrite struct {
	name string
	at   time.Time
}

// F48 F53 F54: kill -9 the leader during a stream of creates through a surviving
// replica: no call fails, nothing acknowledged is lost, and the pause is short.
func TestLeaderKilledUnderCreates(t *testing.T) {
	ns := testenv.Namespace(t)
	victim, others := leaderAndOthers(t)
	cs := testenv.ClientAt(t, others[0])
	ctx, stop := context.WithCancel(context.Background())
	var mu sync.Mutex
	var acked []acknowledgedWrite
	var failed []error
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				name := fmt.Sprintf("c-%d-%d", w, i)
				call, cancel := context.WithTimeout(context.Background(), 30*time.Second)
				_, err := cs.CoreV1().ConfigMaps(ns).Create(call,
					&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
				cancel()
				mu.Lock()
				if err != nil {
					failed = append(failed, fmt.Errorf("%s: %w", name, err))
				} else {
					acked = append(acked, acknowledgedWrite{name, time.Now()})
				}
				mu.Unlock()
			}
		})
	}
	count := func() int { mu.Lock(); defer mu.Unlock(); return len(acked) }
	testenv.Eventually(t, soon, func() error {
		if n := count(); n < 200 {
			return fmt.Errorf("%d creates", n)
		}
		return nil
	})
	killedAt := time.Now()
	if err := testenv.Lab().KillDaemon(context.Background(), victim); err != nil {
		t.Fatal(err)
	}
	before := count()
	testenv.Eventually(t, soon, func() error {
		if n := count(); n < before+200 {
			return fmt.Errorf("%d creates after the kill", n-before)
		}
		return nil
	})
	stop()
	wg.Wait()
	if len(failed) > 0 {
		t.Errorf("%d calls failed; first: %v", len(failed), failed[0])
	}
	gap := longestGap(acked, killedAt)
	t.Logf("%d creates acknowledged, leader %s killed, no create for %s", len(acked), victim,
		gap.Round(time.Millisecond))
	// The requirement is 1.5 s, which the benchmark measures. A client that waits for the dead
	// leader until a connection or a call times out takes much longer than this limit, also on a
	// slow machine.
	if gap > 15*time.Second {
		t.Errorf("writes stood still for %s", gap)
	}
	if err := testenv.Lab().Restart(context.Background(), victim); err != nil {
		t.Fatal(err)
	}
	awaitReplicas(t)
	for _, replica := range append(others, victim) {
		requireWrites(t, testenv.ClientAt(t, replica), ns, acked, replica)
	}
}

func longestGap(acked []acknowledgedWrite, from time.Time) time.Duration {
	slices.SortFunc(acked, func(a, b acknowledgedWrite) int { return a.at.Compare(b.at) })
	var gap time.Duration
	last := from
	for _, a := range acked {
		if a.at.After(from) {
			gap = max(gap, a.at.Sub(last))
			last = a.at
		}
	}
	return gap
}

func requireWrites(t *testing.T, cs kubernetes.Interface, ns string, acked []acknowledgedWrite, replica string) {
	t.Helper()
	l, err := cs.CoreV1().ConfigMaps(ns).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatalf("listing at %s: %v", replica, err)
	}
	have := map[string]bool{}
	for _, c := range l.Items {
		have[c.Name] = true
	}
	for _, a := range acked {
		if !have[a.name] {
			t.Errorf("replica %s lost %s, which was acknowledged", replica, a.name)
		}
	}
}

// A cluster with repeated elections reports it in its status, with advice. (The next test restarts
// all replicas, which resets their counts.)
func TestElectionsWithoutEndAreToldOf(t *testing.T) {
	awaitVoters(t)
	for range 10 {
		testenv.Eventually(t, soon, func() error { // the target of the transfer may lag behind briefly
			out, err := runKctl(t, "cluster", "step-down")
			if err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
			return nil
		})
	}
	testenv.Eventually(t, soon, func() error {
		s, err := clusterStatus(t)
		if err != nil {
			return err
		}
		for _, a := range s.Alarms {
			if a.Kind == "elections" && strings.Contains(a.Message, "leaders in the last 10 minutes") &&
				strings.Contains(a.Remedy, "--heartbeat-timeout") {
				return nil
			}
		}
		return fmt.Errorf("ten leaders one after the other, and the alarms are %+v", s.Alarms)
	})
	if out := testenv.Kctl(t, "cluster", "status"); !strings.Contains(out, "leaders in the last 10 minutes") {
		t.Errorf("a person reads nothing of it:\n%s", out)
	}
}

// F48 F52: kill -9 of all replicas at once and restart: nothing acknowledged is lost.
func TestAllReplicasKilled(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.Client(t)
	var acked []acknowledgedWrite
	for i := range 100 {
		name := fmt.Sprintf("c-%d", i)
		if _, err := cs.CoreV1().ConfigMaps(ns).Create(context.Background(),
			&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		acked = append(acked, acknowledgedWrite{name, time.Now()})
	}
	forEachReplica(t, testenv.Lab().KillDaemon)
	forEachReplica(t, testenv.Lab().Restart)
	awaitReplicas(t)
	requireWrites(t, testenv.Client(t), ns, acked, "any")
}

func forEachReplica(t *testing.T, do func(context.Context, string) error) {
	t.Helper()
	var wg sync.WaitGroup
	for _, h := range testenv.Lab().Config.Hosts {
		if h.Role == lab.RoleControlPlane {
			wg.Go(func() {
				if err := do(context.Background(), h.Name); err != nil {
					t.Error(err)
				}
			})
		}
	}
	wg.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

func sleeperPod(name, node string, command ...string) *v1.Pod {
	if len(command) == 0 {
		command = []string{"sleep", "1000000"}
	}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec: v1.PodSpec{
			NodeName: node, TerminationGracePeriodSeconds: new(int64(0)),
			Containers: []v1.Container{{Name: "main", Image: "keelson.dev/tools:v1", Command: command}},
		},
	}
}

func awaitPod(t *testing.T, cs kubernetes.Interface, ns, name string, cond func(*v1.Pod) error) *v1.Pod {
	t.Helper()
	var last *v1.Pod
	testenv.Eventually(t, soon, func() error {
		p, err := cs.CoreV1().Pods(ns).Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		last = p
		return cond(p)
	})
	return last
}

func requireRunning(p *v1.Pod) error {
	if p.Status.Phase != v1.PodRunning || len(p.Status.ContainerStatuses) != 1 || !p.Status.ContainerStatuses[0].Ready {
		return fmt.Errorf("pod %s: %s %+v", p.Name, p.Status.Phase, p.Status.ContainerStatuses)
	}
	return nil
}

func createPod(t *testing.T, cs kubernetes.Interface, ns string, p *v1.Pod) {
	t.Helper()
	if _, err := cs.CoreV1().Pods(ns).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// P9 F125: kill -9 of an agent touches no container, and the exit code of one
// that ended meanwhile is reported.
func TestAgentKilled(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.Client(t)
	createPod(t, cs, ns, sleeperPod("stays", "w1"))
	ends := sleeperPod("ends", "w1", "sh", "-c", "while [ ! -f /flag/go ]; do sleep 0.05; done; exit 42")
	ends.Spec.RestartPolicy = v1.RestartPolicyNever
	ends.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "flag", MountPath: "/flag"}}
	ends.Spec.Volumes = []v1.Volume{{Name: "flag",
		VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/run/flag-" + ns,
			Type: new(v1.HostPathDirectoryOrCreate)}}}}
	createPod(t, cs, ns, ends)
	stays := awaitPod(t, cs, ns, "stays", requireRunning)
	awaitPod(t, cs, ns, "ends", requireRunning)
	if err := testenv.Lab().KillDaemon(context.Background(), "w1"); err != nil {
		t.Fatal(err)
	}
	w1 := testenv.Host(t, "w1")
	if out, err := w1.Command(context.Background(), "touch", "/run/flag-"+ns+"/go").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	testenv.Eventually(t, soon, func() error { // the container has ended before the agent is back
		out, _ := w1.Command(context.Background(), "sh", "-c",
			"grep -ls flag/[g]o /proc/[0-9]*/cmdline | xargs -r cat | tr '\\0' ' '").Output()
		if strings.Contains(string(out), "exit 42") {
			return fmt.Errorf("still running: %s", out)
		}
		return nil
	})
	if err := testenv.Lab().Restart(context.Background(), "w1"); err != nil {
		t.Fatal(err)
	}
	got := awaitPod(t, cs, ns, "ends", func(p *v1.Pod) error {
		if p.Status.Phase != v1.PodFailed {
			return fmt.Errorf("phase %s", p.Status.Phase)
		}
		return nil
	})
	if end := got.Status.ContainerStatuses[0].State.Terminated; end == nil || end.ExitCode != 42 {
		t.Errorf("ended as %+v, want exit code 42", end)
	}
	awaitNodes(t, cs, map[string]v1.ConditionStatus{"w1": v1.ConditionTrue})
	after := awaitPod(t, cs, ns, "stays", requireRunning)
	was, is := stays.Status.ContainerStatuses[0], after.Status.ContainerStatuses[0]
	if is.RestartCount != 0 || is.ContainerID != was.ContainerID || after.Status.PodIP != stays.Status.PodIP {
		t.Errorf("the pod that stays changed: restarts %d, container %s to %s, address %s to %s",
			is.RestartCount, was.ContainerID, is.ContainerID, stays.Status.PodIP, after.Status.PodIP)
	}
	if out, err := runKctl(t, "-n", ns, "exec", "stays", "--", "echo", "alive"); err != nil ||
		!strings.Contains(out, "alive") {
		t.Errorf("exec after the agent's restart: %v %s", err, out)
	}
}

// P4 P7: a partitioned worker becomes NotReady, its pods are replaced elsewhere,
// and after healing there is no duplicate.
func TestWorkerPartitioned(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.Client(t)
	manifest := filepath.Join(t.TempDir(), "d.yaml")
	if err := os.WriteFile(manifest, []byte(deployment), 0o600); err != nil {
		t.Fatal(err)
	}
	testenv.Kctl(t, "-n", ns, "apply", "-f", manifest)
	testenv.Kctl(t, "-n", ns, "rollout", "status", "deployment/web", "--timeout=180s")
	testenv.Kctl(t, "cordon", "w1")
	testenv.Kctl(t, "cordon", "w2")
	testenv.Kctl(t, "-n", ns, "rollout", "restart", "deployment/web") // all on w3
	testenv.Kctl(t, "-n", ns, "rollout", "status", "deployment/web", "--timeout=180s")
	testenv.Kctl(t, "uncordon", "w1")
	testenv.Kctl(t, "uncordon", "w2")
	began := time.Now()
	if err := testenv.Lab().Partition("w3"); err != nil {
		t.Fatal(err)
	}
	healed := false
	defer func() {
		if !healed {
			_ = testenv.Lab().Heal("w3")
		}
	}()
	awaitNodes(t, cs, map[string]v1.ConditionStatus{"w3": v1.ConditionUnknown})
	t.Logf("NotReady after %s", time.Since(began).Round(10*time.Millisecond))
	testenv.Eventually(t, soon, func() error { return requirePodsOn(cs, ns, "w3", 0, 2) })
	t.Logf("replaced after %s", time.Since(began).Round(10*time.Millisecond))
	if err := testenv.Lab().Heal("w3"); err != nil {
		t.Fatal(err)
	}
	healed = true
	awaitNodes(t, cs, map[string]v1.ConditionStatus{"w3": v1.ConditionTrue})
	testenv.Eventually(t, soon, func() error {
		l, err := cs.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{LabelSelector: "app=web"})
		if err == nil && len(l.Items) != 2 {
			err = fmt.Errorf("%d pods after healing, want 2", len(l.Items))
		}
		return err
	})
	// Nothing of the replaced pods still runs on w3.
	w3 := testenv.Host(t, "w3")
	testenv.Eventually(t, soon, func() error {
		out, _ := w3.Command(context.Background(), "sh", "-c", "ls /run/keelson/netns 2>/dev/null | wc -l").Output()
		l, err := cs.CoreV1().Pods("").List(context.Background(), metav1.ListOptions{FieldSelector: "spec.nodeName=w3"})
		if err != nil {
			return err
		}
		if n := strings.TrimSpace(string(out)); n != fmt.Sprint(len(l.Items)) {
			return fmt.Errorf("%s sandboxes on w3, %d pods are assigned to it", n, len(l.Items))
		}
		return nil
	})
}

func requirePodsOn(cs kubernetes.Interface, ns, node string, there, elsewhere int) error {
	l, err := cs.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{LabelSelector: "app=web"})
	if err != nil {
		return err
	}
	var on, off int
	for _, p := range l.Items {
		switch {
		case p.DeletionTimestamp != nil:
		case p.Spec.NodeName == node:
			on++
		case requireRunning(&p) == nil:
			off++
		}
	}
	if on != there || off != elsewhere {
		return fmt.Errorf("%d pods on %s and %d running elsewhere, want %d and %d", on, node, off, there, elsewhere)
	}
	return nil
}

const deployment = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - {name: main, image: "keelson.dev/hello:v1", ports: [{containerPort: 8080}], readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1, timeoutSeconds: 10}}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`

// F94 F122: with every control plane stopped, Service traffic continues and a container that exits
// is restarted.
func TestControlPlaneGone(t *testing.T) {
	ns := testenv.Namespace(t)
	cs := testenv.Client(t)
	manifest := filepath.Join(t.TempDir(), "d.yaml")
	if err := os.WriteFile(manifest, []byte(deployment), 0o600); err != nil {
		t.Fatal(err)
	}
	testenv.Kctl(t, "-n", ns, "apply", "-f", manifest)
	testenv.Kctl(t, "-n", ns, "rollout", "status", "deployment/web", "--timeout=180s")
	again := sleeperPod("again", "w1", "sh", "-c",
		"echo up >> /flag/starts; while [ ! -f /flag/go ]; do sleep 0.05; done; rm /flag/go; exit 1")
	again.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "flag", MountPath: "/flag"}}
	folder := "/run/again-" + ns
	again.Spec.Volumes = []v1.Volume{{Name: "flag",
		VolumeSource: v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: folder,
			Type: new(v1.HostPathDirectoryOrCreate)}}}}
	createPod(t, cs, ns, again)
	awaitPod(t, cs, ns, "again", requireRunning)
	svc, err := cs.CoreV1().Services(ns).Get(context.Background(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	w1 := testenv.Host(t, "w1")
	web := testenv.PatientHTTP(w1)
	url := "http://" + net.JoinHostPort(svc.Spec.ClusterIP, "80") + "/"
	get := func() error { return fetchPage(web, url) }
	testenv.Eventually(t, soon, get)
	forEachReplica(t, testenv.Lab().Stop)
	defer func() {
		forEachReplica(t, testenv.Lab().Restart)
		awaitReplicas(t)
		awaitPod(t, cs, ns, "again", func(p *v1.Pod) error {
			if err := requireRunning(p); err != nil {
				return err
			}
			if n := p.Status.ContainerStatuses[0].RestartCount; n != 1 {
				return fmt.Errorf("restart count %d, want 1", n)
			}
			return nil
		})
	}()
	for range 200 {
		if err := get(); err != nil {
			t.Fatalf("Service traffic without a control plane: %v", err)
		}
	}
	if out, err := w1.Command(context.Background(), "touch", folder+"/go").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	testenv.Eventually(t, soon, func() error {
		out, err := w1.Command(context.Background(), "cat", folder+"/starts").Output()
		if err == nil && strings.Count(string(out), "up") != 2 {
			err = fmt.Errorf("started %d times, want 2", strings.Count(string(out), "up"))
		}
		return err
	})
}

// fetchPage fetches a page.
func fetchPage(web *http.Client, url string) error {
	resp, err := web.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}
