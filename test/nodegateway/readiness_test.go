package nodegateway_test

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/client"
)

// mark stores whether a pod is ready, as somebody else than its node says.
func (b *bed) mark(name string, ready v1.ConditionStatus) {
	b.t.Helper()
	b.eventually("marked", func() error {
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

func (b *bed) podReady(name string, want v1.ConditionStatus) func() error {
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

// P4: whether a pod is ready its node says. Who marks the pods of a lost node may come late, when the node is back and has
// said so already, and it says it once: the word holds all the same, with the same session and with the next one, and
// also when the node itself was not ready for a while and its pods were marked meanwhile.
func TestReadinessIsTheNodesWord(t *testing.T) {
	b := newBed(t, "cp1")
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	p := b.pod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	said := report(p, v1.PodRunning, "")
	said.Status.Conditions = []v1.PodCondition{{Type: v1.PodReady, Status: v1.ConditionTrue}}
	n.PodStatus(said)
	b.eventually("ready", b.podReady("p", v1.ConditionTrue))
	for range 3 {
		b.mark("p", v1.ConditionFalse)
		b.eventually("ready again", b.podReady("p", v1.ConditionTrue))
	}

	node := func(ready v1.ConditionStatus) *v1.Node {
		return &v1.Node{Status: v1.NodeStatus{Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: ready, Reason: "Test"}}}}
	}
	n.Facts(node(v1.ConditionFalse))
	b.awaitReady("w1", v1.ConditionFalse)
	b.mark("p", v1.ConditionFalse)
	q := b.pod("q", "w1", nil) // when it has been told of, the session has seen the mark
	n.awaitPod(b, q.UID)
	n.PodStatus(report(q, v1.PodRunning, ""))
	b.eventually("status of another", podIs(b, "q", v1.PodRunning))
	if err := b.podReady("p", v1.ConditionFalse)(); err != nil {
		t.Errorf("while its node is not ready: %v", err)
	}
	n.Facts(node(v1.ConditionTrue))
	b.awaitReady("w1", v1.ConditionTrue)
	b.eventually("ready with its node", b.podReady("p", v1.ConditionTrue))
}
