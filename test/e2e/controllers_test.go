package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

// line runs the stock kubectl, where the machine has one, in the test's namespace.
func (w world) line(args ...string) string {
	w.Helper()
	path := filepath.Join(testenv.Lab().Config.BinDir, "kctl")
	if stock := testenv.StockKubectl(); len(stock) > 0 {
		path = stock[0]
	}
	return testenv.Must(w, path, append([]string{"-n", w.ns}, args...)...)
}

// applyFile applies a file of testdata with words replaced, and wants each object to be created without a warning.
func (w world) applyFile(name string, replace ...string) {
	w.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		w.Fatal(err)
	}
	file := filepath.Join(w.TempDir(), name)
	if err := os.WriteFile(file, []byte(strings.NewReplacer(replace...).Replace(string(data))), 0o600); err != nil {
		w.Fatal(err)
	}
	for line := range strings.Lines(w.line("apply", "-f", file)) {
		if !strings.HasSuffix(strings.TrimSpace(line), " created") {
			w.Errorf("applying %s says: %s", name, line)
		}
	}
}

// wants fails the test when a text lacks one of the parts.
func (w world) wants(out string, parts ...string) {
	w.Helper()
	for _, p := range parts {
		if !strings.Contains(out, p) {
			w.Errorf("%q is missing in:\n%s", p, out)
		}
	}
}

// eventually waits until a line of kubectl prints what is wanted.
func (w world) eventually(want string, args ...string) {
	w.Helper()
	testenv.Eventually(w, soon, func() error {
		if got := strings.TrimSpace(w.line(args...)); got != want {
			return fmt.Errorf("kubectl %s: %q, want %q", strings.Join(args, " "), got, want)
		}
		return nil
	})
}

// arrivals notes in which order pods come and become ready: "+db-0 ready:db-0". The returned function waits until one is
// ready, of which the watch may hear later than others do, and says what was noted until then.
func (w world) arrivals(app string) func(last string) string {
	w.Helper()
	seen, err := w.cs.CoreV1().Pods(w.ns).Watch(context.Background(), metav1.ListOptions{LabelSelector: "app=" + app})
	if err != nil {
		w.Fatal(err)
	}
	var mu sync.Mutex
	var out []string
	done := make(chan struct{})
	go func() {
		defer close(done)
		was := map[types.UID]bool{}
		for ev := range seen.ResultChan() {
			p, ok := ev.Object.(*v1.Pod)
			if !ok {
				continue
			}
			mu.Lock()
			if ev.Type == "ADDED" {
				out = append(out, "+"+p.Name)
			}
			if ready(p) && !was[p.UID] {
				was[p.UID] = true
				out = append(out, "ready:"+p.Name)
			}
			mu.Unlock()
		}
	}()
	return func(last string) string {
		w.Helper()
		testenv.Eventually(w, soon, func() error {
			mu.Lock()
			defer mu.Unlock()
			if !slices.Contains(out, "ready:"+last) {
				return fmt.Errorf("the watch of %s has not heard of it: %v", last, out)
			}
			return nil
		})
		seen.Stop()
		<-done
		return strings.Join(out, " ")
	}
}

// volumes makes so many volumes of a class, on workers one after the other.
func (w world) volumes(class string, n int) {
	w.Helper()
	for i := range n {
		name := fmt.Sprintf("%s-%d", class, i)
		pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeSpec{
			Capacity:    v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")},
			AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}, PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimRetain,
			StorageClassName:       class,
			PersistentVolumeSource: v1.PersistentVolumeSource{CSI: &v1.CSIPersistentVolumeSource{Driver: "local.csi.keelson.dev", VolumeHandle: name}},
			NodeAffinity: &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
				MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn, Values: []string{fmt.Sprintf("w%d", i%3+1)}}},
			}}}},
		}}
		if _, err := w.cs.CoreV1().PersistentVolumes().Create(context.Background(), pv, metav1.CreateOptions{}); err != nil {
			w.Fatal(err)
		}
		w.Cleanup(func() {
			err := w.cs.CoreV1().PersistentVolumes().Delete(context.Background(), name, metav1.DeleteOptions{})
			if err != nil && !apierrors.IsNotFound(err) {
				w.Errorf("deleting volume %s: %v", name, err)
			}
		})
	}
}

