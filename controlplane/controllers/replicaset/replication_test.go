package replicaset_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// A ReplicationController manages its pods as a ReplicaSet does, and its deletion orphans them by
// default. F60 F61 F71
func TestReplicationController(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{})
		n := int32(3)
		w.CreateObject(&corev1.ReplicationController{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: corev1.ReplicationControllerSpec{
				Replicas: &n, Template: &testcluster.NewDeployment("web", 1, "web:1").Spec.Template,
			}})
		scaled := func(want int32) {
			t.Helper()
			w.Eventually("replicas", func() error {
				rc, err := client.Get[*corev1.ReplicationController](w.Ctx, w.Admin, "default", "web")
				if err != nil {
					return err
				}
				if s := rc.Status; s.AvailableReplicas != want || s.Replicas != want ||
					s.ObservedGeneration != rc.Generation || len(w.LivePods()) != int(want) {
					return fmt.Errorf("%d pods, status %+v", len(w.LivePods()), s)
				}
				return nil
			})
		}
		scaled(3)
		for _, p := range w.LivePods() {
			if ref := metav1.GetControllerOf(p); ref == nil || ref.Kind != "ReplicationController" ||
				ref.APIVersion != "v1" {
				t.Fatalf("controlled by %v", ref)
			}
		}
		rc, err := client.Get[*corev1.ReplicationController](w.Ctx, w.Admin, "default", "web")
		if err != nil {
			t.Fatal(err)
		}
		rc = rc.DeepCopy()
		*rc.Spec.Replicas = 1
		if _, err := client.Update(w.Ctx, w.Admin, rc); err != nil {
			t.Fatal(err)
		}
		scaled(1)
		if err := client.Delete[*corev1.ReplicationController](w.Ctx, w.Admin, "default", "web",
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("an orphan", func() error {
			if _, err := client.Get[*corev1.ReplicationController](w.Ctx, w.Admin, "default", "web"); err == nil {
				return fmt.Errorf("the controller is still there")
			}
			if pods := w.LivePods(); len(pods) != 1 || len(pods[0].OwnerReferences) != 0 {
				return fmt.Errorf("%d pods, of which the first belongs to %v", len(pods), pods[0].OwnerReferences)
			}
			return nil
		})
	})
}

// An object's status is written at once, and not again within the pause.
func TestStatusPace(t *testing.T) {
	var p engine.StatusPace
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, c := range []struct {
		uid   types.UID
		after time.Duration
		want  time.Duration
	}{
		{"a", 0, 0}, {"a", 10, 40}, {"b", 0, 0}, {"a", 39, 1}, {"a", 1, 0}, {"a", 1, 49}, {"b", 0, 9}, {"b", 9, 0},
	} {
		now = now.Add(c.after * time.Millisecond)
		if got := p.Reserve(c.uid, now); got != c.want*time.Millisecond {
			t.Errorf("%s: %v, want %v ms", c.uid, got, int(c.want))
		}
	}
	// A clock that is set back holds nothing up.
	if got := p.Reserve("a", now.Add(-time.Hour)); got != 0 {
		t.Errorf("an hour earlier: %v", got)
	}
}
