package pod

import (
	"time"

	v1 "k8s.io/api/core/v1"
)

// Stamps come from the wall clock of this node or of another, which may be set while pods run: an hour back or forth.
// Delays are kept by the clock of this process, which nobody sets. A stamp is therefore turned into a time of that
// clock when it is first seen, and compared as that from then on; it is shown as it is.

// anchor is when something happened that has the wall-clock stamp: now, less its age by the wall clock. An age
// that cannot be is none: nothing is of the future, nor before notBefore, when it was known not to have happened
// yet (zero: not known).
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

// clocks are what a worker knows of its containers and sandboxes by this process's clock.
type clocks struct {
	alive map[string]time.Time // container → when it was last known not to have ended
	began map[string]time.Time // container → when it was started
	born  map[string]time.Time // sandbox → when it was made
}

func newClocks() clocks {
	return clocks{alive: map[string]time.Time{}, began: map[string]time.Time{}, born: map[string]time.Time{}}
}

// note sets the times of a container that was looked at between asked and now.
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
	default: // started and ended between two looks, or before this process
		c.Ran = max(0, c.Finished.Sub(c.Started))
		if !alive.IsZero() {
			c.Ran = min(c.Ran, c.Ended.Sub(alive))
		}
	}
}

// end is when an ended container ended, by the clock that delays are kept by.
func (c Container) end() time.Time {
	if c.Ended.IsZero() {
		return c.Finished
	}
	return c.Ended
}

// ran is how long it ran.
func (c Container) ran() time.Duration {
	switch {
	case !c.Ended.IsZero():
		return c.Ran
	case c.Started.IsZero():
		return 0
	}
	return c.Finished.Sub(c.Started)
}

// started is when a running container was started.
func (c Container) started() time.Time {
	if c.Began.IsZero() {
		return c.Started
	}
	return c.Began
}

// made is when a sandbox was made.
func (s Sandbox) made() time.Time {
	if s.Born.IsZero() {
		return s.Created
	}
	return s.Born
}

// deletionDeadline is when the grace period of a deleted pod ends, by this process's clock; zero for one that is not
// deleted. notBefore is as for anchor.
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

// since is when the pod was acknowledged.
func (o *Observed) since() time.Time {
	if o.Since.IsZero() {
		return o.StartTime
	}
	return o.Since
}
