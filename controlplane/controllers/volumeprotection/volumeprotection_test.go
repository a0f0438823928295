package volumeprotection

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestFinalizers(t *testing.T) {
	going := &metav1.Time{Time: time.Unix(1, 0)}
	for _, c := range []struct {
		name    string
		have    []string
		deleted *metav1.Time
		inUse   bool
		want    string
	}{
		{"marked at birth", []string{"other"}, nil, false, "[other m] true"},
		{"marked already", []string{"m"}, nil, false, "[m] false"},
		{"deleted and in use", []string{"m", "other"}, going, true, "[m other] false"},
		{"deleted and free", []string{"m", "other"}, going, false, "[other] true"},
		{"deleted, never marked", []string{"other"}, going, true, "[other] false"},
	} {
		want, changed := Finalizers(&metav1.ObjectMeta{Finalizers: c.have, DeletionTimestamp: c.deleted}, "m", c.inUse)
		if got := fmt.Sprint(want, changed); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

func TestUses(t *testing.T) {
	pod := func(node string, phase corev1.PodPhase) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}, Status: corev1.PodStatus{Phase: phase},
			Spec: corev1.PodSpec{NodeName: node, Volumes: []corev1.Volume{
				{Name: "a", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}},
				{Name: "tmp", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}},
				{Name: "c", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			}}}
	}
	for _, c := range []struct {
		pod   *corev1.Pod
		claim string
		want  bool
	}{
		{pod("w1", corev1.PodRunning), "ns/data", true}, {pod("w1", corev1.PodRunning), "ns/p-tmp", true},
		{pod("w1", corev1.PodRunning), "other/data", false}, {pod("", corev1.PodPending), "ns/data", false},
		{pod("w1", corev1.PodSucceeded), "ns/data", false},
	} {
		if got := Uses(c.pod, c.claim); got != c.want {
			t.Errorf("pod on %q, %s, uses %s: %v", c.pod.Spec.NodeName, c.pod.Status.Phase, c.claim, got)
		}
	}
}
