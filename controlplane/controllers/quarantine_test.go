package controllers_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/podgc"
	"keelson.dev/keelson/internal/virtual"
)

// The pods of a node that went, came back and went again are kept for a whole quarantine from the second time on.
func TestQuarantineStartsAnew(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := newWorld(t, options{quiet: true, only: func(d controllers.Deps) []*controllers.Controller {
			return []*controllers.Controller{podgc.New(d, podgc.Options{Quarantine: 40 * time.Second})}
		}})
		w.nodes.set(w.nodes.dead, "w1", true)
		w.lead(controllers.Options{})
		pass := func(d time.Duration) {
			time.Sleep(d) // of the bubble's own time
			virtual.Wait()
		}
		leave := func() {
			if err := client.Delete[*corev1.Node](w.ctx, w.admin, "", "w1", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		w.node("w1")
		w.create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p"},
			Spec: corev1.PodSpec{NodeName: "w1", Containers: []corev1.Container{{Name: "c", Image: "i"}}}})
		leave()
		pass(30 * time.Second)
		w.node("w1")
		pass(5 * time.Second)
		leave()
		pass(35 * time.Second)
		if len(w.pods()) != 1 {
			t.Fatal("the pod is gone 35 s after its node left for the second time")
		}
		pass(10 * time.Second)
		if len(w.pods()) != 0 {
			t.Error("the pod is still there 45 s after its node left")
		}
	})
}
