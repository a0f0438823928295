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

// runKubectl runs the stock kubectl, or kctl if the machine has no kubectl, in the test's
// namespace.
func (w testNamespace) runKubectl(args ...string) string {
	w.Helper()
	path := filepath.Join(testenv.Lab().Config.BinDir, "kctl")
	if stock := testenv.StockKubectl(); len(stock) > 0 {
		path = stock[0]
	}
	return testenv.Must(w, path, append([]string{"-n", w.ns}, args...)...)
}

// applyFile applies a file of testdata with words replaced. It requires that each object is created
// without a warning.
func (w testNamespace) applyFile(name string, replace ...string) {
	w.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		w.Fatal(err)
	}
	file := filepath.Join(w.TempDir(), name)
	if err := os.WriteFile(file, []byte(strings.NewReplacer(replace...).Replace(string(data))), 0o600); err != nil {
		w.Fatal(err)
	}
	for line := range strings.Lines(w.runKubectl("apply", "-f", file)) {
		if !strings.HasSuffix(strings.TrimSpace(line), " created") {
			w.Errorf("applying %s says: %s", name, line)
		}
	}
}

// requireParts fails the test if a text lacks one of the parts.
func (w testNamespace) requireParts(out string, parts ...string) {
	w.Helper()
	for _, p := range parts {
		if !strings.Contains(out, p) {
			w.Errorf("%q is missing in:\n%s", p, out)
		}
	}
}

// awaitOutput waits until a kubectl command prints want.
func (w testNamespace) awaitOutput(want string, args ...string) {
	w.Helper()
	testenv.Eventually(w, soon, func() error {
		if got := strings.TrimSpace(w.runKubectl(args...)); got != want {
			return fmt.Errorf("kubectl %s: %q, want %q", strings.Join(args, " "), got, want)
		}
		return nil
	})
}

// recordPodOrder records the order in which pods are created and become Ready: "+db-0 ready:db-0".
// The returned function waits until the last pod is Ready, which its watch may receive later than
// other clients, and returns the record.
func (w testNamespace) recordPodOrder(app string) func(last string) string {
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
			if podIsReady(p) && !was[p.UID] {
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
				return fmt.Errorf("the watch of %s has not received it: %v", last, out)
			}
			return nil
		})
		seen.Stop()
		<-done
		return strings.Join(out, " ")
	}
}

