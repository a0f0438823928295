package autopilot

import "time"

// SilenceTracker measures for how long each member has not responded to one leader. A new leader
// starts with a new tracker, so that time before its leadership is ignored. The time between two
// calls of Observe adds at most twice the expected interval to the silence of a member. A leader
// that was suspended therefore does not consider a member dead when it resumes.
type SilenceTracker struct {
	interval     time.Duration // expected time between two calls of Observe
	lastObserved time.Duration
	started      bool
	silentFor    map[string]time.Duration
}

// NewSilenceTracker returns a tracker. The caller must call its method Observe once per interval.
func NewSilenceTracker(interval time.Duration) *SilenceTracker {
	return &SilenceTracker{interval: interval, silentFor: map[string]time.Duration{}}
}

// Observe updates the tracker after one round of requests, and sets the field SilentFor of all
// members. The field Responded of each member must be set. sinceStart is the time since an
// arbitrary start, on a monotonic clock.
func (w *SilenceTracker) Observe(sinceStart time.Duration, members []Member) {
	var elapsed time.Duration
	if w.started {
		elapsed = min(max(0, sinceStart-w.lastObserved), 2*w.interval)
	}
	w.started, w.lastObserved = true, sinceStart
	silent := make(map[string]time.Duration, len(members))
	for i := range members {
		m := &members[i]
		m.SilentFor = 0
		if m.Responded {
			continue
		}
		if previous, known := w.silentFor[m.Name]; known {
			m.SilentFor = previous + elapsed
		}
		silent[m.Name] = m.SilentFor
	}
	w.silentFor = silent // for a member that responded or was removed, the time starts again at 0
}
