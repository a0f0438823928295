package podgc_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/podgc"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// The pods of a node that went, came back and went again are kept for a whole quarantine from the second time on.
func TestQuarantineStartsAnew(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{podgc.New(d, podgc.Options{Quarantine: 40 * time.Second})}
			}})
		w.Nodes.Mark(w.Nodes.Dead, "w1", true)
		w.Lead(engine.Options{})
		pass := func(d time.Duration) {
			time.Sleep(d) // of the bubble's own time
			virtual.Wait()
		}
		leave := func() {
			if err := client.Delete[*corev1.Node](w.Ctx, w.Admin, "", "w1", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		w.AddNode("w1")
		w.CreateObject(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"},
			Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{Name: "c", Image: "i"}}}})
		leave()
		pass(30 * time.Second)
		w.AddNode("w1")
		pass(5 * time.Second)
		leave()
		pass(35 * time.Second)
		if len(w.LivePods()) != 1 {
			t.Fatal("the pod is gone 35 s after its node left for the second time")
		}
		pass(10 * time.Second)
		if len(w.LivePods()) != 0 {
			t.Error("the pod is still there 45 s after its node left")
		}
	})
}
