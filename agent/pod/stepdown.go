package pod

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// stop plans the shutdown of the pod: gate, containers, sidecars, sandbox, volumes and, on
// deletion, the records.
func (s *step) stop(why Stop) {
	upward := s.cancelUpward()
	if s.o.anyRunning() {
		if why.Delete && !why.Orphan && !s.gateOpen() {
			return
		}
		s.killAll(why.Grace)
		return
	}
	if upward || s.ending() {
		return
	}
	s.release(why.Delete)
	if !why.Delete {
		s.spare()
	}
	if why.Delete && s.nothingLeft() {
		if key := (Action{Kind: ReportGone}).Key(); s.o.Settled[key] {
			s.plan.Done = true
		} else if !s.o.busy(key) {
			s.plan.add(Action{Kind: ReportGone})
		}
	}
}

// cancelUpward cancels the running actions that build up the pod. It reports whether there are any.
func (s *step) cancelUpward() bool {
	var keys []string
	for key, b := range s.o.Busy {
		switch b.Kind {
		case AllocateDevices, MountVolumes, RefreshVolumes, CreateSandbox, EnsureImage, StartContainer:
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	for _, key := range keys {
		s.cancel(key)
	}
	return len(keys) > 0
}

// gateOpen reports whether proxies have stopped routing to the pod. If not, it plans to wait for
// them before the first SIGTERM.
func (s *step) gateOpen() bool {
	a := Action{Kind: AwaitGate}
	if s.o.Settled[a.Key()] {
		return true
	}
	if !s.o.busy(a.Key()) {
		s.plan.add(a)
	}
	return false
}

// ending reports whether a container is being stopped or removed.
func (s *step) ending() bool {
	for key := range s.o.Busy {
		if strings.HasPrefix(key, "end/") {
			return true
		}
	}
	return false
}

// killAll plans to stop all running containers: regular containers together, then sidecars one by
// one in reverse start order.
func (s *step) killAll(grace time.Duration) {
	order := make([]string, 0, len(s.pod.Spec.InitContainers))
	for i := range s.pod.Spec.InitContainers {
		if sidecar(s.pod, &s.pod.Spec.InitContainers[i]) {
			order = append(order, s.pod.Spec.InitContainers[i].Name)
		}
	}
	var sidecars []Container
	others := false
	for _, c := range s.o.Containers {
		if c.State != Running && c.State != Unknown {
			continue
		}
		if slices.Contains(order, c.Name) {
			sidecars = append(sidecars, c)
			continue
		}
		others = true
		s.kill(c, grace, fmt.Sprintf("Stopping container %s", c.Name))
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
			s.kill(c, s.left(grace), fmt.Sprintf("Stopping container %s", c.Name))
		}
	}
}

// left returns the rest of the grace period for a sidecar. The whole pod has one grace period,
// which ends at its deletion timestamp.
func (s *step) left(grace time.Duration) time.Duration {
	if s.pod.DeletionTimestamp == nil {
		return grace
	}
	left := s.pod.DeletionTimestamp.Sub(s.now)
	if !s.o.Deadline.IsZero() {
		left = s.o.Deadline.Sub(s.now)
	}
	return min(grace, max(left.Round(time.Second), minStop))
}

// kill plans to stop a container. A running stop is cancelled if it would take longer than the new
// grace period.
func (s *step) kill(c Container, grace time.Duration, why string) {
	a := Action{Kind: KillContainer, Container: c.Name, ID: c.ID, Grace: grace, Why: why}
	b, busy := s.o.Busy[a.Key()]
	if busy {
		if !b.Cancelled && !b.Until.IsZero() && b.Until.After(s.now.Add(grace+time.Second)) {
			s.plan.add(Action{Kind: Cancel, Target: a.Key()})
		}
		return
	}
	if s.retryDue(a.Key()) {
		s.plan.add(a)
	}
}

func (s *step) cancel(key string) {
	if !s.o.Busy[key].Cancelled {
		s.plan.add(Action{Kind: Cancel, Target: key})
	}
}

func (s *step) remove(c Container) {
	a := Action{Kind: RemoveContainer, Container: c.Name, ID: c.ID, Attempt: c.Attempt}
	if !s.o.busy(a.Key()) && s.retryDue(a.Key()) {
		s.plan.add(a)
	}
}

// finish plans the shutdown of a pod after its containers have ended. Its resources are released.
// Its records stay until the pod is deleted.
func (s *step) finish() {
	upward := s.cancelUpward()
	if s.o.anyRunning() {
		s.killAll(grace(s.pod))
		return
	}
	if !upward && !s.ending() {
		s.release(false)
		s.spare()
	}
}

// spare plans to remove the records of an ended pod while disk saving is on. Its status stays.
func (s *step) spare() {
	if !s.o.Spare || !s.o.Volumes.Away || !onRecord(s.d) {
		return
	}
	for _, c := range s.o.Containers {
		s.remove(c)
	}
}

// onRecord reports whether the pod never runs again, even if its container records are removed. The
// API has its terminal phase, or its eviction is stored on disk.
func onRecord(d Desired) bool { return final(d.Pod) || d.Stop != nil && d.Stop.Kept }

// release plans to stop the sandboxes, then to unmount the volumes, then (if records) to remove all
// records.
func (s *step) release(records bool) {
	stopped := true
	for _, sb := range s.o.Sandboxes {
		a := Action{Kind: StopSandbox, ID: sb.ID}
		if s.o.Settled[a.Key()] && !sb.Ready {
			continue
		}
		stopped = false
		if !s.o.busy(a.Key()) && s.retryDue(a.Key()) {
			s.plan.add(a)
		}
	}
	if !stopped {
		return
	}
	if !s.o.Volumes.Away {
		if a := (Action{Kind: UnmountVolumes}); !s.o.busy(a.Key()) && s.retryDue(a.Key()) {
			s.plan.add(a)
		}
		return
	}
	if !records {
		return
	}
	for _, sb := range s.o.Sandboxes {
		if a := (Action{Kind: RemoveSandbox, ID: sb.ID}); !s.o.busy(a.Key()) && s.retryDue(a.Key()) {
			s.plan.add(a)
		}
	}
	for _, c := range s.o.Containers {
		if !slices.ContainsFunc(s.o.Sandboxes, func(sb Sandbox) bool { return sb.ID == c.Sandbox }) {
			s.remove(c)
		}
	}
}

func (s *step) nothingLeft() bool {
	return len(s.o.Sandboxes) == 0 && len(s.o.Containers) == 0 && s.o.Volumes.Away
}

// collect plans to remove the records of ended instances, except the newest of each container and
// the ended one before it. Those provide lastState and the log of the previous instance. While disk
// saving is on, the previous one is removed too. An instance that was only created does not count,
// because it does not show how long its container ran.
func (s *step) collect() {
	live := map[string]bool{}
	dead := map[string]int{}
	for _, c := range s.o.Containers {
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
		if s.o.Spare {
			keep-- // the newest determines when the next is started
		}
		if dead[c.Name] > keep && !s.o.busy("container/"+c.Name) {
			s.remove(c)
		}
	}
}
