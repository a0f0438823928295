package e2e

import (
	"context"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

// patchNode merges a patch into a node; sub is an optional subresource.
func (w testNamespace) patchNode(name, patch string, sub ...string) {
	w.Helper()
	if _, err := w.cs.CoreV1().Nodes().Patch(context.Background(), name, types.MergePatchType, []byte(patch),
		metav1.PatchOptions{}, sub...); err != nil {
		w.Fatalf("patching node %s: %v", name, err)
	}
}

// Labels set on a node by an administrator and resources advertised in its status are kept: pods
// that request them are scheduled there and run, and none is rejected. F95
func TestWhatNodesAreGiven(t *testing.T) {
	w := newNamespace(t)
	const node = "w2"
	defer w.patchNode(node, `{"metadata":{"labels":{"e2e.example.com/disk":null}}}`)
	defer w.patchNode(node, `{"status":{"capacity":{"example.com/dongle":null}}}`, "status")
	w.patchNode(node, `{"metadata":{"labels":{"e2e.example.com/disk":"ssd"}}}`)
	w.patchNode(node, `{"status":{"capacity":{"example.com/dongle":"2"}}}`, "status")
	d := webDeployment("picky", 6)
	d.Spec.Template.Spec.NodeSelector = map[string]string{"e2e.example.com/disk": "ssd"}
	w.createWeb(d)
	for i := range 2 {
		p := sleeperPod(fmt.Sprintf("plugged-%d", i))
		p.Spec.Containers[0].Resources.Limits = v1.ResourceList{"example.com/dongle": resource.MustParse("1")}
		w.createPod(p)
		w.awaitPod(p.Name, requireReady)
	}
	w.awaitReplicas("picky", 6)
	all, err := w.cs.CoreV1().Pods(w.ns).List(context.Background(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all.Items {
		if p.Spec.NodeName != node || p.Status.Phase != v1.PodRunning {
			t.Errorf("pod %s is %s on %s: %s %s", p.Name, p.Status.Phase, p.Spec.NodeName, p.Status.Reason,
				p.Status.Message)
		}
	}
	n, err := w.cs.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if q := n.Status.Allocatable["example.com/dongle"]; q.Value() != 2 {
		t.Errorf("allocatable: %v", n.Status.Allocatable)
	}
	// When the resource is removed, pods that request it later are rejected, and a rejected pod has
	// no waiting container. (A resource that the node does not have at all is allocated by others,
	// as with a kubelet.)
	w.patchNode(node, `{"status":{"capacity":{"example.com/dongle":"0"}}}`, "status")
	testenv.Eventually(t, soon, func() error {
		n, err := w.cs.CoreV1().Nodes().Get(context.Background(), node, metav1.GetOptions{})
		if q, ok := n.Status.Allocatable["example.com/dongle"]; err == nil && (!ok || !q.IsZero()) {
			err = fmt.Errorf("allocatable: %v", n.Status.Allocatable)
		}
		return err
	})
	late := sleeperPod("late")
	late.Spec.NodeName = node // past the scheduler
	late.Spec.Containers[0].Resources.Limits = v1.ResourceList{"example.com/dongle": resource.MustParse("1")}
	w.createPod(late)
	got := w.awaitPod("late", func(p *v1.Pod) error {
		if p.Status.Phase != v1.PodFailed {
			return fmt.Errorf("phase %s", p.Status.Phase)
		}
		return nil
	})
	if got.Status.Reason != "OutOfexample.com/dongle" || len(got.Status.ContainerStatuses) > 0 {
		t.Errorf("refused as %s %q with %+v", got.Status.Reason, got.Status.Message, got.Status.ContainerStatuses)
	}
}