// createVolumes creates n volumes of a class, on the workers in turn.
func (w testNamespace) createVolumes(class string, n int) {
	w.Helper()
	for i := range n {
		name := fmt.Sprintf("%s-%d", class, i)
		pv := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeSpec{
			Capacity:                      v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")},
			AccessModes:                   []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
			PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimRetain,
			StorageClassName:              class,
			PersistentVolumeSource: v1.PersistentVolumeSource{
				CSI: &v1.CSIPersistentVolumeSource{Driver: "local.csi.keelson.dev", VolumeHandle: name}},
			NodeAffinity: &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
				MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn,
					Values: []string{fmt.Sprintf("w%d", i%3+1)}}},
			}}}},
		}}
		if _, err := w.cs.CoreV1().PersistentVolumes().Create(context.Background(), pv, metav1.CreateOptions{}); err !=
			nil {
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
	w := newNamespace(t)
	w.createVolumes(w.ns, 3)
	came := w.recordPodOrder("db")
	w.applyFile("stateful.yaml", "CLASS", w.ns)
	w.requireParts(w.runKubectl("rollout", "status", "statefulset/db", "--timeout=180s"),
		"partitioned roll out complete: 2 new pods have been updated")
	w.runKubectl("scale", "statefulset/db", "--replicas=3")
	w.runKubectl("rollout", "status", "statefulset/db", "--timeout=180s")
	if got, want := came("db-2"), "+db-0 ready:db-0 +db-1 ready:db-1 +db-2 ready:db-2"; got != want {
		t.Errorf("pods were created in the order %s, want %s", got, want)
	}
	// The endpoints of the headless Service's names.
	first := `jsonpath={range .items[*].endpoints[?(@.hostname=="db-0")]}{.hostname}={.addresses[0]}{end}`
	w.awaitOutput("db-0="+w.getPod("db-0").Status.PodIP, "get", "endpointslices", "-l",
		"kubernetes.io/service-name=db", "-o", first)

	// The identity outlives a pod: name, claim and its data, and the new address by the same name.
	before := w.getPod("db-0")
	w.runKubectl("delete", "pod", "db-0")
	w.awaitPod("db-0", func(p *v1.Pod) error {
		if p.UID == before.UID {
			return errors.New("the old pod still exists")
		}
		return requireReady(p)
	})
	w.awaitExec("db-0", "db-0 db-0", "cat /data/log")
	w.awaitOutput("db-0="+w.getPod("db-0").Status.PodIP, "get", "endpointslices", "-l",
		"kubernetes.io/service-name=db", "-o", first)

	// An update stops at the partition and continues when the partition is removed.
	version := []string{"get", "pods", "-l", "app=db", "-o",
		"jsonpath={range .items[*]}{.metadata.name}={.spec.containers[0].env[0].value} {end}"}
	w.runKubectl("patch", "statefulset/db", "-p", `{"spec":{"updateStrategy":{"rollingUpdate":{"partition":2}}}}`)
	w.runKubectl("set", "env", "statefulset/db", "VERSION=2")
	w.requireParts(w.runKubectl("rollout", "status", "statefulset/db", "--timeout=180s"),
		"partitioned roll out complete: 1 new pods have been updated")
	w.awaitOutput("db-0=1 db-1=1 db-2=2", version...)
	w.runKubectl("patch", "statefulset/db", "-p", `{"spec":{"updateStrategy":{"rollingUpdate":{"partition":0}}}}`)
	w.runKubectl("rollout", "status", "statefulset/db", "--timeout=180s")
	w.awaitOutput("db-0=2 db-1=2 db-2=2", version...)
	w.requireParts(w.runKubectl("rollout", "history", "statefulset/db"), "REVISION", "1 ", "2 ")
	w.requireParts(w.runKubectl("rollout", "history", "statefulset/db", "--revision=1"), "VERSION:\t1")
	w.runKubectl("rollout", "undo", "statefulset/db")
	w.runKubectl("rollout", "status", "statefulset/db", "--timeout=180s")
	w.awaitOutput("db-0=1 db-1=1 db-2=1", version...)

	// The highest goes first; its claim stays.
	w.runKubectl("scale", "statefulset/db", "--replicas=1")
	w.awaitOutput("db-0=1", version...)
	w.requireParts(w.runKubectl("get", "pvc"), "data-db-0", "data-db-1", "data-db-2", "Bound")
	w.awaitOutput("1/1", "get", "statefulset", "db", "-o", "jsonpath={.status.readyReplicas}/{.spec.replicas}")
	w.requireParts(w.runKubectl("get", "statefulset"), "db     1/1")
}

// podsByNode returns the nodes of the living pods of an app, each with the value of its pod's first
// environment variable.
func (w testNamespace) podsByNode(app string) map[string]string {
	w.Helper()
	out := map[string]string{}
	for _, p := range w.livingPods(app) {
		version := "-"
		if env := p.Spec.Containers[0].Env; len(env) > 0 {
			version = env[0].Value
		}
		if !podIsReady(&p) {
			version += " not ready"
		}
		out[p.Spec.NodeName] += version
	}
	return out
}

// awaitPodsOn waits until an app has pods of one version on exactly these nodes.
func (w testNamespace) awaitPodsOn(app, version string, nodes ...string) {
	w.Helper()
	want := map[string]string{}
	for _, n := range nodes {
		want[n] = version
	}
	testenv.Eventually(w, soon, func() error {
		if have := w.podsByNode(app); !maps.Equal(have, want) {
			return fmt.Errorf("%s runs on %v, want %v", app, have, want)
		}
		return nil
	})
}

// F60 F61: a DaemonSet has a pod on every worker, also on a cordoned one and on workers that match
// later; it is updated and rolled back. A ReplicationController keeps its pods.
func TestDaemonSet(t *testing.T) {
	w := newNamespace(t)
	label := w.ns + "/disk"
	w.applyFile("daemons.yaml", "NAMESPACE", label)
	w.runKubectl("rollout", "status", "daemonset/log", "--timeout=180s")
	w.awaitPodsOn("log", "1", "w1", "w2", "w3")
	w.awaitPodsOn("some", "-")

	t.Cleanup(func() {
		testenv.Kctl(t, "label", "node", "w2", label+"-")
		testenv.Kctl(t, "uncordon", "w3")
	})
	w.runKubectl("label", "node", "w2", label+"=yes")
	w.awaitPodsOn("some", "-", "w2")
	w.runKubectl("cordon", "w3")
	for _, p := range w.livingPods("log") {
		if p.Spec.NodeName == "w3" {
			w.runKubectl("delete", "pod", p.Name)
		}
	}
	w.awaitPodsOn("log", "1", "w1", "w2", "w3")
	w.runKubectl("set", "env", "daemonset/log", "VERSION=2")
	w.runKubectl("rollout", "status", "daemonset/log", "--timeout=180s")
	w.awaitPodsOn("log", "2", "w1", "w2", "w3")
	w.requireParts(w.runKubectl("rollout", "history", "daemonset/log"), "REVISION", "1 ", "2 ")
	w.runKubectl("rollout", "undo", "daemonset/log", "--to-revision=1")
	w.runKubectl("rollout", "status", "daemonset/log", "--timeout=180s")
	w.awaitPodsOn("log", "1", "w1", "w2", "w3")
	w.runKubectl("label", "node", "w2", label+"-")
	w.awaitPodsOn("some", "-")

	pods := w.awaitReplicas("old", 2)
	w.runKubectl("delete", "pod", pods[0].Name)
	w.awaitReplicas("old", 2)
	w.runKubectl("scale", "replicationcontroller/old", "--replicas=1")
	w.awaitReplicas("old", 1)
}

