package api

import (
	"maps"
	"strings"
	"sync"
	"time"
)

// TraceParentAnnotation carries the W3C trace context of the apply that an
// object descends from. It is set when an object is created or its spec changes
// anyway, copied from owner to child metadata, never into a template or a hash.
// Clients see it on the kinds that ShowsTrace alone: on what they wrote themselves
// it would be a difference from their manifests for ever. For those, GET
// PathTimeline followed by the object's own path answers the stages.
const TraceParentAnnotation = "keelson.dev/traceparent"

// PathTimeline answers the stages of the trace whose id follows, or of the object whose path follows.
const PathTimeline = "/timeline"

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

// Timeline is a ring of stages, one per replica, bounded in number and in bytes.
// It is memory only: the store never sees a stage. Reading a whole timeline
// means asking every replica.
// All methods are safe for concurrent use; a nil *Timeline records nothing.
type Timeline struct {
	mu    sync.Mutex
	ring  []Stage // the oldest is at first, count are there; it grows up to size
	size  int
	first int
	count int
	bytes int // of those that are there
	most  int
}

const (
	stageBytes   = 112 // of a Stage without its strings
	averageStage = 320 // what a stage takes on average when the ring is full in both respects

	clipShort = 128 // of a stage's name, actor and trace
	clipLong  = 512 // of what clients and nodes write: objects and details
)

// NewTimeline keeps the newest n stages, or fewer when they are long: 320 bytes for each on average.
func NewTimeline(n int) *Timeline { return &Timeline{size: n, most: n * averageStage} }

// Record adds stages. Long strings in them are cut off.
func (t *Timeline) Record(stages ...Stage) {
	if t == nil || t.size == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range stages {
		s.clip()
		if t.count == len(t.ring) {
			t.grow()
		}
		for t.count == len(t.ring) || t.count > 0 && t.bytes+s.size() > t.most {
			t.bytes -= t.ring[t.first].size()
			t.ring[t.first] = Stage{}
			t.first = (t.first + 1) % len(t.ring)
			t.count--
		}
		t.ring[(t.first+t.count)%len(t.ring)] = s
		t.count++
		t.bytes += s.size()
	}
}

// grow doubles the ring until it has its size: a replica that is asked little keeps little.
func (t *Timeline) grow() {
	n := min(max(2*len(t.ring), 64), t.size)
	if n == len(t.ring) {
		return
	}
	ring := make([]Stage, n)
	k := copy(ring, t.ring[t.first:])
	copy(ring[k:], t.ring[:t.first])
	t.ring, t.first = ring, 0
}

func (s *Stage) size() int {
	return stageBytes + len(s.TraceID) + len(s.Name) + len(s.Actor) + len(s.Object) + len(s.Detail)
}

func (s *Stage) clip() {
	s.TraceID, s.Name, s.Actor = Clip(s.TraceID, clipShort), Clip(s.Name, clipShort), Clip(s.Actor, clipShort)
	s.Object, s.Detail = Clip(s.Object, clipLong), Clip(s.Detail, clipLong)
}

// Clip returns s, or a copy of its beginning that holds on to nothing of the rest.
func Clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(strings.Clone(s[:most-3]), "") + "..."
}

// Find returns the stages of one trace, oldest record first.
func (t *Timeline) Find(traceID string) []Stage {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []Stage
	for i := range t.count {
		if s := t.ring[(t.first+i)%len(t.ring)]; s.TraceID == traceID {
			out = append(out, s)
		}
	}
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

// Shown is an object as clients see it: o itself, or a copy without the trace context. The copy shares the rest with o.
func (k *Kind) Shown(o Object) Object {
	if _, traced := o.GetAnnotations()[TraceParentAnnotation]; !traced || k.ShowsTrace {
		return o
	}
	out := k.Ops.Shallow(o)
	annotations := maps.Clone(o.GetAnnotations())
	delete(annotations, TraceParentAnnotation)
	if len(annotations) == 0 {
		annotations = nil
	}
	out.SetAnnotations(annotations)
	return out
}
