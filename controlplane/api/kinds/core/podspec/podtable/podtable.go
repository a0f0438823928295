// Package podtable formats pods for the tables of kubectl.
package podtable

import (
	"fmt"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

// Columns are the table columns of Pods.
var Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Ready"), builder.StringColumn("Status"),
	builder.StringColumn("Restarts"), builder.AgeColumn,
	builder.WideColumn("IP"), builder.WideColumn("Node"), builder.WideColumn("Nominated Node"),
	builder.WideColumn("Readiness Gates"))

// nodeLost is the status reason of a pod on an unreachable node.
const nodeLost = "NodeLost"

// Row returns the table row of a Pod.
func Row(p *corev1.Pod, now time.Time) []any {
	s := summarizePod(p)
	restarts := strconv.Itoa(s.restarts)
	if s.restarts != 0 && !s.lastRestart.IsZero() {
		restarts += " (" + duration.HumanDuration(now.Sub(s.lastRestart)) + " ago)"
	}
	ip := p.Status.PodIP
	if len(p.Status.PodIPs) > 0 {
		ip = p.Status.PodIPs[0].IP
	}
	return []any{p.Name, fmt.Sprintf("%d/%d", s.ready, s.total), s.reason, restarts, builder.Age(p, now),
		builder.ValueOrNone(ip), builder.ValueOrNone(p.Spec.NodeName), builder.ValueOrNone(p.Status.NominatedNodeName),
		readinessGates(p)}
}

// Reason returns the text in kubectl's column STATUS for a pod.
func Reason(pod *corev1.Pod) string { return summarizePod(pod).reason }

// podSummary contains the values of a pod's table row.
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

func summarizePod(p *corev1.Pod) podSummary {
	s := podSummary{total: len(p.Spec.Containers), reason: string(p.Status.Phase)}
	if p.Status.Reason != "" {
		s.reason = p.Status.Reason
	}
	if c := api.PodCondition(p, corev1.PodScheduled); c != nil && c.Reason == corev1.PodReasonSchedulingGated {
		s.reason = corev1.PodReasonSchedulingGated
	}
	sidecars := map[string]bool{}
	for i := range p.Spec.InitContainers {
		if c := &p.Spec.InitContainers[i]; c.RestartPolicy != nil &&
			*c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
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
		case !api.IsPodTerminal(p):
			s.reason = "Terminating"
		}
	}
	return s
}

// walkInits summarizes the init containers in order, up to the one that blocks the pod's start. It
// counts the restarts of sidecars separately, because they always count. The restarts of other init
// containers count only during initialization.
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
		case sidecars[c.Name] && ptr.Deref(c.Started, false):
			if c.Ready {
				s.ready++
			}
		case t != nil:
			s.reason = "Init:" + terminationReason(t)
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

// walkContainers summarizes the containers in reverse order. The resulting reason is that of the
// first container that has a reason.
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
			s.reason = terminationReason(t)
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

func terminationReason(t *corev1.ContainerStateTerminated) string {
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

func isConditionTrue(p *corev1.Pod, t corev1.PodConditionType) bool {
	c := api.PodCondition(p, t)
	return c != nil && c.Status == corev1.ConditionTrue
}
