package nodelifecycle_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/nodelifecycle"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// disrupted runs f with n nodes in virtual time. Each node has one pod that tolerates a lost node
// for 20 s.
func disrupted(
	t *testing.T, n int,
	f func(w *testcluster.Cluster, pass func(d time.Duration), set func(status corev1.ConditionStatus, nodes ...int)),
) {
	t.Helper()
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{nodelifecycle.New(d)}
			}})
		w.Lead(engine.Options{})
		stay := int64(20)
		for i := range n {
			node := fmt.Sprintf("w%d", i)
			w.Nodes.Mark(w.Nodes.Dead, node, true)
			w.AddNode(node)
			var tolerations []corev1.Toleration
			for _, key := range []string{corev1.TaintNodeUnreachable, corev1.TaintNodeNotReady} {
				tolerations = append(tolerations, corev1.Toleration{
					Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute,
					TolerationSeconds: &stay})
			}
			w.CreateObject(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "on-" + node},
				Spec: corev1.PodSpec{NodeName: node, Tolerations: tolerations,
					Containers: []corev1.Container{{Name: "c", Image: "i"}}}})
		}
		pass := func(d time.Duration) {
			time.Sleep(d) // of the bubble's own time
			virtual.Wait()
		}
		pass(time.Minute)
		f(w, pass, func(status corev1.ConditionStatus, nodes ...int) {
			for _, i := range nodes {
				w.SetNodeReady(fmt.Sprintf("w%d", i), status)
				pass(300 * time.Millisecond) // they are observed one after the other
			}
		})
	})
}

// A switch that cuts off 60% of the nodes for 30 s evicts nothing, and neither do the nodes that come back one by one.
func TestASwitchThatFailsEvictsNothing(t *testing.T) {
	for _, c := range []struct{ nodes, lost int }{{5, 3}, {10, 6}, {60, 36}} {
		disrupted(t, c.nodes, func(w *testcluster.Cluster, pass func(time.Duration),
			set func(corev1.ConditionStatus, ...int)) {
			var cut []int
			for i := range c.lost {
				cut = append(cut, i)
			}
			set(corev1.ConditionUnknown, cut...)
			pass(30*time.Second - time.Duration(c.lost)*300*time.Millisecond)
			if n := len(w.LivePods()); n != c.nodes {
				w.T.Errorf("%d of %d nodes were cut off for 30 s: %d pods are left", c.lost, c.nodes, n)
			}
			set(corev1.ConditionTrue, cut...)
			pass(10 * time.Minute)
			if n := len(w.LivePods()); n != c.nodes {
				w.T.Errorf("%d of %d nodes came back: %d pods are left", c.lost, c.nodes, n)
			}
		})
	}
}

// The pods of one lost node are evicted after their toleration time; with several lost nodes, one
// node every 10 s.
func TestLostNodesAreGivenUpOneByOne(t *testing.T) {
	disrupted(t, 10, func(w *testcluster.Cluster, pass func(time.Duration), set func(corev1.ConditionStatus, ...int)) {
		set(corev1.ConditionUnknown, 0, 1, 2)
		pass(18 * time.Second)
		for i, want := range []int{10, 9, 8, 7, 7} {
			if n := len(w.LivePods()); n != want {
				t.Errorf("step %d: %d pods, want %d", i, n, want)
			}
			pass(map[bool]time.Duration{true: 3 * time.Second, false: 10 * time.Second}[i == 0])
		}
	})
}

// While no node at all is ready nothing is evicted, nor in the moment when the first is back.
func TestNoNodeIsReady(t *testing.T) {
	disrupted(t, 3, func(w *testcluster.Cluster, pass func(time.Duration), set func(corev1.ConditionStatus, ...int)) {
		set(corev1.ConditionUnknown, 0, 1, 2)
		pass(time.Hour)
		set(corev1.ConditionTrue, 0)
		pass(10 * time.Second)
		set(corev1.ConditionTrue, 1, 2)
		pass(time.Minute)
		if n := len(w.LivePods()); n != 3 {
			t.Errorf("%d pods are left", n)
		}
	})
}
