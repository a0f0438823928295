package pod

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// conditions sets the pod conditions that a node owns and keeps all others.
func (g *gen) conditions(st *v1.PodStatus) {
	_, sandbox := g.o.sandbox()
	g.condition(st, v1.PodReadyToStartContainers, sandbox, "", "")
	g.initialized(st)
	ready, reason, message := g.containersReady(st)
	g.condition(st, v1.ContainersReady, ready, reason, message)
	if ready {
		for _, gate := range g.pod.Spec.ReadinessGates {
			c := find(g.pod.Status.Conditions, gate.ConditionType)
			switch {
			case c == nil:
				ready, reason, message = false, "ReadinessGatesNotReady", fmt.Sprintf("corresponding condition of pod readiness gate %q does not exist.", gate.ConditionType)
			case c.Status != v1.ConditionTrue:
				ready, reason, message = false, "ReadinessGatesNotReady", fmt.Sprintf("the status of pod readiness gate %q is not \"True\", but %v", gate.ConditionType, c.Status)
			}
		}
	}
	g.condition(st, v1.PodReady, ready, reason, message)
	if find(st.Conditions, v1.PodScheduled) == nil {
		g.condition(st, v1.PodScheduled, true, "", "")
	}
	g.resizing(st)
	if s := g.d.Stop; s != nil && s.Disrupted {
		g.condition(st, v1.DisruptionTarget, true, v1.PodReasonTerminationByKubelet, s.Message)
	}
}

// resizing sets the conditions of a resize in progress. PodResizePending and PodResizeInProgress
// exist only while true.
func (g *gen) resizing(st *v1.PodStatus) {
	st.Conditions = slices.DeleteFunc(st.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.PodResizePending && !g.pendingResize() || c.Type == v1.PodResizeInProgress && !g.openResize()
	})
	r := &g.o.Resize
	if g.pendingResize() {
		g.conditionOf(st, v1.PodResizePending, true, r.Pending, r.Message, r.Asked)
	}
	if g.openResize() {
		reason, message := "", ""
		if f, ok := g.o.Failures[(Action{Kind: ResizePod}).Key()]; ok {
			reason, message = v1.PodReasonError, f.Message
		}
		g.conditionOf(st, v1.PodResizeInProgress, true, reason, message, r.Granted)
	}
}

// pendingResize reports whether the node has not granted the resources of the spec. openResize
// reports whether granted resources are not fully in effect yet. Both return false for a pod that
// is stopping or has ended.
func (g *gen) pendingResize() bool {
	return g.o.Resize.Pending != "" && g.d.Stop == nil && !final(g.pod)
}
func (g *gen) openResize() bool { return g.o.Resize.Open && g.d.Stop == nil && !final(g.pod) }

func (g *gen) initialized(st *v1.PodStatus) {
	if st.Phase == v1.PodSucceeded {
		g.condition(st, v1.PodInitialized, true, "PodCompleted", "")
		return
	}
	var incomplete []string
	if !g.initDone {
		for i := range g.pod.Spec.InitContainers {
			c := &g.pod.Spec.InitContainers[i]
			cs, _ := lastStatus(st, c.Name)
			ok := cs.Ready
			if sidecar(g.pod, c) {
				ok = cs.Started != nil && *cs.Started
			}
			if !ok {
				incomplete = append(incomplete, c.Name)
			}
		}
	}
	if len(incomplete) > 0 {
		g.condition(st, v1.PodInitialized, false, "ContainersNotInitialized", fmt.Sprintf("containers with incomplete status: %s", list(incomplete)))
		return
	}
	g.condition(st, v1.PodInitialized, true, "", "")
}

func (g *gen) containersReady(st *v1.PodStatus) (ready bool, reason, message string) {
	switch st.Phase {
	case v1.PodSucceeded:
		return false, "PodCompleted", ""
	case v1.PodFailed:
		return false, "PodFailed", ""
	}
	var unready []string
	for i := range g.pod.Spec.InitContainers {
		c := &g.pod.Spec.InitContainers[i]
		if cs, _ := lastStatus(st, c.Name); sidecar(g.pod, c) && !cs.Ready {
			unready = append(unready, c.Name)
		}
	}
	for _, cs := range st.ContainerStatuses {
		if !cs.Ready {
			unready = append(unready, cs.Name)
		}
	}
	if len(unready) > 0 {
		return false, "ContainersNotReady", fmt.Sprintf("containers with unready status: %s", list(unready))
	}
	return true, "", ""
}

func list(names []string) string { return "[" + strings.Join(names, " ") + "]" }

func find(conds []v1.PodCondition, t v1.PodConditionType) *v1.PodCondition {
	for i := range conds {
		if conds[i].Type == t {
			return &conds[i]
		}
	}
	return nil
}

// condition sets one condition. Its transition time changes only with its status.
func (g *gen) condition(st *v1.PodStatus, t v1.PodConditionType, value bool, reason, message string) {
	g.conditionOf(st, t, value, reason, message, g.pod.Generation)
}

func (g *gen) conditionOf(st *v1.PodStatus, t v1.PodConditionType, value bool, reason, message string, generation int64) {
	status := v1.ConditionFalse
	if value {
		status = v1.ConditionTrue
	}
	c := find(st.Conditions, t)
	if c == nil {
		st.Conditions = append(st.Conditions, v1.PodCondition{Type: t})
		c = &st.Conditions[len(st.Conditions)-1]
	}
	if c.Status != status {
		c.Status, c.LastTransitionTime = status, metav1.NewTime(g.now)
	}
	c.Reason, c.Message, c.ObservedGeneration = reason, message, generation
}
