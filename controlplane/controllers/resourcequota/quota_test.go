package resourcequota_test

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/quota"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/resourcequota"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// A quota is recounted if it is new, has a new spec, or if its objects were deleted without an
// update of the usage.
func TestQuotasAreCounted(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{resourcequota.New(d)}
		}})
		for i := range 3 {
			w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
				Name: fmt.Sprint("c", i)}})
		}
		q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "q"},
			Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"configmaps": resource.MustParse("9")}}}
		w.CreateObject(q)
		shows := func(want string) {
			t.Helper()
			w.Eventually("the quota", func() error {
				now, err := client.Get[*corev1.ResourceQuota](w.Ctx, w.Admin, "default", "q")
				if err != nil {
					return err
				}
				if got := quota.Format(now.Status.Hard) + " " + quota.Format(now.Status.Used); got != want {
					return fmt.Errorf("it shows %q, want %q", got, want)
				}
				return nil
			})
		}
		shows("configmaps=9 configmaps=3")
		unadmitted := w.EarlierRelease(nil) // its deletions do not update the usage
		if err := client.Delete[*corev1.ConfigMap](w.Ctx, unadmitted, "default", "c0", metav1.DeleteOptions{}); err !=
			nil {
			t.Fatal(err)
		}
		shows("configmaps=9 configmaps=2")
		now, err := client.Get[*corev1.ResourceQuota](w.Ctx, w.Admin, "default", "q")
		if err != nil {
			t.Fatal(err)
		}
		now = now.DeepCopy()
		now.Spec.Hard["secrets"] = resource.MustParse("1")
		if now, err = client.Update(w.Ctx, w.Admin, now); err != nil {
			t.Fatal(err)
		}
		shows("configmaps=9,secrets=1 configmaps=2,secrets=0")
	})
}

// A terminating pod counts until its grace period has passed; the quota is then recounted.
func TestQuotaOfPodsThatStay(t *testing.T) {
	now := time.Unix(1000, 0)
	grace := int64(10)
	going := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", DeletionTimestamp: &metav1.Time{Time: now},
		DeletionGracePeriodSeconds: &grace}}
	q :=
		&corev1.ResourceQuota{Spec: corev1.ResourceQuotaSpec{
			Hard: corev1.ResourceList{"pods": resource.MustParse("1")}}}
	for _, c := range []struct {
		after time.Duration
		used  string
		again bool
	}{{0, "pods=1", true}, {10 * time.Second, "pods=1", true}, {11 * time.Second, "pods=0", false}} {
		status, changed, again, err := resourcequota.PlanQuota(q, now.Add(c.after),
			func(schema.GroupResource) ([]api.Object, bool, error) {
				return []api.Object{going}, true, nil
			})
		if got := quota.Format(status.Used); err != nil || !changed || got != c.used || again > 0 != c.again {
			t.Errorf("after %v: %s, again %v, %v", c.after, got, again, err)
		}
	}
}
