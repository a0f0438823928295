package nodegateway_test

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/client"
)

// setPodReady stores the readiness of a pod as a client other than its node.
func (b *testEnv) setPodReady(name string, ready v1.ConditionStatus) {
	b.t.Helper()
	b.awaitCondition("marked", func() error {
		p, err := client.Get[*v1.Pod](b.ctx, b.client, "default", name)
		if err != nil {
			return err
		}
		p = p.DeepCopy()
		p.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: ready}}
		_, err = client.UpdateStatus(b.ctx, b.client, p)
		return err
	})
}

func (b *testEnv) podHasReady(name string, want v1.ConditionStatus) func() error {
	return func() error {
		p, err := client.Get[*v1.Pod](b.ctx, b.client, "default", name)
		if err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == v1.PodReady && c.Status == want {
				return nil
			}
		}
		return fmt.Errorf("pod %s is not Ready=%s: %v", name, want, p.Status.Conditions)
	}
}

// P4: a pod's readiness is reported by its node. The controller that marks the pods of a lost node
// may be late, when the node is back and has already reported, which it does once. The node's
// report wins nevertheless, in the same session and in the next one, and also if the node itself
// was not Ready for a while and its pods were marked meanwhile.
func TestReadinessIsTheNodesWord(t *testing.T) {
	b := newTestEnv(t, "cp1")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	p := b.createPod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	said := podStatus(p, v1.PodRunning, "")
	said.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}
	n.PodStatus(said)
	b.awaitCondition("ready", b.podHasReady("p", v1.ConditionTrue))
	for range 3 {
		b.setPodReady("p", v1.ConditionFalse)
		b.awaitCondition("ready again", b.podHasReady("p", v1.ConditionTrue))
	}

	node := func(ready v1.ConditionStatus) *v1.Node {
		return &v1.Node{Status: v1.NodeStatus{Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: ready,
			Reason: "Test"}}}}
	}
	n.Facts(node(v1.ConditionFalse))
	b.awaitReady("w1", v1.ConditionFalse)
	b.setPodReady("p", v1.ConditionFalse)
	q := b.createPod("q", "w1", nil) // when this pod is delivered, the session has processed the mark
	n.awaitPod(b, q.UID)
	n.PodStatus(podStatus(q, v1.PodRunning, ""))
	b.awaitCondition("status of another", podHasPhase(b, "q", v1.PodRunning))
	if err := b.podHasReady("p", v1.ConditionFalse)(); err != nil {
		t.Errorf("while its node is not ready: %v", err)
	}
	n.Facts(node(v1.ConditionTrue))
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitCondition("ready with its node", b.podHasReady("p", v1.ConditionTrue))
}
