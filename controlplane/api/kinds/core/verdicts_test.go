package core_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
)

// A PersistentVolume has the time of its first phase, and a status without the time keeps it. F110
func TestPhaseTimeOfNewVolumes(t *testing.T) {
	k := kinds.All().ByType(&corev1.PersistentVolume{})
	created := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "a", CreationTimestamp: created}}
	k.Writes.PrepareCreate(v)
	if at := v.Status.LastPhaseTransitionTime; at == nil || !at.Equal(&created) {
		t.Errorf("lastPhaseTransitionTime of a new volume is %v, want %v", at, created)
	}
	next := v.DeepCopy()
	next.Status.LastPhaseTransitionTime = nil
	k.Subresources["status"].PrepareUpdate(next, v)
	if at := next.Status.LastPhaseTransitionTime; at == nil || !at.Equal(&created) {
		t.Errorf("lastPhaseTransitionTime after an update of the status is %v, want %v", at, created)
	}
}
