package lifecycle

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// setConditions sets the pod conditions that the node computes, and keeps all other conditions.
func (g *statusBuilder) setConditions(status *v1.PodStatus) {
	_, sandbox := g.observed.ReadySandbox()
	g.setCondition(status, v1.PodReadyToStartContainers, sandbox, "", "")
	g.setInitialized(status)
	ready, reason, message := g.checkContainersReady(status)
	g.setCondition(status, v1.ContainersReady, ready, reason, message)
	if ready {
		for _, gate := range g.pod.Spec.ReadinessGates {
			c := FindCondition(g.pod.Status.Conditions, gate.ConditionType)
			switch {
			case c == nil:
				ready, reason, message = false, "ReadinessGatesNotReady",
					fmt.Sprintf("corresponding condition of pod readiness gate %q does not exist.", gate.ConditionType)
			case c.Status != v1.ConditionTrue:
				ready, reason, message = false, "ReadinessGatesNotReady",
					fmt.Sprintf("the status of pod readiness gate %q is not \"True\", but %v",
						gate.ConditionType, c.Status)
			}
		}
	}
	g.setCondition(status, v1.PodReady, ready, reason, message)
	if FindCondition(status.Conditions, v1.PodScheduled) == nil {
		g.setCondition(status, v1.PodScheduled, true, "", "")
	}
	g.setResizeConditions(status)
	if s := g.desired.Stop; s != nil && s.Disrupted {
		g.setCondition(status, v1.DisruptionTarget, true, v1.PodReasonTerminationByKubelet, s.Message)
	}
}

// setResizeConditions sets the conditions of a resize in progress. PodResizePending and
// PodResizeInProgress exist only while true.
func (g *statusBuilder) setResizeConditions(status *v1.PodStatus) {
	status.Conditions = slices.DeleteFunc(status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.PodResizePending && !g.isResizePending() ||
			c.Type == v1.PodResizeInProgress && !g.isResizeInProgress()
	})
	r := &g.observed.Resize
	if g.isResizePending() {
		g.setConditionAt(status, v1.PodResizePending, true, r.Pending, r.Message, r.RequestedGeneration)
	}
	if g.isResizeInProgress() {
		reason, message := "", ""
		if f, ok := g.observed.Failures[(Action{Kind: ResizePod}).Key()]; ok {
			reason, message = v1.PodReasonError, f.Message
		}
		g.setConditionAt(status, v1.PodResizeInProgress, true, reason, message, r.GrantedGeneration)
	}
}

// isResizePending reports whether the node has not granted the resources of the spec.
// isResizeInProgress reports whether granted resources are not fully in effect yet. Both return
// false for a pod that is stopping or has ended.
func (g *statusBuilder) isResizePending() bool {
	return g.observed.Resize.Pending != "" && g.desired.Stop == nil && !IsTerminal(g.pod)
}
func (g *statusBuilder) isResizeInProgress() bool {
	return g.observed.Resize.InProgress && g.desired.Stop == nil && !IsTerminal(g.pod)
}

func (g *statusBuilder) setInitialized(status *v1.PodStatus) {
	if status.Phase == v1.PodSucceeded {
		g.setCondition(status, v1.PodInitialized, true, "PodCompleted", "")
		return
	}
	var incomplete []string
	if !g.initialized {
		for i := range g.pod.Spec.InitContainers {
			c := &g.pod.Spec.InitContainers[i]
			cs, _ := findContainerStatus(status, c.Name)
			ok := cs.Ready
			if IsSidecar(g.pod, c) {
				ok = cs.Started != nil && *cs.Started
			}
			if !ok {
				incomplete = append(incomplete, c.Name)
			}
		}
	}
	if len(incomplete) > 0 {
		g.setCondition(status, v1.PodInitialized, false, "ContainersNotInitialized",
			fmt.Sprintf("containers with incomplete status: %s", formatNames(incomplete)))
		return
	}
	g.setCondition(status, v1.PodInitialized, true, "", "")
}

func (g *statusBuilder) checkContainersReady(status *v1.PodStatus) (ready bool, reason, message string) {
	switch status.Phase {
	case v1.PodSucceeded:
		return false, "PodCompleted", ""
	case v1.PodFailed:
		return false, "PodFailed", ""
	}
	var unready []string
	for i := range g.pod.Spec.InitContainers {
		c := &g.pod.Spec.InitContainers[i]
		if cs, _ := findContainerStatus(status, c.Name); IsSidecar(g.pod, c) && !cs.Ready {
			unready = append(unready, c.Name)
		}
	}
	for _, cs := range status.ContainerStatuses {
		if !cs.Ready {
			unready = append(unready, cs.Name)
		}
	}
	if len(unready) > 0 {
		return false, "ContainersNotReady", fmt.Sprintf("containers with unready status: %s", formatNames(unready))
	}
	return true, "", ""
}

func formatNames(names []string) string { return "[" + strings.Join(names, " ") + "]" }

// FindCondition returns the condition of a type, or nil.
func FindCondition(conds []v1.PodCondition, conditionType v1.PodConditionType) *v1.PodCondition {
	for i := range conds {
		if conds[i].Type == conditionType {
			return &conds[i]
		}
	}
	return nil
}

// setCondition sets one condition. Its transition time changes only with its status.
func (g *statusBuilder) setCondition(status *v1.PodStatus, conditionType v1.PodConditionType, value bool, reason,
	message string) {
	g.setConditionAt(status, conditionType, value, reason, message, g.pod.Generation)
}

func (g *statusBuilder) setConditionAt(st *v1.PodStatus, conditionType v1.PodConditionType, value bool, reason,
	message string, generation int64) {
	status := v1.ConditionFalse
	if value {
		status = v1.ConditionTrue
	}
	c := FindCondition(st.Conditions, conditionType)
	if c == nil {
		st.Conditions = append(st.Conditions, v1.PodCondition{Type: conditionType})
		c = &st.Conditions[len(st.Conditions)-1]
	}
	if c.Status != status {
		c.Status, c.LastTransitionTime = status, metav1.NewTime(g.currentTime)
	}
	c.Reason, c.Message, c.ObservedGeneration = reason, message, generation
}
