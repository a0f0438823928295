package volumeattach

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// F110: an agent with --fence-after=5m (or 0, never) stops its pods with attached volumes after
// that time without a control plane. When its Node is deleted, no control plane accepts the agent
// any longer. The Node counts as fenced once the agent has stopped the pods.
func TestDeletedNodeKeepsItsFence(t *testing.T) {
	for _, fence := range []string{"300", "0"} {
		s := &fenceTracker{since: map[string]time.Time{}}
		now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1",
			Annotations: map[string]string{api.AnnotationFencesAfter: fence}},
			Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady,
				Status: corev1.ConditionTrue}}}}
		s.observeNode(n) // the node is ready and reports its fence
		if h := s.assessNode("w1", n, now); h.Fenced {
			t.Fatal("a ready node counts as fenced")
		}
		s.assessNode("w1", nil, now) // kubectl delete node w1
		h := s.assessNode("w1", nil, now.Add(41*time.Second))
		if h.Fenced {
			t.Errorf("--fence-after=%s: 41 s after its Node was deleted the volumes of w1 go to another node; "+
				"its agent ends the pods that use them after %s s without a control plane (0 = never)", fence, fence)
		}
	}
}

// F110: of the fences that are known of a deleted Node the longest holds, and absence at least. A fence
// that is not a number counts as never.
func TestFencesOfADeletedNode(t *testing.T) {
	at := func(sec int) time.Time { return time.Unix(int64(sec), 0) }
	for _, c := range []struct {
		name     string
		reported string
		kept     []string
		fences   int // seconds after the deletion; 0 = never
	}{
		{"nothing is known", "", nil, 40},
		{"the default", "20", []string{"20"}, 40},
		{"kept by an attachment alone", "", []string{"300"}, 305},
		{"reported alone", "300", nil, 305},
		{"the attachment is behind", "300", []string{"20"}, 305},
		{"another attachment is behind", "", []string{"20", "300"}, 305},
		{"never", "", []string{"20", "0"}, 0},
		{"no number", "", []string{"soon"}, 0},
	} {
		s := &fenceTracker{since: map[string]time.Time{}}
		if c.reported != "" {
			s.observeNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1",
				Annotations: map[string]string{api.AnnotationFencesAfter: c.reported}}})
		}
		begin := s.assessNode("w1", nil, at(100), c.kept...)
		if want := time.Duration(c.fences) * time.Second; begin.Fenced || begin.Fences != want {
			t.Errorf("%s: at the deletion fenced %v, in %s, want %s", c.name, begin.Fenced, begin.Fences, want)
		}
		if c.fences == 0 {
			if h := s.assessNode("w1", nil, at(100_000), c.kept...); h.Fenced || h.Fences != 0 {
				t.Errorf("%s: fenced %v, in %s", c.name, h.Fenced, h.Fences)
			}
			continue
		}
		if h := s.assessNode("w1", nil, at(100+c.fences-1), c.kept...); h.Fenced || h.Fences != time.Second {
			t.Errorf("%s: a second before: fenced %v, in %s", c.name, h.Fenced, h.Fences)
		}
		if h := s.assessNode("w1", nil, at(100+c.fences), c.kept...); !h.Fenced {
			t.Errorf("%s: not fenced after %d s", c.name, c.fences)
		}
	}
}

// F110: the number of recorded fences is bounded, however many node names there are.
func TestRememberedFencesAreBounded(t *testing.T) {
	s := &fenceTracker{since: map[string]time.Time{}}
	for i := range 3 * maxSilent {
		s.observeNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i),
			Annotations: map[string]string{api.AnnotationFencesAfter: "20"}}})
		if len(s.reported) > maxSilent {
			t.Fatalf("%d fences are remembered", len(s.reported))
		}
	}
}
