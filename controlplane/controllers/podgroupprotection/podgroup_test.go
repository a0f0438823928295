package podgroupprotection_test

import (
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api/kinds/scheduling"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/podgroupprotection"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
)

// A deleted PodGroup stays until the pods that name it have ended or are deleted; a PodGroup
// without pods is deleted at once.
func TestPodGroupProtection(t *testing.T) {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
		Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{podgroupprotection.New(d)}
		}})
	w.Lead(engine.Options{})
	for _, name := range []string{"g", "empty"} {
		w.CreateObject(&schedulingv1beta1.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
			Finalizers: []string{scheduling.PodGroupProtection}},
			Spec: schedulingv1beta1.PodGroupSpec{SchedulingPolicy: schedulingv1beta1.PodGroupSchedulingPolicy{
				Basic: &schedulingv1beta1.BasicSchedulingPolicy{}}}})
	}
	group := "g"
	for _, name := range []string{"ends", "goes"} {
		w.CreateObject(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.PodSpec{
				SchedulingGroup: &corev1.PodSchedulingGroup{PodGroupName: &group},
				Containers:      []corev1.Container{{Name: "c", Image: "i"}}}})
	}
	gone := func(name string) func() error {
		return func() error {
			_, err := client.Get[*schedulingv1beta1.PodGroup](w.Ctx, w.Admin, "default", name)
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(err, errors.New("it is there"))
		}
	}
	remove := func(name string) {
		t.Helper()
		if err := client.Delete[*schedulingv1beta1.PodGroup](w.Ctx, w.Admin, "default", name,
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	remove("g")
	remove("empty")
	w.Eventually("the group without pods", gone("empty"))
	if gone("g")() == nil {
		t.Fatal("the group is gone while its pods are there")
	}
	if _, err := client.Patch[*corev1.Pod](w.Ctx, w.Admin, "default", "ends", "status", types.MergePatchType,
		[]byte(`{"status":{"phase":"Succeeded"}}`)); err != nil {
		t.Fatal(err)
	}
	if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "goes",
		metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("the group whose pods have ended", gone("g"))
}
