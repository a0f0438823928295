package lifecycle

import "time"

// endTime returns when an exited container ended, by this process's monotonic clock. If that time
// is not known, it returns the wall-clock time that the runtime reported.
func (c Container) endTime() time.Time {
	if c.Monotonic.End.IsZero() {
		return c.Times.Finished
	}
	return c.Monotonic.End
}

// runDuration returns how long an ended container ran; 0 if it was never started.
func (c Container) runDuration() time.Duration {
	switch {
	case !c.Monotonic.End.IsZero():
		return c.Monotonic.Ran
	case c.Times.Started.IsZero():
		return 0
	}
	return c.Times.Finished.Sub(c.Times.Started)
}

// StartTime returns when a container was started, by this process's monotonic clock. If that time
// is not known, it returns the wall-clock time that the runtime reported.
func (c Container) StartTime() time.Time {
	if c.Monotonic.Start.IsZero() {
		return c.Times.Started
	}
	return c.Monotonic.Start
}

// creationTime returns when a sandbox was created, by this process's monotonic clock. If that time
// is not known, it returns the wall-clock time that the runtime reported.
func (s Sandbox) creationTime() time.Time {
	if s.MonotonicCreated.IsZero() {
		return s.Created
	}
	return s.MonotonicCreated
}

// acknowledgedAt returns when the agent acknowledged the pod, by this process's monotonic clock. If
// that time is not known, it returns the pod's start time by the wall clock.
func (o *Observed) acknowledgedAt() time.Time {
	if o.Times.Acknowledged.IsZero() {
		return o.Times.Start
	}
	return o.Times.Acknowledged
}