// F11: Jobs run in parallel, by index, and again after a failure, until a limit or a rule marks
// them as failed. A suspended Job waits, and a finished Job is deleted after its TTL.
func TestJobs(t *testing.T) {
	w := newNamespace(t)
	w.applyFile("jobs.yaml")
	w.runKubectl("wait", "--for=condition=complete", "job/indexed", "job/again", "--timeout=180s")
	w.awaitOutput("0-3 4", "get", "job", "indexed", "-o", "jsonpath={.status.completedIndexes} {.status.succeeded}")
	got := strings.Split(strings.TrimSpace(w.runKubectl("logs", "-l", "batch.kubernetes.io/job-name=indexed")), "\n")
	slices.Sort(got)
	for i, line := range got {
		if want := fmt.Sprintf("index %d on indexed-%d", i, i); line != want || len(got) != 4 {
			t.Errorf("the pods of an indexed job say %q, want %q", got, want)
		}
	}
	w.runKubectl("wait", "--for=condition=failed", "job/fails", "job/judged", "--timeout=180s")
	why := "jsonpath={.status.failed} {.status.conditions[?(@.type==\"Failed\")].reason}"
	w.awaitOutput("1 BackoffLimitExceeded", "get", "job", "fails", "-o", why)
	w.awaitOutput("1 PodFailurePolicy", "get", "job", "judged", "-o", why)
	testenv.Eventually(t, soon, func() error {
		if _, err := w.cs.BatchV1().Jobs(w.ns).Get(context.Background(), "brief",
			metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the job that is to go: %v", err)
		}
		return nil
	})
	w.awaitOutput("True", "get", "job", "paused", "-o", `jsonpath={.status.conditions[?(@.type=="Suspended")].status}`)
	if out := w.runKubectl("get", "pods", "-l", "job-name=paused", "-o", "name"); out != "" {
		t.Errorf("a suspended job has %s", out)
	}
	w.runKubectl("patch", "job/paused", "-p", `{"spec":{"suspend":false}}`)
	w.runKubectl("wait", "--for=condition=complete", "job/paused", "--timeout=180s")
	w.requireParts(strings.Join(strings.Fields(w.runKubectl("get", "jobs")), " "), "STATUS COMPLETIONS",
		"indexed Complete 4/4",
		"fails Failed 0/1")
	w.requireParts(w.runKubectl("describe", "job", "judged"), "PodFailurePolicy", "exit code 42")

	// A CronJob makes a Job, and so does kubectl of it.
	w.runKubectl("create", "job", "by-hand", "--from=cronjob/often")
	w.runKubectl("wait", "--for=condition=complete", "job/by-hand", "--timeout=180s")
	testenv.Eventually(t, soon, func() error {
		c, err := w.cs.BatchV1().CronJobs(w.ns).Get(context.Background(), "often", metav1.GetOptions{})
		if err == nil && (c.Status.LastScheduleTime == nil || c.Status.LastSuccessfulTime == nil) {
			err = fmt.Errorf("%+v", c.Status)
		}
		return err
	})
	w.awaitEvent("often", "SuccessfulCreate")
	w.runKubectl("patch", "cronjob/often", "-p", `{"spec":{"suspend":true}}`)
	w.awaitOutput("", "get", "cronjob/often", "-o", "jsonpath={.status.active}")
	w.requireParts(w.runKubectl("get", "cronjob/often"), "SCHEDULE", "LAST SCHEDULE", "@every 2s", "True")
	w.runKubectl("delete", "cronjob/often")
	testenv.Eventually(t, soon, func() error {
		if out := w.runKubectl("get", "jobs", "-o", "name"); strings.Contains(out, "often-") {
			return errors.New(out)
		}
		return nil
	})
}
