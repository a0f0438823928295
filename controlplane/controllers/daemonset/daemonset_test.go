package daemonset_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// A DaemonSet has a pod of its latest template on every eligible node. New nodes get a pod, and
// nodes that become ineligible lose it. F60 F61
func TestDaemonSet(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		w.CreateObject(testcluster.NewDaemonSet("log", "log:1", nil))
		w.CreateObject(testcluster.NewDaemonSet("ssd", "ssd:1", map[string]string{"disk": "ssd"}))
		w.AwaitDaemons("log", "log:1", "w1", "w2", "w3")
		w.AwaitDaemons("ssd", "ssd:1")
		testcluster.Update(w, "w2", func(n *corev1.Node) { n.Labels["disk"] = "ssd" })
		w.AwaitDaemons("ssd", "ssd:1", "w2")
		w.AddNode("w4")
		w.AwaitDaemons("log", "log:1", "w1", "w2", "w3", "w4")
		w.Eventually("a new template", func() error {
			d, err := client.Get[*appsv1.DaemonSet](w.Ctx, w.Admin, "default", "log")
			if err != nil {
				return err
			}
			d = d.DeepCopy()
			d.Spec.Template.Spec.Containers[0].Image = "log:2"
			_, err = client.Update(w.Ctx, w.Admin, d)
			return err
		})
		w.AwaitDaemons("log", "log:2", "w1", "w2", "w3", "w4")
		testcluster.Update(w, "w2", func(n *corev1.Node) { delete(n.Labels, "disk") })
		w.AwaitDaemons("ssd", "ssd:1")
		// A failed pod and a deleted pod are replaced.
		for _, p := range w.LivePods() {
			if p.Spec.NodeName != "w1" {
				continue
			}
			p = p.DeepCopy()
			p.Status.Phase = corev1.PodFailed
			if _, err := client.UpdateStatus(w.Ctx, w.Admin, p); err != nil {
				t.Fatal(err)
			}
			w.AwaitEvent("FailedDaemonPod", "Replacing pod "+p.Name+" on node w1, which has ended as Failed")
		}
		w.AwaitDaemons("log", "log:2", "w1", "w2", "w3", "w4")
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", w.LivePods()[0].Name,
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.AwaitDaemons("log", "log:2", "w1", "w2", "w3", "w4")
		revisions, err := client.List[*appsv1.ControllerRevision](w.Ctx, w.Admin, "default",
			metav1.ListOptions{LabelSelector: "app=log"})
		if err != nil || len(revisions) != 2 {
			t.Errorf("%d revisions, %v", len(revisions), err)
		}
	})
}
