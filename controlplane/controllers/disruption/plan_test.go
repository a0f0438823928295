package disruption

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func pod(name string, ready corev1.ConditionStatus) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}}}
}

// Healthy pods beyond the desired number may be disrupted. An evicted pod counts as disrupted until
// it is deleted, or for two minutes.
func TestStatus(t *testing.T) {
	now := time.Unix(1000, 0)
	half := intstr.FromString("50%")
	one := intstr.FromInt32(1)
	three := []*corev1.Pod{pod("a", "True"), pod("b", "True"), pod("c", "False")}
	for _, c := range []struct {
		name                              string
		spec                              policyv1.PodDisruptionBudgetSpec
		spent                             map[string]metav1.Time
		pods                              []*corev1.Pod
		expected                          int
		healthy, desired, allowed, spends int32
		again                             time.Duration
	}{
		{"half of four", policyv1.PodDisruptionBudgetSpec{MinAvailable: &half}, nil, append(three, pod("d", "True")), 4,
			3, 2, 1, 0, 0},
		{"one may be away, one is", policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &one}, nil, three, 3,
			2, 2, 0, 0, 0},
		{"all are there", policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &one}, nil, three[:2], 2, 2, 1, 1, 0, 0},
		{"one was evicted", policyv1.PodDisruptionBudgetSpec{MinAvailable: &one},
			map[string]metav1.Time{"a": metav1.NewTime(now.Add(-time.Minute)), "gone": metav1.NewTime(now)},
			three, 3, 1, 1, 0, 1, time.Minute},
		{"one was evicted long ago", policyv1.PodDisruptionBudgetSpec{MinAvailable: &one},
			map[string]metav1.Time{"a": metav1.NewTime(now.Add(-time.Hour))}, three, 3, 2, 1, 1, 0, 0},
		{"no pods", policyv1.PodDisruptionBudgetSpec{MinAvailable: &one}, nil, nil, 0, 0, 1, 0, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Generation: 3}, Spec: c.spec,
				Status: policyv1.PodDisruptionBudgetStatus{DisruptedPods: c.spent}}
			s, again, err := Status(b, c.pods, c.expected, nil, now)
			if err != nil || s.CurrentHealthy != c.healthy || s.DesiredHealthy != c.desired ||
				s.DisruptionsAllowed != c.allowed ||
				int32(len(s.DisruptedPods)) != c.spends || s.ExpectedPods != int32(c.expected) ||
				s.ObservedGeneration != 3 || again != c.again {
				t.Errorf("%+v again in %s, %v", s, again, err)
			}
			if meta.IsStatusConditionTrue(s.Conditions, policyv1.DisruptionAllowedCondition) != (c.allowed > 0) {
				t.Errorf("conditions %+v", s.Conditions)
			}
			b.Status = s
			if s2, _, _ := Status(b, c.pods, c.expected, nil,
				now.Add(time.Second)); !s2.Conditions[0].LastTransitionTime.Equal(&s.Conditions[0].LastTransitionTime) {
				t.Error("the condition moves without a change")
			}
		})
	}
}
