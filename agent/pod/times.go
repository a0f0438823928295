package pod

import (
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/pod/lifecycle"
)

// Timestamps come from the wall clock of this node or of another node. A wall clock may be changed
// while pods run. Delays are measured by the monotonic clock of this process. Therefore each
// timestamp is converted to a monotonic time when it is first observed, and only the converted time
// is compared. The status shows the original timestamp.

// monotonicTime converts the wall-clock time of an event to this process's monotonic clock: the
// result is currentTime minus the age of stamp. The result is currentTime if stamp is zero or in
// the future, or if the result would be before notBefore. notBefore is a time at which the event
// had certainly not happened yet; zero means unknown.
func monotonicTime(stamp, notBefore, currentTime time.Time) time.Time {
	age := currentTime.Round(0).Sub(stamp.Round(0))
	if stamp.IsZero() || age < 0 {
		return currentTime
	}
	at := currentTime.Add(-age)
	if !notBefore.IsZero() && at.Before(notBefore) {
		return currentTime
	}
	return at
}

// observationTimes stores the times of a worker's containers and sandboxes by the monotonic clock.
type observationTimes struct {
	// by container ID: start of the last query that found the container created or running
	lastAlive map[string]time.Time
	started   map[string]time.Time // by container ID: when it was started
	created   map[string]time.Time // by sandbox ID: when it was created
}

func newObservationTimes() observationTimes {
	return observationTimes{lastAlive: map[string]time.Time{}, started: map[string]time.Time{},
		created: map[string]time.Time{}}
}

// recordTimes sets the monotonic times of a container from its status. The status was requested at
// queried and received at currentTime.
func (k observationTimes) recordTimes(instance *lifecycle.Container, queried, currentTime time.Time) {
	if instance.State == lifecycle.Running && k.started[instance.ID].IsZero() {
		k.started[instance.ID] = monotonicTime(instance.Times.Started, k.lastAlive[instance.ID], currentTime)
	}
	if instance.State == lifecycle.Running || instance.State == lifecycle.Created {
		k.lastAlive[instance.ID] = queried
	}
	instance.Monotonic.Start = k.started[instance.ID]
	if instance.State != lifecycle.Exited {
		return
	}
	instance.Monotonic.End = monotonicTime(instance.Times.Finished, k.lastAlive[instance.ID], currentTime)
	switch alive := k.lastAlive[instance.ID]; {
	case instance.Times.Started.IsZero():
	case !instance.Monotonic.Start.IsZero():
		instance.Monotonic.Ran = instance.Monotonic.End.Sub(instance.Monotonic.Start)
	default: // started and ended between two observations, or before this process started
		instance.Monotonic.Ran = max(0, instance.Times.Finished.Sub(instance.Times.Started))
		if !alive.IsZero() {
			instance.Monotonic.Ran = min(instance.Monotonic.Ran, instance.Monotonic.End.Sub(alive))
		}
	}
}

// deletionDeadline returns when the grace period of a deleted pod ends, by this process's monotonic
// clock. It is zero for a pod that is not deleted. notBefore is a time at which the pod was not yet
// deleted; see monotonicTime.
func deletionDeadline(pod *v1.Pod, notBefore, currentTime time.Time) time.Time {
	if pod.DeletionTimestamp == nil {
		return time.Time{}
	}
	period := lifecycle.GracePeriod(pod)
	if s := pod.DeletionGracePeriodSeconds; s != nil {
		period = time.Duration(*s) * time.Second
	}
	return monotonicTime(pod.DeletionTimestamp.Add(-period), notBefore, currentTime).Add(period)
}
