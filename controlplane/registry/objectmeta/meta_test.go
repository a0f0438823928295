package objectmeta

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestGenerateName(t *testing.T) {
	for _, base := range []string{"", "web-", strings.Repeat("x", 100)} {
		name := GenerateName(base, RandomSuffix(SuffixLength))
		if len(name) > 63 || !strings.HasPrefix(name, base[:min(len(base), 58)]) || len(name) < SuffixLength {
			t.Errorf("%q becomes %q", base, name)
		}
	}
}

func TestFieldManagerName(t *testing.T) {
	for _, c := range [][3]string{{"kubectl", "x/1", "kubectl"}, {"", "kubectl/v1.37 (linux)", "kubectl"},
		{"", strings.Repeat("a", 200), strings.Repeat("a", 128)}} {
		if got := FieldManagerName(c[0], c[1]); got != c[2] {
			t.Errorf("option %q, agent %q: %q, want %q", c[0], c[1], got, c[2])
		}
	}
}

// Metadata that only the server sets is reset on a new object, and kept by an update.
func TestServerMetadata(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	old := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "mine", Generation: 7,
		DeletionTimestamp: &metav1.Time{Time: now}}}
	InitMeta(old, "u", now)
	if old.UID != "u" || old.Generation != 0 || old.DeletionTimestamp != nil ||
		!old.CreationTimestamp.Equal(&metav1.Time{Time: now.Truncate(time.Second)}) {
		t.Errorf("a new object has %+v", old.ObjectMeta)
	}
	next := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "other", Generation: 9,
		Labels: map[string]string{"a": "b"}}}
	KeepMeta(next, old)
	if next.UID != "u" || next.Generation != 0 || next.CreationTimestamp != old.CreationTimestamp ||
		next.Labels["a"] != "b" {
		t.Errorf("an update has %+v", next.ObjectMeta)
	}
}
