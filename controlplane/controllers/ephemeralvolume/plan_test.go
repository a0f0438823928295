package ephemeralvolume

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// One claim is created for each ephemeral volume of a pod. None is created if another claim has the
// name, or for a terminating or terminal pod.
func TestPlan(t *testing.T) {
	class := "fast"
	ephemeral := func(name string) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{
			VolumeClaimTemplate: &corev1.PersistentVolumeClaimTemplate{
				ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"l": name},
					Annotations: map[string]string{"a": name}},
				Spec: corev1.PersistentVolumeClaimSpec{StorageClassName: &class},
			}}}}
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1"},
		Spec: corev1.PodSpec{Volumes: []corev1.Volume{
			ephemeral("one"),
			{Name: "plain", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			ephemeral("two")}}}
	missing, taken := PlanClaims(pod, func(string) (*corev1.PersistentVolumeClaim, bool) { return nil, false })
	if len(missing) != 2 || len(taken) != 0 {
		t.Fatalf("%d missing, %v", len(missing), taken)
	}
	have := map[string]*corev1.PersistentVolumeClaim{}
	for i, volume := range []string{"one", "two"} {
		c := missing[i]
		if ref := metav1.GetControllerOf(c); ref == nil || ref.UID != "u1" || ref.Kind != "Pod" ||
			ref.BlockOwnerDeletion == nil || !*ref.BlockOwnerDeletion ||
			c.Name != "p-"+volume || c.Namespace != "ns" || c.Labels["l"] != volume || c.Annotations["a"] != volume ||
			*c.Spec.StorageClassName != class {
			t.Errorf("volume %s: %+v", volume, c)
		}
		have[c.Name] = c
	}
	find := func(name string) (*corev1.PersistentVolumeClaim, bool) { c, ok := have[name]; return c, ok }
	result := func() string {
		missing, taken := PlanClaims(pod, find)
		return fmt.Sprint(len(missing), taken)
	}
	for _, step := range []struct {
		what   string
		change func()
		want   string
	}{
		{"both there", func() {}, "0 []"},
		{"a pod of its name before", func() {
			have["p-one"].OwnerReferences[0].UID = "u0"
		}, "0 [{one PVC ns/p-one was not created for pod ns/p (pod is not owner)}]"},
		{"nobody's", func() {
			have["p-one"].OwnerReferences = nil
		}, "0 [{one PVC ns/p-one was not created for pod ns/p (pod is not owner)}]"},
		{"that one is gone", func() { delete(have, "p-one") }, "1 []"},
		{"the pod has ended", func() { pod.Status.Phase = corev1.PodSucceeded }, "0 []"},
		{"the pod goes", func() {
			pod.Status.Phase, pod.DeletionTimestamp = corev1.PodRunning, &metav1.Time{Time: time.Unix(1, 0)}
		}, "0 []"},
	} {
		step.change()
		if got := result(); got != step.want {
			t.Errorf("%s: %s, want %s", step.what, got, step.want)
		}
	}
}
