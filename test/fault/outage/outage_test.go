// Package outage takes a part of the machines' network away that is too large to believe that the machines have failed.
package outage

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.MainOf(5, m)) }

const (
	soon = 3 * time.Minute // for a machine that is three times slower and does other work
	// cut is how long the switch fails. Pods of a lost node leave it after five seconds on a lab.
	cut = 30 * time.Second
	// after is how long nothing may happen once it is back: longer than pods stay on a lost node.
	after = 12 * time.Second
)

// A switch that cuts off three of five workers for 30 s evicts nothing, and nothing when they are back; of one
// worker that is cut off alone the pods are replaced, in the same cluster.
func TestASwitchThatCutsOffMostWorkers(t *testing.T) {
	cs, ns := testenv.Client(t), testenv.Namespace(t)
	lost := []string{"w1", "w2", "w3"}
	createDeployment(t, cs, ns, 10)
	before := awaitRunning(t, cs, ns, 10)
	for _, w := range lost {
		if !slices.ContainsFunc(slices.Collect(maps.Values(before)), func(p v1.Pod) bool {
			return p.Spec.NodeName == w
		}) {
			t.Fatalf("%s has no pod that could be evicted", w)
		}
	}
	plugged := disconnectWorkers(t, lost...)
	began := time.Now()
	awaitReady(t, cs, false, lost...)
	t.Logf("all three were noticed after %v", time.Since(began).Round(100*time.Millisecond))
	waitFor(t, cut-time.Since(began))
	requireUntouched(t, cs, ns, before, "while three of five workers were cut off")
	plugged()
	awaitReady(t, cs, true, lost...)
	waitFor(t, after)
	requireUntouched(t, cs, ns, before, "after they came back")
	for _, p := range awaitRunning(t, cs, ns, 10) {
		if c := p.Status.ContainerStatuses[0]; c.RestartCount != 0 ||
			c.ContainerID != before[p.UID].Status.ContainerStatuses[0].ContainerID {
			t.Errorf("the container of %s was started again", p.Name)
		}
	}

	plugged = disconnectWorkers(t, "w1")
	began = time.Now()
	testenv.Eventually(t, soon, func() error {
		for uid, p := range listPods(t, cs, ns) {
			if _, old := before[uid]; old && p.Spec.NodeName == "w1" && p.DeletionTimestamp == nil {
				return fmt.Errorf("%s is still on w1, which is lost alone", p.Name)
			}
		}
		return nil
	})
	t.Logf("of one worker that is cut off alone the pods were evicted after %v",
		time.Since(began).Round(100*time.Millisecond))
	plugged()
	awaitReady(t, cs, true, "w1")
}

// createDeployment creates a Deployment with pods on all workers.
func createDeployment(t *testing.T, cs kubernetes.Interface, ns string, replicas int32) {
	t.Helper()
	labels := map[string]string{"app": "web"}
	grace := int64(1)
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: appsv1.DeploymentSpec{
		Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: v1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: v1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			Containers: []v1.Container{{Name: "main", Image: "keelson.dev/hello:v1",
				// so that they spread
				Resources: v1.ResourceRequirements{Requests: v1.ResourceList{
					v1.ResourceCPU: resource.MustParse("500m")}}}},
		}},
	}}
	if _, err := cs.AppsV1().Deployments(ns).Create(context.Background(), d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func listPods(t *testing.T, cs kubernetes.Interface, ns string) map[types.UID]v1.Pod {
	t.Helper()
	list, err := cs.CoreV1().Pods(ns).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[types.UID]v1.Pod{}
	for _, p := range list.Items {
		out[p.UID] = p
	}
	return out
}

// awaitRunning waits until n pods run and no other pods exist.
func awaitRunning(t *testing.T, cs kubernetes.Interface, ns string, n int) (out map[types.UID]v1.Pod) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		out = listPods(t, cs, ns)
		for _, p := range out {
			ok := slices.ContainsFunc(p.Status.Conditions, func(c v1.PodCondition) bool {
				return c.Type == v1.PodReady && c.Status == v1.ConditionTrue
			})
			if !ok {
				return fmt.Errorf("%s is not ready", p.Name)
			}
		}
		if len(out) != n {
			return fmt.Errorf("%d pods, want %d", len(out), n)
		}
		return nil
	})
	return out
}

// requireUntouched fails the test if a pod was deleted or is being deleted.
func requireUntouched(t *testing.T, cs kubernetes.Interface, ns string, before map[types.UID]v1.Pod, when string) {
	t.Helper()
	now := listPods(t, cs, ns)
	for uid, was := range before {
		p, there := now[uid]
		switch {
		case !there:
			t.Errorf("%s on %s was deleted %s", was.Name, was.Spec.NodeName, when)
		case p.DeletionTimestamp != nil:
			t.Errorf("%s on %s is being deleted %s", was.Name, was.Spec.NodeName, when)
		}
	}
	if len(now) > len(before) {
		t.Errorf("%d pods were made %s", len(now)-len(before), when)
	}
}

// disconnectWorkers takes down the links of workers. The returned function restores them, at the
// latest at the end of the test.
func disconnectWorkers(t *testing.T, workers ...string) (plug func()) {
	t.Helper()
	in := false
	plug = func() {
		if in {
			return
		}
		in = true
		for _, w := range workers {
			if err := testenv.Lab().Heal(w); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(plug)
	for _, w := range workers {
		if err := testenv.Lab().Partition(w); err != nil {
			t.Fatal(err)
		}
	}
	return plug
}

// awaitReady waits until these nodes are Ready, or are not.
func awaitReady(t *testing.T, cs kubernetes.Interface, want bool, nodes ...string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		for _, name := range nodes {
			n, err := cs.CoreV1().Nodes().Get(context.Background(), name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			is := slices.ContainsFunc(n.Status.Conditions, func(c v1.NodeCondition) bool {
				return c.Type == v1.NodeReady && c.Status == v1.ConditionTrue
			})
			if is != want {
				return fmt.Errorf("node %s: ready is %v", name, is)
			}
		}
		return nil
	})
}

// waitFor waits for a time.
func waitFor(t *testing.T, d time.Duration) {
	t.Helper()
	if err := wait.Delay(context.Background(), d); err != nil {
		t.Fatal(err)
	}
}
