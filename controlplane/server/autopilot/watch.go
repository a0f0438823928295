package autopilot

import "time"

// Watch counts for how long members have been silent, as one leader sees it. It begins with nothing: a leader that is new
// knows of no silence. Time counts only between two looks that are not far apart, so that a leader that was frozen, and
// looked at nobody meanwhile, takes nobody for dead when it goes on.
type Watch struct {
	every  time.Duration // between two looks
	last   time.Duration
	begun  bool
	silent map[string]time.Duration
}

// NewWatch is one that looks this often.
func NewWatch(every time.Duration) *Watch {
	return &Watch{every: every, silent: map[string]time.Duration{}}
}

// Look notes who answered now, on a clock that only goes forward, and writes for how long the others have not.
func (w *Watch) Look(now time.Duration, members []Member) {
	var passed time.Duration
	if w.begun {
		passed = min(max(0, now-w.last), 2*w.every)
	}
	w.begun, w.last = true, now
	silent := make(map[string]time.Duration, len(members))
	for i := range members {
		m := &members[i]
		m.Silent = 0
		if m.Heard {
			continue
		}
		if was, known := w.silent[m.Name]; known {
			m.Silent = was + passed
		}
		silent[m.Name] = m.Silent
	}
	w.silent = silent // who answers, or is a member no more, begins anew
}
