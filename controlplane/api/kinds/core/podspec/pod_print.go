package podspec

import (
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"

	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

var podColumns = builder.Columns(builder.NameColumn, builder.StringColumn("Ready"), builder.StringColumn("Status"),
	builder.StringColumn("Restarts"), builder.AgeColumn,
	builder.WideColumn("IP"), builder.WideColumn("Node"), builder.WideColumn("Nominated Node"), builder.WideColumn("Readiness Gates"))

// nodeLost is the reason of a pod on an unreachable node.
const nodeLost = "NodeLost"

// PodRow returns the table row of a Pod.
func PodRow(p *corev1.Pod, now time.Time) []any {
	s := summarize(p)
	restarts := strconv.Itoa(s.restarts)
	if s.restarts != 0 && !s.lastRestart.IsZero() {
		restarts += " (" + duration.HumanDuration(now.Sub(s.lastRestart)) + " ago)"
	}
	ip := p.Status.PodIP
	if len(p.Status.PodIPs) > 0 {
		ip = p.Status.PodIPs[0].IP
	}
	return []any{p.Name, fmt.Sprintf("%d/%d", s.ready, s.total), s.reason, restarts, builder.Age(p, now),
		builder.OrNone(ip), builder.OrNone(p.Spec.NodeName), builder.OrNone(p.Status.NominatedNodeName), readinessGates(p)}
}

// PodReason returns the STATUS column of a pod in kubectl.
func PodReason(p *corev1.Pod) string { return summarize(p).reason }

// podSummary has the values of a pod's table row.
type podSummary struct {
	ready, total int
	reason       string
	restarts     int
	lastRestart  time.Time
}

// countRestart adds the restarts of one container.
func (s *podSummary) countRestart(c *corev1.ContainerStatus) {
	s.restarts += int(c.RestartCount)
	if t := c.LastTerminationState.Terminated; t != nil && t.FinishedAt.Time.After(s.lastRestart) {
		s.lastRestart = t.FinishedAt.Time
	}
}

func summarize(p *corev1.Pod) podSummary {
	s := podSummary{total: len(p.Spec.Containers), reason: string(p.Status.Phase)}
	if p.Status.Reason != "" {
		s.reason = p.Status.Reason
	}
	if c := PodCondition(p, corev1.PodScheduled); c != nil && c.Reason == corev1.PodReasonSchedulingGated {
		s.reason = corev1.PodReasonSchedulingGated
	}
	sidecars := map[string]bool{}
	for i := range p.Spec.InitContainers {
		if c := &p.Spec.InitContainers[i]; c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			sidecars[c.Name] = true
		}
	}
	s.total += len(sidecars)
	inits := s
	sidecarRestarts, initializing := inits.walkInits(p, sidecars)
	s.ready = inits.ready
	if initializing && !isConditionTrue(p, corev1.PodInitialized) {
		s = inits
	} else {
		s.restarts, s.lastRestart = sidecarRestarts.restarts, sidecarRestarts.lastRestart
		s.walkContainers(p)
	}
	if p.DeletionTimestamp != nil {
		switch {
		case p.Status.Reason == nodeLost:
			s.reason = "Unknown"
		case p.Status.Phase != corev1.PodSucceeded && p.Status.Phase != corev1.PodFailed:
			s.reason = "Terminating"
		}
	}
	return s
}

// walkInits summarizes the init containers in order, up to the one that blocks the pod's start. It
// counts the restarts of sidecars separately: they always count, those of other init containers
// only during initialization.
func (s *podSummary) walkInits(p *corev1.Pod, sidecars map[string]bool) (sidecarRestarts podSummary,
	initializing bool) {
	for i := range p.Status.InitContainerStatuses {
		c := &p.Status.InitContainerStatuses[i]
		s.countRestart(c)
		if sidecars[c.Name] {
			sidecarRestarts.countRestart(c)
		}
		t, w := c.State.Terminated, c.State.Waiting
		switch {
		case t != nil && t.ExitCode == 0:
		case sidecars[c.Name] && fieldrules.IsTrue(c.Started):
			if c.Ready {
				s.ready++
			}
		case t != nil:
			s.reason = "Init:" + ended(t)
			return sidecarRestarts, true
		case w != nil && w.Reason != "" && w.Reason != "PodInitializing":
			s.reason = "Init:" + w.Reason
			return sidecarRestarts, true
		default:
			s.reason = fmt.Sprintf("Init:%d/%d", i, len(p.Spec.InitContainers))
			return sidecarRestarts, true
		}
	}
	return sidecarRestarts, false
}

// walkContainers summarizes the containers in reverse order, so that the reason of the first
// container with a reason remains.
func (s *podSummary) walkContainers(p *corev1.Pod) {
	running := false
	for i := len(p.Status.ContainerStatuses) - 1; i >= 0; i-- {
		c := &p.Status.ContainerStatuses[i]
		s.countRestart(c)
		t, w := c.State.Terminated, c.State.Waiting
		switch {
		case w != nil && w.Reason != "":
			s.reason = w.Reason
		case t != nil:
			s.reason = ended(t)
		case c.Ready && c.State.Running != nil:
			running = true
			s.ready++
		}
	}
	if s.reason == "Completed" && running {
		s.reason = "NotReady"
		if isConditionTrue(p, corev1.PodReady) {
			s.reason = "Running"
		}
	}
}

func ended(t *corev1.ContainerStateTerminated) string {
	switch {
	case t.Reason != "":
		return t.Reason
	case t.Signal != 0:
		return fmt.Sprintf("Signal:%d", t.Signal)
	}
	return fmt.Sprintf("ExitCode:%d", t.ExitCode)
}

func readinessGates(p *corev1.Pod) string {
	if len(p.Spec.ReadinessGates) == 0 {
		return builder.None
	}
	passed := 0
	for _, g := range p.Spec.ReadinessGates {
		if isConditionTrue(p, g.ConditionType) {
			passed++
		}
	}
	return fmt.Sprintf("%d/%d", passed, len(p.Spec.ReadinessGates))
}

// PodCondition returns the condition of a type, or nil.
func PodCondition(p *corev1.Pod, t corev1.PodConditionType) *corev1.PodCondition {
	for i := range p.Status.Conditions {
		if p.Status.Conditions[i].Type == t {
			return &p.Status.Conditions[i]
		}
	}
	return nil
}

func isConditionTrue(p *corev1.Pod, t corev1.PodConditionType) bool {
	c := PodCondition(p, t)
	return c != nil && c.Status == corev1.ConditionTrue
}
