package pod

import (
	"time"

	v1 "k8s.io/api/core/v1"
)

// Time stamps come from the wall clock of this node or of another node. A wall clock may be changed
// while pods run. Delays are measured by the monotonic clock of this process. Therefore each stamp
// is converted to a monotonic time when it is first seen, and only the converted time is compared.
// The status shows the original stamp.

// anchor returns the time, by this process's monotonic clock, of an event with the given wall-clock
// stamp: now minus the stamp's age. It returns now if the stamp is zero, lies in the future, or
// would be before notBefore. notBefore is a time at which the event had certainly not happened yet;
// zero means unknown.
func anchor(stamp, notBefore, now time.Time) time.Time {
	age := now.Round(0).Sub(stamp.Round(0))
	if stamp.IsZero() || age < 0 {
		return now
	}
	at := now.Add(-age)
	if !notBefore.IsZero() && at.Before(notBefore) {
		return now
	}
	return at
}

// clocks stores a worker's monotonic times of its containers and sandboxes.
type clocks struct {
	alive map[string]time.Time // by container ID: when it was last seen not to have ended
	began map[string]time.Time // by container ID: when it was started
	born  map[string]time.Time // by sandbox ID: when it was created
}

func newClocks() clocks {
	return clocks{alive: map[string]time.Time{}, began: map[string]time.Time{}, born: map[string]time.Time{}}
}

// note sets the monotonic times of a container. The runtime was queried about it between asked and
// now.
func (k clocks) note(c *Container, asked, now time.Time) {
	if c.State == Running && k.began[c.ID].IsZero() {
		k.began[c.ID] = anchor(c.Started, k.alive[c.ID], now)
	}
	if c.State == Running || c.State == Created {
		k.alive[c.ID] = asked
	}
	c.Began = k.began[c.ID]
	if c.State != Exited {
		return
	}
	c.Ended = anchor(c.Finished, k.alive[c.ID], now)
	switch alive := k.alive[c.ID]; {
	case c.Started.IsZero():
	case !c.Began.IsZero():
		c.Ran = c.Ended.Sub(c.Began)
	default: // started and ended between two observations, or before this process started
		c.Ran = max(0, c.Finished.Sub(c.Started))
		if !alive.IsZero() {
			c.Ran = min(c.Ran, c.Ended.Sub(alive))
		}
	}
}

// end returns when an ended container has ended, by the monotonic clock if known, else by its
// stamp.
func (c Container) end() time.Time {
	if c.Ended.IsZero() {
		return c.Finished
	}
	return c.Ended
}

// ran returns how long an ended container ran; 0 if it was never started.
func (c Container) ran() time.Duration {
	switch {
	case !c.Ended.IsZero():
		return c.Ran
	case c.Started.IsZero():
		return 0
	}
	return c.Finished.Sub(c.Started)
}

// started returns when a container was started, by the monotonic clock if known.
func (c Container) started() time.Time {
	if c.Began.IsZero() {
		return c.Started
	}
	return c.Began
}

// made returns when a sandbox was created, by the monotonic clock if known.
func (s Sandbox) made() time.Time {
	if s.Born.IsZero() {
		return s.Created
	}
	return s.Born
}

// deletionDeadline returns when the grace period of a deleted pod ends, by this process's clock. It
// is zero for a pod that is not deleted. notBefore is a time at which the pod was not yet deleted;
// see anchor.
func deletionDeadline(pod *v1.Pod, notBefore, now time.Time) time.Time {
	if pod.DeletionTimestamp == nil {
		return time.Time{}
	}
	given := grace(pod)
	if s := pod.DeletionGracePeriodSeconds; s != nil {
		given = time.Duration(*s) * time.Second
	}
	return anchor(pod.DeletionTimestamp.Add(-given), notBefore, now).Add(given)
}

// since returns when the agent acknowledged the pod, by the monotonic clock if known.
func (o *Observed) since() time.Time {
	if o.Since.IsZero() {
		return o.StartTime
	}
	return o.Since
}