// F14: a StatefulSet gives its pods names, order, claims and addresses of their own, which they keep; it scales, rolls
// out down to the partition and back.
func TestStatefulSet(t *testing.T) {
	w := begin(t)
	w.volumes(w.ns, 3)
	came := w.arrivals("db")
	w.applyFile("stateful.yaml", "CLASS", w.ns)
	w.wants(w.line("rollout", "status", "statefulset/db", "--timeout=180s"), "partitioned roll out complete: 2 new pods have been updated")
	w.line("scale", "statefulset/db", "--replicas=3")
	w.line("rollout", "status", "statefulset/db", "--timeout=180s")
	if got, want := came("db-2"), "+db-0 ready:db-0 +db-1 ready:db-1 +db-2 ready:db-2"; got != want {
		t.Errorf("pods came as %s, want %s", got, want)
	}
	// What the headless Service's names are made of.
	first := `jsonpath={range .items[*].endpoints[?(@.hostname=="db-0")]}{.hostname}={.addresses[0]}{end}`
	w.eventually("db-0="+w.pod("db-0").Status.PodIP, "get", "endpointslices", "-l", "kubernetes.io/service-name=db", "-o", first)

	// Its identity outlives a pod: name, claim and what is on it, the address by its new name.
	before := w.pod("db-0")
	w.line("delete", "pod", "db-0")
	w.waitPod("db-0", func(p *v1.Pod) error {
		if p.UID == before.UID {
			return errors.New("the old pod is there")
		}
		return isReady(p)
	})
	w.within("db-0", "db-0 db-0", "cat /data/log")
	w.eventually("db-0="+w.pod("db-0").Status.PodIP, "get", "endpointslices", "-l", "kubernetes.io/service-name=db", "-o", first)

	// An update stops at the partition, and goes on when it is taken away.
	version := []string{"get", "pods", "-l", "app=db", "-o", "jsonpath={range .items[*]}{.metadata.name}={.spec.containers[0].env[0].value} {end}"}
	w.line("patch", "statefulset/db", "-p", `{"spec":{"updateStrategy":{"rollingUpdate":{"partition":2}}}}`)
	w.line("set", "env", "statefulset/db", "VERSION=2")
	w.wants(w.line("rollout", "status", "statefulset/db", "--timeout=180s"), "partitioned roll out complete: 1 new pods have been updated")
	w.eventually("db-0=1 db-1=1 db-2=2", version...)
	w.line("patch", "statefulset/db", "-p", `{"spec":{"updateStrategy":{"rollingUpdate":{"partition":0}}}}`)
	w.line("rollout", "status", "statefulset/db", "--timeout=180s")
	w.eventually("db-0=2 db-1=2 db-2=2", version...)
	w.wants(w.line("rollout", "history", "statefulset/db"), "REVISION", "1 ", "2 ")
	w.wants(w.line("rollout", "history", "statefulset/db", "--revision=1"), "VERSION:\t1")
	w.line("rollout", "undo", "statefulset/db")
	w.line("rollout", "status", "statefulset/db", "--timeout=180s")
	w.eventually("db-0=1 db-1=1 db-2=1", version...)

	// The highest goes first; its claim stays.
	w.line("scale", "statefulset/db", "--replicas=1")
	w.eventually("db-0=1", version...)
	w.wants(w.line("get", "pvc"), "data-db-0", "data-db-1", "data-db-2", "Bound")
	w.eventually("1/1", "get", "statefulset", "db", "-o", "jsonpath={.status.readyReplicas}/{.spec.replicas}")
	w.wants(w.line("get", "statefulset"), "db     1/1")
}

// on says on which nodes the living pods of an app run, with a value of their first variable.
func (w world) on(app string) map[string]string {
	w.Helper()
	out := map[string]string{}
	for _, p := range w.pods(app) {
		version := "-"
		if env := p.Spec.Containers[0].Env; len(env) > 0 {
			version = env[0].Value
		}
		if !ready(&p) {
			version += " not ready"
		}
		out[p.Spec.NodeName] += version
	}
	return out
}

// runsOn waits until pods of an app run on these nodes and no others, of one version.
func (w world) runsOn(app, version string, nodes ...string) {
	w.Helper()
	want := map[string]string{}
	for _, n := range nodes {
		want[n] = version
	}
	testenv.Eventually(w, soon, func() error {
		if have := w.on(app); !maps.Equal(have, want) {
			return fmt.Errorf("%s runs on %v, want %v", app, have, want)
		}
		return nil
	})
}

