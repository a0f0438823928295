package lifecycle

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// planStop plans the next actions that shut the pod down. The first one waits for the stop gate,
// that is, until no proxy routes to the pod. Then containers, sidecars and the sandbox are stopped,
// and the volumes are unmounted. On deletion, the records are removed too.
func (s *planner) planStop(cause Stop) {
	upward := s.cancelStartup()
	if s.observed.HasRunningContainer() {
		if cause.Delete && !cause.Orphan && !s.isGateOpen() {
			return
		}
		s.planKillAll(cause.Grace)
		return
	}
	if upward || s.isStoppingContainer() {
		return
	}
	s.planRelease(cause.Delete)
	if !cause.Delete {
		s.planRecordReclaim()
	}
	if cause.Delete && s.hasNothingLeft() {
		if key := (Action{Kind: ReportGone}).Key(); s.observed.Finished[key] {
			s.plan.Done = true
		} else if !s.observed.IsBusy(key) {
			s.plan.addAction(Action{Kind: ReportGone})
		}
	}
}

// cancelStartup plans to cancel the running actions that start the pod. It reports whether such
// actions are running.
func (s *planner) cancelStartup() bool {
	var keys []string
	for key, b := range s.observed.Busy {
		switch b.Kind {
		case AllocateDevices, MountVolumes, RefreshVolumes, CreateSandbox, EnsureImage, StartContainer:
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for _, key := range keys {
		s.planCancel(key)
	}
	return len(keys) > 0
}

// isGateOpen reports whether proxies have stopped routing to the pod. If not, it plans to wait for
// them before the first SIGTERM.
func (s *planner) isGateOpen() bool {
	a := Action{Kind: AwaitGate}
	if s.observed.Finished[a.Key()] {
		return true
	}
	if !s.observed.IsBusy(a.Key()) {
		s.plan.addAction(a)
	}
	return false
}

// isStoppingContainer reports whether a container is being stopped or removed.
func (s *planner) isStoppingContainer() bool {
	for key := range s.observed.Busy {
		if strings.HasPrefix(key, "end/") {
			return true
		}
	}
	return false
}

// planKillAll plans to stop all running containers: regular and ephemeral containers together, then
// sidecars one by one in reverse start order. Sidecars do not wait for ephemeral containers.
func (s *planner) planKillAll(grace time.Duration) {
	order := make([]string, 0, len(s.pod.Spec.InitContainers))
	for i := range s.pod.Spec.InitContainers {
		if IsSidecar(s.pod, &s.pod.Spec.InitContainers[i]) {
			order = append(order, s.pod.Spec.InitContainers[i].Name)
		}
	}
	var sidecars []Container
	others := false
	for _, c := range s.observed.Containers {
		if c.State != Running && c.State != Unknown {
			continue
		}
		if slices.Contains(order, c.Name) {
			sidecars = append(sidecars, c)
			continue
		}
		others = others || !IsEphemeralContainer(s.pod, c.Name)
		s.planKill(c, grace, fmt.Sprintf("Stopping container %s", c.Name))
	}
	if others || len(sidecars) == 0 {
		return
	}
	slices.SortStableFunc(sidecars, func(a, b Container) int {
		return slices.Index(order, b.Name) - slices.Index(order, a.Name)
	})
	last := sidecars[0]
	for _, c := range sidecars {
		if c.Name == last.Name {
			s.planKill(c, s.remainingGrace(grace), fmt.Sprintf("Stopping container %s", c.Name))
		}
	}
}

// remainingGrace returns how much of the grace period is left for a sidecar. The whole pod has one
// grace period, which ends at its deletion timestamp. The result is at least MinStop.
func (s *planner) remainingGrace(grace time.Duration) time.Duration {
	if s.pod.DeletionTimestamp == nil {
		return grace
	}
	left := s.pod.DeletionTimestamp.Sub(s.currentTime)
	if !s.observed.Times.Deadline.IsZero() {
		left = s.observed.Times.Deadline.Sub(s.currentTime)
	}
	return min(grace, max(left.Round(time.Second), MinStop))
}

// planKill plans to stop a container within a grace period. If the container is already being
// stopped with a later end, it plans to cancel that stop first.
func (s *planner) planKill(instance Container, grace time.Duration, message string) {
	a := Action{Kind: KillContainer, Container: instance.Name, ID: instance.ID, Grace: grace, Message: message}
	b, busy := s.observed.Busy[a.Key()]
	if busy {
		if !b.Cancelled && !b.Until.IsZero() && b.Until.After(s.currentTime.Add(grace+time.Second)) {
			s.plan.addAction(Action{Kind: Cancel, Target: a.Key()})
		}
		return
	}
	if s.isRetryDue(a.Key()) {
		s.plan.addAction(a)
	}
}

func (s *planner) planCancel(key string) {
	if !s.observed.Busy[key].Cancelled {
		s.plan.addAction(Action{Kind: Cancel, Target: key})
	}
}

func (s *planner) planRemove(instance Container) {
	a := Action{Kind: RemoveContainer, Container: instance.Name, ID: instance.ID, Attempt: instance.Attempt}
	if !s.observed.IsBusy(a.Key()) && s.isRetryDue(a.Key()) {
		s.plan.addAction(a)
	}
}

// planFinish plans the shutdown of a pod after its regular containers have ended: it stops sidecars
// and releases the pod's resources. The records stay until the pod is deleted, or until disk space
// is reclaimed.
func (s *planner) planFinish() {
	upward := s.cancelStartup()
	if s.observed.HasRunningContainer() {
		s.planKillAll(GracePeriod(s.pod))
		return
	}
	if !upward && !s.isStoppingContainer() {
		s.planRelease(false)
		s.planRecordReclaim()
	}
}

// planRecordReclaim plans to remove all container records of an ended pod if disk space is being
// reclaimed. The pod's status stays. It does nothing before the end of the pod is recorded
// elsewhere.
func (s *planner) planRecordReclaim() {
	if !s.observed.ReclaimDisk || !s.observed.Volumes.Unmounted || !IsEndRecorded(s.desired) {
		return
	}
	for _, c := range s.observed.Containers {
		s.planRemove(c)
	}
}

// IsEndRecorded reports whether the pod never runs again, even if its container records are
// removed. That is the case if the pod's phase in the API is terminal or its eviction is stored on
// disk.
func IsEndRecorded(desired Desired) bool {
	return IsTerminal(desired.Pod) || desired.Stop != nil && desired.Stop.Recorded
}

// planRelease plans to stop the sandboxes and then to unmount the volumes. If records is true, it
// then plans to remove the sandboxes and containers from the runtime.
func (s *planner) planRelease(records bool) {
	stopped := true
	for _, sb := range s.observed.Sandboxes {
		a := Action{Kind: StopSandbox, ID: sb.ID}
		if s.observed.Finished[a.Key()] && !sb.Ready {
			continue
		}
		stopped = false
		if !s.observed.IsBusy(a.Key()) && s.isRetryDue(a.Key()) {
			s.plan.addAction(a)
		}
	}
	if !stopped {
		return
	}
	if !s.observed.Volumes.Unmounted {
		if a := (Action{Kind: UnmountVolumes}); !s.observed.IsBusy(a.Key()) && s.isRetryDue(a.Key()) {
			s.plan.addAction(a)
		}
		return
	}
	if !records {
		return
	}
	for _, sb := range s.observed.Sandboxes {
		if a := (Action{Kind: RemoveSandbox, ID: sb.ID}); !s.observed.IsBusy(a.Key()) && s.isRetryDue(a.Key()) {
			s.plan.addAction(a)
		}
	}
	for _, c := range s.observed.Containers {
		if !slices.ContainsFunc(s.observed.Sandboxes, func(sb Sandbox) bool { return sb.ID == c.Sandbox }) {
			s.planRemove(c)
		}
	}
}

func (s *planner) hasNothingLeft() bool {
	return len(s.observed.Sandboxes) == 0 && len(s.observed.Containers) == 0 && s.observed.Volumes.Unmounted
}

// planRecordRemoval plans to remove the records of exited instances that are no longer needed. For
// each container it keeps the newest instance and the last exited instance before it. They provide
// lastState and the log of the previous instance. While disk space is being reclaimed, it keeps
// only the newest instance. Instances that were created but never started are neither removed nor
// counted.
func (s *planner) planRecordRemoval() {
	live := map[string]bool{}
	dead := map[string]int{}
	for _, c := range s.observed.Containers {
		switch c.State {
		case Running, Unknown:
			live[c.Name] = true
			continue
		case Created:
			continue
		}
		dead[c.Name]++
		keep := 1
		if !live[c.Name] {
			keep = 2
		}
		if s.observed.ReclaimDisk {
			keep-- // the newest determines when the next is started
		}
		if dead[c.Name] > keep && !s.observed.IsBusy("container/"+c.Name) {
			s.planRemove(c)
		}
	}
}
