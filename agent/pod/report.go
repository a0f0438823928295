package pod

import (
	"bytes"
	"reflect"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
)

// Minor status changes are held back, so that one report can contain several. Each report is a
// write in the cluster, and the pod's next report waits for its acknowledgment. During the start
// this takes milliseconds. A pod that is being deleted reports minor changes only if its deletion
// takes long.
const (
	holdBack         = 25 * time.Millisecond
	holdBackDeleting = time.Second
)

// report sends the status if it differs from the last one sent. due is when a held-back status must
// be sent; zero if none.
func (w *worker) report(d Desired, o Observed, now time.Time) (due time.Time) {
	if d.Stop != nil && d.Stop.Orphan {
		return due
	}
	w.mu.Lock()
	last := w.last
	w.mu.Unlock()
	// Conditions that others own (readiness gates, DisruptionTarget) come from the object.
	last = *last.DeepCopy()
	for _, c := range d.Pod.Status.Conditions {
		if !owned[c.Type] {
			if own := find(last.Conditions, c.Type); own != nil {
				*own = c
			} else {
				last.Conditions = append(last.Conditions, c)
			}
		}
	}
	st := Status(d, o, last, w.cfg.host(), now)
	ready := find(st.Conditions, v1.PodReady)
	w.mu.Lock()
	must := !w.reported || w.recheck && !equal(&st, &d.Pod.Status)
	send := must || !reflect.DeepEqual(st, w.sent)
	switch {
	case !send:
		w.held = time.Time{}
	case must || telling(&w.sent, &st):
	default:
		hold := holdBack
		if d.Stop != nil && d.Stop.Delete {
			hold = holdBackDeleting
		}
		if w.held.IsZero() {
			w.held = now
		}
		if due = w.held.Add(hold); now.Before(due) {
			send = false
		}
	}
	if send {
		w.sent, w.held, due = st, time.Time{}, time.Time{}
	}
	first := !w.readied && !w.quiet && ready != nil && ready.Status == v1.ConditionTrue
	over := terminal(st.Phase) && !terminal(w.last.Phase)
	w.last, w.reported, w.recheck, w.readied = st, true, false, w.readied || first
	w.mu.Unlock()
	if over {
		w.freed() // another pod's resize may have waited for this pod's resources
	}
	if send {
		w.cfg.Reporter.PodStatus(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: d.Pod.Namespace, Name: d.Pod.Name, UID: d.Pod.UID}, Status: *st.DeepCopy()})
	}
	if first {
		after := now.Sub(w.received)
		w.log.Debug("ready", "after", after)
		w.tell(d.Pod, []agent.StageTime{{Name: "ready", Start: now, Detail: after.Round(100*time.Microsecond).String() + " after it was received"}})
	}
	return due
}

// telling reports whether a status change must be sent at once: a change of readiness, an ended
// container or pod, or the reason of a wait.
func telling(was, is *v1.PodStatus) bool {
	if is.Phase != was.Phase && is.Phase != v1.PodRunning || is.Reason != was.Reason || is.Message != was.Message {
		return true
	}
	for i := range is.Conditions {
		c := &is.Conditions[i]
		old := find(was.Conditions, c.Type)
		if (c.Type == v1.PodReady || !owned[c.Type]) && (old == nil || old.Status != c.Status) {
			return true
		}
	}
	old := map[string]*v1.ContainerStatus{}
	for _, list := range [][]v1.ContainerStatus{was.InitContainerStatuses, was.ContainerStatuses} {
		for i := range list {
			old[list[i].Name] = &list[i]
		}
	}
	for _, list := range [][]v1.ContainerStatus{is.InitContainerStatuses, is.ContainerStatuses} {
		for i := range list {
			c, before := &list[i], old[list[i].Name]
			if before == nil || c.RestartCount != before.RestartCount || !reflect.DeepEqual(c.State.Terminated, before.State.Terminated) ||
				c.State.Waiting != nil && !reflect.DeepEqual(c.State.Waiting, before.State.Waiting) {
				return true
			}
		}
	}
	return false
}

var owned = map[v1.PodConditionType]bool{v1.PodReadyToStartContainers: true, v1.PodInitialized: true, v1.ContainersReady: true, v1.PodReady: true,
	v1.PodResizePending: true, v1.PodResizeInProgress: true}

// equal compares statuses as the API stores them: times to the second.
func equal(a, b *v1.PodStatus) bool {
	x, errX := a.Marshal()
	y, errY := b.Marshal()
	return errX == nil && errY == nil && bytes.Equal(x, y)
}
