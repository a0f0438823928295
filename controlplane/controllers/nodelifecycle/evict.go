package nodelifecycle

import (
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// EvictionAnnotation on a pod is the number of seconds after which the pod is evicted from a node
// that is lost or not ready. It overrides the pod's tolerations. Value "never" disables the
// eviction.
const EvictionAnnotation = "keelson.dev/eviction-seconds"

// Eviction returns the time at which a pod must leave a node with these taints. A time in the past
// means at once. evict is false if the pod may stay. For the taints of a lost or not ready node,
// the toleration time starts at notBefore or at the time of the taint, whichever is later.
func Eviction(p *corev1.Pod, taints []corev1.Taint, notBefore time.Time) (at time.Time, evict bool) {
	for i := range taints {
		t := &taints[i]
		if t.Effect != corev1.TaintEffectNoExecute {
			continue
		}
		stay, forever := tolerationTime(p, t)
		if forever {
			continue
		}
		var leave time.Time
		if t.TimeAdded != nil {
			leave = t.TimeAdded.Time
		}
		if isLost(t) && leave.Before(notBefore) {
			leave = notBefore
		}
		leave = leave.Add(stay)
		if !evict || leave.Before(at) {
			at, evict = leave, true
		}
	}
	return at, evict
}

func isLost(t *corev1.Taint) bool {
	return t.Key == corev1.TaintNodeNotReady || t.Key == corev1.TaintNodeUnreachable
}

// tolerationTime returns how long pod p may stay on a node with taint t. forever is true if the
// time is unlimited; stay is then 0. If t is the taint of a lost or not ready node,
// EvictionAnnotation has precedence over the pod's tolerations, including those that admission
// added.
func tolerationTime(p *corev1.Pod, t *corev1.Taint) (stay time.Duration, forever bool) {
	if v, ok := p.Annotations[EvictionAnnotation]; ok && isLost(t) {
		if v == "never" {
			return 0, true
		}
		if n, err := strconv.Atoi(v); err == nil && n >= 0 {
			return time.Duration(n) * time.Second, false
		}
	}
	for i := range p.Spec.Tolerations { // the first toleration that matches the taint applies, as in Kubernetes
		if tol := &p.Spec.Tolerations[i]; engine.ToleratesTaint(tol, t) {
			if tol.TolerationSeconds == nil {
				return 0, true
			}
			return time.Duration(max(0, *tol.TolerationSeconds)) * time.Second, false
		}
	}
	return 0, false
}

// NotReady returns the status of pod p with condition Ready set to False. The controller writes it
// for a pod of a lost node, because the node's agent cannot. changed is false if the condition was
// not True.
func NotReady(p *corev1.Pod, now time.Time) (s corev1.PodStatus, changed bool) {
	c := api.PodCondition(p, corev1.PodReady)
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
