package api

import (
	"sync"
	"time"
)

// TraceParentAnnotation carries the W3C trace context of the apply that an
// object descends from. It is set when an object is created or its spec changes
// anyway, copied from owner to child metadata, never into a template or a hash.
const TraceParentAnnotation = "keelson.dev/traceparent"

// Stage is one measured step in the life of an apply.
type Stage struct {
	TraceID  string        `json:"traceID"`
	Name     string        `json:"name"`             // "authenticated", "committed", "scheduled", "sandbox" ...
	Actor    string        `json:"actor"`            // "apiserver/cp1", "scheduler/cp2", "agent/w1"
	Object   string        `json:"object"`           // "pod/default/hello-abc12"
	Start    time.Time     `json:"start"`            // on the recording replica's clock (agents: corrected by the session's offset)
	Duration time.Duration `json:"duration"`         // 0 for an instant
	Detail   string        `json:"detail,omitempty"` // "index 41, leader cp2"
}

// Timeline is a bounded ring of stages, one per replica. It is memory only: the
// store never sees a stage. Reading a whole timeline means asking every replica.
// All methods are safe for concurrent use; a nil *Timeline records nothing.
type Timeline struct {
	mu   sync.Mutex
	ring []Stage
	next int
	full bool
}

// NewTimeline keeps the newest n stages.
func NewTimeline(n int) *Timeline { return &Timeline{ring: make([]Stage, n)} }

// Record adds stages.
func (t *Timeline) Record(stages ...Stage) {
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range stages {
		t.ring[t.next] = s
		t.next++
		if t.next == len(t.ring) {
			t.next, t.full = 0, true
		}
	}
}

// Find returns the stages of one trace, oldest record first.
func (t *Timeline) Find(traceID string) []Stage {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []Stage
	pick := func(part []Stage) {
		for _, s := range part {
			if s.TraceID == traceID {
				out = append(out, s)
			}
		}
	}
	if t.full {
		pick(t.ring[t.next:])
	}
	pick(t.ring[:t.next])
	return out
}

// StageTimer measures the consecutive stages of one request.
// A nil *StageTimer measures nothing. It is used by one goroutine at a time.
type StageTimer struct {
	actor  string
	last   time.Time
	stages []Stage
}

// StartStages begins measuring at now.
func StartStages(actor string, now time.Time) *StageTimer {
	return &StageTimer{actor: actor, last: now}
}

// Mark ends the stage that ran since the last mark.
func (s *StageTimer) Mark(name, detail string, now time.Time) {
	if s == nil {
		return
	}
	s.stages = append(s.stages, Stage{Name: name, Actor: s.actor, Start: s.last, Duration: now.Sub(s.last), Detail: detail})
	s.last = now
}

// Stages returns what was measured, stamped with the trace and object.
func (s *StageTimer) Stages(traceID, object string) []Stage {
	if s == nil || traceID == "" {
		return nil
	}
	for i := range s.stages {
		s.stages[i].TraceID, s.stages[i].Object = traceID, object
	}
	return s.stages
}

// TraceID extracts the trace id of a W3C traceparent ("00-<32 hex>-<16 hex>-01"); "" when malformed.
func TraceID(traceParent string) string {
	if len(traceParent) != 55 || traceParent[2] != '-' || traceParent[35] != '-' {
		return ""
	}
	for _, c := range traceParent[3:35] {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return ""
		}
	}
	return traceParent[3:35]
}
