package pod

import (
	"bytes"
	"reflect"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// statusReporter computes and reports the pod's status, and reports the stages of the pod's start,
// which are measured steps with their duration. Its fields are guarded by worker.mu, except
// received, which is constant.
type statusReporter struct {
	w          *worker
	received   time.Time
	last       v1.PodStatus // last computed
	sent       v1.PodStatus // last reported
	heldSince  time.Time    // since when an unsent minor change is held back; zero: no change is held back
	reported   bool         // this agent process has sent a status
	checkDue   bool         // compare the sent status with the API's
	stagesDone bool         // an earlier agent process reported the stages
	wasReady   bool
}

// Minor status changes are held back, so that one report can contain several of them. Each report
// is a write in the cluster, and the next report of the pod waits for its acknowledgment. A change
// is held back for holdBack, or for holdBackDeleting while the pod is being deleted. Therefore a
// pod that is deleted quickly reports no minor changes.
const (
	holdBack         = 25 * time.Millisecond
	holdBackDeleting = time.Second
)

// reportStatus sends the pod's status if it differs from the status that was sent last. If it holds
// back a minor change, it returns the time at which the caller must call it again; otherwise due is
// zero.
func (sr *statusReporter) reportStatus(desired lifecycle.Desired, observed lifecycle.Observed,
	currentTime time.Time) (due time.Time) {
	if desired.Stop != nil && desired.Stop.Orphan {
		return due
	}
	sr.w.mu.Lock()
	last := sr.last
	sr.w.mu.Unlock()
	// Conditions that others own (readiness gates, DisruptionTarget) come from the object.
	last = *last.DeepCopy()
	for _, c := range desired.Pod.Status.Conditions {
		if !nodeConditions[c.Type] {
			if previous := lifecycle.FindCondition(last.Conditions, c.Type); previous != nil {
				*previous = c
			} else {
				last.Conditions = append(last.Conditions, c)
			}
		}
	}
	st := lifecycle.Status(desired, observed, last, sr.w.cfg.statusHost(), currentTime)
	ready := lifecycle.FindCondition(st.Conditions, v1.PodReady)
	sr.w.mu.Lock()
	required := !sr.reported || sr.checkDue && !equalStatuses(&st, &desired.Pod.Status)
	send := required || !reflect.DeepEqual(st, sr.sent)
	switch {
	case !send:
		sr.heldSince = time.Time{}
	case required || isSignificantChange(&sr.sent, &st):
	default:
		hold := holdBack
		if desired.Stop != nil && desired.Stop.Delete {
			hold = holdBackDeleting
		}
		if sr.heldSince.IsZero() {
			sr.heldSince = currentTime
		}
		if due = sr.heldSince.Add(hold); currentTime.Before(due) {
			send = false
		}
	}
	if send {
		sr.sent, sr.heldSince, due = st, time.Time{}, time.Time{}
	}
	first := !sr.wasReady && !sr.stagesDone && ready != nil && ready.Status == v1.ConditionTrue
	ended := agent.IsTerminalPhase(st.Phase) && !agent.IsTerminalPhase(sr.last.Phase)
	sr.last, sr.reported, sr.checkDue, sr.wasReady = st, true, false, sr.wasReady || first
	sr.w.mu.Unlock()
	if ended {
		sr.w.resizer.onFreed() // another pod's resize may have waited for this pod's resources
	}
	if send {
		sr.w.cfg.Deps.Reporter.PodStatus(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: desired.Pod.Namespace,
			Name: desired.Pod.Name, UID: desired.Pod.UID}, Status: *st.DeepCopy()})
	}
	if first {
		after := currentTime.Sub(sr.received)
		sr.w.log.Debug("ready", "after", after)
		sr.sendStages(desired.Pod, []agent.StageTime{{Name: "ready", Start: currentTime,
			Detail: after.Round(100*time.Microsecond).String() + " after it was received"}})
	}
	return due
}

// isSignificantChange reports whether a status change must be sent immediately: a changed
// readiness, an ended container or pod, a changed waiting reason, or a started ephemeral container.
// The stored status of an ephemeral container prevents a second start after a reboot.
func isSignificantChange(previous, current *v1.PodStatus) bool {
	if current.Phase != previous.Phase && current.Phase != v1.PodRunning || current.Reason != previous.Reason ||
		current.Message != previous.Message {
		return true
	}
	for i := range current.Conditions {
		c := &current.Conditions[i]
		old := lifecycle.FindCondition(previous.Conditions, c.Type)
		if (c.Type == v1.PodReady || !nodeConditions[c.Type]) && (old == nil || old.Status != c.Status) {
			return true
		}
	}
	for i := range current.EphemeralContainerStatuses {
		c := &current.EphemeralContainerStatuses[i]
		if c.State.Running != nil && !slices.ContainsFunc(previous.EphemeralContainerStatuses,
			func(old v1.ContainerStatus) bool { return old.ContainerID == c.ContainerID }) {
			return true
		}
	}
	old := map[string]*v1.ContainerStatus{}
	for _, list := range [][]v1.ContainerStatus{previous.InitContainerStatuses, previous.ContainerStatuses,
		previous.EphemeralContainerStatuses} {
		for i := range list {
			old[list[i].Name] = &list[i]
		}
	}
	for _, list := range [][]v1.ContainerStatus{current.InitContainerStatuses, current.ContainerStatuses,
		current.EphemeralContainerStatuses} {
		for i := range list {
			c, before := &list[i], old[list[i].Name]
			if before == nil || c.RestartCount != before.RestartCount ||
				!reflect.DeepEqual(c.State.Terminated, before.State.Terminated) ||
				c.State.Waiting != nil && !reflect.DeepEqual(c.State.Waiting, before.State.Waiting) {
				return true
			}
		}
	}
	return false
}

var nodeConditions = map[v1.PodConditionType]bool{v1.PodReadyToStartContainers: true, v1.PodInitialized: true,
	v1.ContainersReady: true, v1.PodReady: true, v1.PodResizePending: true, v1.PodResizeInProgress: true}

// equalStatuses reports whether two statuses are equal as the API stores them, with times in whole
// seconds.
func equalStatuses(a, b *v1.PodStatus) bool {
	x, errX := a.Marshal()
	y, errY := b.Marshal()
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// reportStage reports measured steps of the pod's start. It does nothing after the pod was first
// Ready, because later steps are not part of the start.
func (sr *statusReporter) reportStage(stages ...agent.StageTime) {
	sr.w.mu.Lock()
	p, ended := sr.w.desired.Pod, sr.stagesDone || sr.wasReady
	sr.w.mu.Unlock()
	if !ended {
		sr.sendStages(p, stages)
	}
}

func (sr *statusReporter) sendStages(pod *v1.Pod, stages []agent.StageTime) {
	if tp := pod.Annotations["keelson.dev/traceparent"]; tp != "" && len(stages) > 0 {
		sr.w.cfg.Deps.Reporter.Stages(tp, "pod/"+pod.Namespace+"/"+pod.Name, stages)
	}
}