// F60 F61: a DaemonSet has a pod on every worker, on a cordoned one too, and on those that come to be meant; it is
// updated and set back. A ReplicationController keeps its pods.
func TestDaemonSet(t *testing.T) {
	w := begin(t)
	label := w.ns + "/disk"
	w.applyFile("daemons.yaml", "NAMESPACE", label)
	w.line("rollout", "status", "daemonset/log", "--timeout=180s")
	w.runsOn("log", "1", "w1", "w2", "w3")
	w.runsOn("some", "-")

	t.Cleanup(func() {
		testenv.Kctl(t, "label", "node", "w2", label+"-")
		testenv.Kctl(t, "uncordon", "w3")
	})
	w.line("label", "node", "w2", label+"=yes")
	w.runsOn("some", "-", "w2")
	w.line("cordon", "w3")
	for _, p := range w.pods("log") {
		if p.Spec.NodeName == "w3" {
			w.line("delete", "pod", p.Name)
		}
	}
	w.runsOn("log", "1", "w1", "w2", "w3")
	w.line("set", "env", "daemonset/log", "VERSION=2")
	w.line("rollout", "status", "daemonset/log", "--timeout=180s")
	w.runsOn("log", "2", "w1", "w2", "w3")
	w.wants(w.line("rollout", "history", "daemonset/log"), "REVISION", "1 ", "2 ")
	w.line("rollout", "undo", "daemonset/log", "--to-revision=1")
	w.line("rollout", "status", "daemonset/log", "--timeout=180s")
	w.runsOn("log", "1", "w1", "w2", "w3")
	w.line("label", "node", "w2", label+"-")
	w.runsOn("some", "-")

	pods := w.waitReplicas("old", 2)
	w.line("delete", "pod", pods[0].Name)
	w.waitReplicas("old", 2)
	w.line("scale", "replicationcontroller/old", "--replicas=1")
	w.waitReplicas("old", 1)
}

// F11: Jobs run in parallel, by index, once more after a failure, until a limit or a rule says that they have failed;
// suspended they wait, and after their time to live they are gone.
func TestJobs(t *testing.T) {
	w := begin(t)
	w.applyFile("jobs.yaml")
	w.line("wait", "--for=condition=complete", "job/indexed", "job/again", "--timeout=180s")
	w.eventually("0-3 4", "get", "job", "indexed", "-o", "jsonpath={.status.completedIndexes} {.status.succeeded}")
	got := strings.Split(strings.TrimSpace(w.line("logs", "-l", "batch.kubernetes.io/job-name=indexed")), "\n")
	slices.Sort(got)
	for i, line := range got {
		if want := fmt.Sprintf("index %d on indexed-%d", i, i); line != want || len(got) != 4 {
			t.Errorf("the pods of an indexed job say %q, want %q", got, want)
		}
	}
	w.line("wait", "--for=condition=failed", "job/fails", "job/judged", "--timeout=180s")
	why := "jsonpath={.status.failed} {.status.conditions[?(@.type==\"Failed\")].reason}"
	w.eventually("1 BackoffLimitExceeded", "get", "job", "fails", "-o", why)
	w.eventually("1 PodFailurePolicy", "get", "job", "judged", "-o", why)
	testenv.Eventually(t, soon, func() error {
		if _, err := w.cs.BatchV1().Jobs(w.ns).Get(context.Background(), "brief", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the job that is to go: %v", err)
		}
		return nil
	})
	w.eventually("True", "get", "job", "paused", "-o", `jsonpath={.status.conditions[?(@.type=="Suspended")].status}`)
	if out := w.line("get", "pods", "-l", "job-name=paused", "-o", "name"); out != "" {
		t.Errorf("a suspended job has %s", out)
	}
	w.line("patch", "job/paused", "-p", `{"spec":{"suspend":false}}`)
	w.line("wait", "--for=condition=complete", "job/paused", "--timeout=180s")
	w.wants(strings.Join(strings.Fields(w.line("get", "jobs")), " "), "STATUS COMPLETIONS", "indexed Complete 4/4", "fails Failed 0/1")
	w.wants(w.line("describe", "job", "judged"), "PodFailurePolicy", "exit code 42")

	// A CronJob makes a Job, and so does kubectl of it.
	w.line("create", "job", "by-hand", "--from=cronjob/often")
	w.line("wait", "--for=condition=complete", "job/by-hand", "--timeout=180s")
	testenv.Eventually(t, soon, func() error {
		c, err := w.cs.BatchV1().CronJobs(w.ns).Get(context.Background(), "often", metav1.GetOptions{})
		if err == nil && (c.Status.LastScheduleTime == nil || c.Status.LastSuccessfulTime == nil) {
			err = fmt.Errorf("%+v", c.Status)
		}
		return err
	})
	w.waitEvent("often", "SuccessfulCreate")
	w.line("patch", "cronjob/often", "-p", `{"spec":{"suspend":true}}`)
	w.eventually("", "get", "cronjob/often", "-o", "jsonpath={.status.active}")
	w.wants(w.line("get", "cronjob/often"), "SCHEDULE", "LAST SCHEDULE", "@every 2s", "True")
	w.line("delete", "cronjob/often")
	testenv.Eventually(t, soon, func() error {
		if out := w.line("get", "jobs", "-o", "name"); strings.Contains(out, "often-") {
			return errors.New(out)
		}
		return nil
	})
}
