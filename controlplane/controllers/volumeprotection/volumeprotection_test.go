package volumeprotection

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestUses(t *testing.T) {
	pod := func(node string, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1"},
			Status: corev1.PodStatus{Phase: phase},
			Spec: corev1.PodSpec{NodeName: node, Volumes: []corev1.Volume{
				{Name: "a",
					VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
						ClaimName: "data"}}},
				{Name: "tmp", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}},
				{Name: "c", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			}}}
	}
	claim := func(ns, name string, owner types.UID) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
		if owner != "" {
			of := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", UID: owner}}
			c.OwnerReferences = []metav1.OwnerReference{
				*metav1.NewControllerRef(of, corev1.SchemeGroupVersion.WithKind("Pod"))}
		}
		return c
	}
	for _, c := range []struct {
		pod   *corev1.Pod
		claim *corev1.PersistentVolumeClaim
		want  bool
	}{
		{pod("w1", corev1.PodRunning), claim("ns", "data", ""), true},
		{pod("w1", corev1.PodRunning), claim("ns", "p-tmp", "u1"), true},
		{pod("w1", corev1.PodRunning), claim("ns", "p-tmp", "u0"), false},
		{pod("w1", corev1.PodRunning), claim("ns", "p-tmp", ""), false},
		{pod("w1", corev1.PodRunning), claim("other", "data", ""), false},
		{pod("", corev1.PodPending), claim("ns", "data", ""), false},
		{pod("w1", corev1.PodSucceeded), claim("ns", "data", ""), false},
	} {
		if got := Uses(c.pod, c.claim); got != c.want {
			t.Errorf("pod on %q, %s, uses %s/%s of %v: %v", c.pod.Spec.NodeName, c.pod.Status.Phase,
				c.claim.Namespace, c.claim.Name,
				c.claim.OwnerReferences, got)
		}
	}
}
