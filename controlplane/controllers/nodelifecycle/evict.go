package nodelifecycle

import (
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/controllers"
)

// EvictionAnnotation on a pod says after how many seconds on a lost or not ready
// node it is replaced, whatever its tolerations say; "never" keeps it.
const EvictionAnnotation = "keelson.dev/eviction-seconds"

// defaultedSeconds is what admission puts into a pod's tolerations for not-ready and unreachable
// when the user has said nothing. The cluster's own default stands in for it.
const defaultedSeconds = 300

// Eviction says when a pod must leave a node with these taints: at once or in the
// past = now. evict is false when it may stay for ever. fallback is how long a pod whose
// tolerations were only defaulted stays on a node that is lost or not ready.
func Eviction(p *corev1.Pod, taints []corev1.Taint, fallback time.Duration) (at time.Time, evict bool) {
	for i := range taints {
		t := &taints[i]
		if t.Effect != corev1.TaintEffectNoExecute {
			continue
		}
		stay, forever := tolerated(p, t, fallback)
		if forever {
			continue
		}
		var leave time.Time
		if t.TimeAdded != nil {
			leave = t.TimeAdded.Time
		}
		leave = leave.Add(stay)
		if !evict || leave.Before(at) {
			at, evict = leave, true
		}
	}
	return at, evict
}

// tolerated says how long a pod stays beside a taint.
func tolerated(p *corev1.Pod, t *corev1.Taint, fallback time.Duration) (stay time.Duration, forever bool) {
	lost := t.Key == corev1.TaintNodeNotReady || t.Key == corev1.TaintNodeUnreachable
	if v, ok := p.Annotations[EvictionAnnotation]; ok && lost {
		if v == "never" {
			return 0, true
		}
		if n, err := strconv.Atoi(v); err == nil && n >= 0 {
			return time.Duration(n) * time.Second, false
		}
	}
	found := false
	for i := range p.Spec.Tolerations {
		tol := &p.Spec.Tolerations[i]
		if !matches(tol, t) {
			continue
		}
		if tol.TolerationSeconds == nil {
			return 0, true
		}
		d := time.Duration(max(0, *tol.TolerationSeconds)) * time.Second
		if lost && defaulted(tol) {
			d = fallback
		}
		if !found || d < stay {
			stay, found = d, true
		}
	}
	return stay, false
}

// matches says whether a toleration speaks of a taint.
func matches(tol *corev1.Toleration, t *corev1.Taint) bool {
	if tol.Effect != "" && tol.Effect != t.Effect || tol.Key != "" && tol.Key != t.Key {
		return false
	}
	switch tol.Operator {
	case corev1.TolerationOpExists:
		return true
	case "", corev1.TolerationOpEqual:
		return tol.Key != "" && tol.Value == t.Value
	}
	return false
}

// defaulted recognises the toleration that admission adds.
func defaulted(tol *corev1.Toleration) bool {
	return tol.Key != "" && tol.Operator == corev1.TolerationOpExists && tol.Value == "" &&
		tol.TolerationSeconds != nil && *tol.TolerationSeconds == defaultedSeconds
}

// NotReady returns a pod's status with condition Ready false; changed is false
// when it was so already. The agent of a lost node cannot say it.
func NotReady(p *corev1.Pod, now time.Time) (s corev1.PodStatus, changed bool) {
	c := controllers.PodCondition(p, corev1.PodReady)
	if c == nil || c.Status != corev1.ConditionTrue {
		return p.Status, false
	}
	s = *p.Status.DeepCopy()
	for i := range s.Conditions {
		if s.Conditions[i].Type == corev1.PodReady {
			s.Conditions[i].Status = corev1.ConditionFalse
			s.Conditions[i].LastTransitionTime.Time = now
		}
	}
	return s, true
}
