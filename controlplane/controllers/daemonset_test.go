package controllers_test

import (
	"fmt"
	"maps"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/virtual"
)

// daemons is a DaemonSet for the nodes that are labelled so.
func daemons(name, image string, selector map[string]string) *appsv1.DaemonSet {
	d := app(name, 1, image)
	d.Spec.Template.Spec.NodeSelector = selector
	return &appsv1.DaemonSet{ObjectMeta: d.ObjectMeta, Spec: appsv1.DaemonSetSpec{Selector: d.Spec.Selector, Template: d.Spec.Template}}
}

// daemonsRun waits until a DaemonSet has a pod of an image on each of these nodes and on no other.
func (w *world) daemonsRun(name, image string, nodes ...string) {
	w.t.Helper()
	w.eventually("daemons "+name, func() error {
		d, err := client.Get[*appsv1.DaemonSet](w.ctx, w.admin, "default", name)
		if err != nil {
			return err
		}
		n := int32(len(nodes))
		if s := d.Status; s.ObservedGeneration != d.Generation || s.DesiredNumberScheduled != n || s.NumberAvailable != n || s.UpdatedNumberScheduled != n || s.NumberMisscheduled != 0 {
			return fmt.Errorf("%+v", s)
		}
		want, have := map[string]string{}, map[string]string{}
		for _, node := range nodes {
			want[node] = image
		}
		for _, p := range w.pods() {
			if p.Labels["app"] == name {
				have[p.Spec.NodeName] += p.Spec.Containers[0].Image
			}
		}
		if !maps.Equal(want, have) {
			return fmt.Errorf("on the nodes runs %v", have)
		}
		return nil
	})
}

// A DaemonSet has a pod of its latest template on every eligible node. New nodes get a pod, and
// nodes that become ineligible lose it. F60 F61
func TestDaemonSet(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{})
		w.create(daemons("log", "log:1", nil))
		w.create(daemons("ssd", "ssd:1", map[string]string{"disk": "ssd"}))
		w.daemonsRun("log", "log:1", "w1", "w2", "w3")
		w.daemonsRun("ssd", "ssd:1")
		update(w, "w2", func(n *corev1.Node) { n.Labels["disk"] = "ssd" })
		w.daemonsRun("ssd", "ssd:1", "w2")
		w.node("w4")
		w.daemonsRun("log", "log:1", "w1", "w2", "w3", "w4")
		w.eventually("a new template", func() error {
			d, err := client.Get[*appsv1.DaemonSet](w.ctx, w.admin, "default", "log")
			if err != nil {
				return err
			}
			d = d.DeepCopy()
			d.Spec.Template.Spec.Containers[0].Image = "log:2"
			_, err = client.Update(w.ctx, w.admin, d)
			return err
		})
		w.daemonsRun("log", "log:2", "w1", "w2", "w3", "w4")
		update(w, "w2", func(n *corev1.Node) { delete(n.Labels, "disk") })
		w.daemonsRun("ssd", "ssd:1")
		// A failed pod and a deleted pod are replaced.
		for _, p := range w.pods() {
			if p.Spec.NodeName != "w1" {
				continue
			}
			p = p.DeepCopy()
			p.Status.Phase = corev1.PodFailed
			if _, err := client.UpdateStatus(w.ctx, w.admin, p); err != nil {
				t.Fatal(err)
			}
			w.event("FailedDaemonPod", "Replacing pod "+p.Name+" on node w1, which has ended as Failed")
		}
		w.daemonsRun("log", "log:2", "w1", "w2", "w3", "w4")
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", w.pods()[0].Name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.daemonsRun("log", "log:2", "w1", "w2", "w3", "w4")
		revisions, err := client.List[*appsv1.ControllerRevision](w.ctx, w.admin, "default", metav1.ListOptions{LabelSelector: "app=log"})
		if err != nil || len(revisions) != 2 {
			t.Errorf("%d revisions, %v", len(revisions), err)
		}
	})
}
