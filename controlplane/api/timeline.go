package api

import (
	"maps"
	"strings"
	"sync"
	"time"
)

// TraceParentAnnotation is the W3C trace context of the client's write from which an object
// descends. It is set when an object is created or its spec changes, and is copied from owner to
// child metadata. It is never copied into a template or a hash.
//
// Clients see it only on kinds with ShowsTrace. On objects that clients write themselves, it would
// be a permanent difference from their manifests. For those, GET PathTimeline plus the object's
// path returns the stages.
const TraceParentAnnotation = "keelson.dev/traceparent"

// PathTimeline returns the stages of a trace or of an object. The trace ID or the object's path
// follows it.
const PathTimeline = "/timeline"

// Stage is one measured step of the processing of a client's write.
type Stage struct {
	TraceID string `json:"traceID"`
	// "authenticated", "committed", "scheduled", "sandbox" ...
	Name   string `json:"name"`
	Actor  string `json:"actor"`  // "apiserver/cp1", "scheduler/cp2", "agent/w1"
	Object string `json:"object"` // "pod/default/hello-abc12"
	// by the recording replica's clock (of agents: corrected by the session's clock offset)
	Start    time.Time     `json:"start"`
	Duration time.Duration `json:"duration"`         // 0 for an event without a duration
	Detail   string        `json:"detail,omitempty"` // "index 41, leader cp2"
}

// Timeline is a replica's ring buffer of stages, bounded in number and in bytes. It is in memory
// only and never stored. A complete timeline must be collected from all replicas. All methods are
// safe for concurrent use; a nil *Timeline records nothing.
type Timeline struct {
	mu    sync.Mutex
	ring  []Stage // count stages from index first, the oldest; grows up to size
	size  int
	first int
	count int
	bytes int // of the recorded stages
	most  int
}

const (
	stageBytes   = 112 // of a Stage without its strings
	averageStage = 320 // average size of a stage when both limits are reached

	clipShort = 128 // limit for a stage's name, actor and trace
	clipLong  = 512 // limit for strings of clients and nodes: objects and details
)

// NewTimeline returns a Timeline of the newest n stages, or of fewer if they have more than 320
// bytes on average.
func NewTimeline(n int) *Timeline { return &Timeline{size: n, most: n * averageStage} }

// Record adds stages and drops the oldest ones beyond the limits. Long strings in stages are
// truncated.
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

// grow doubles the ring's capacity, up to size, so that a replica with few requests uses little
// memory.
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

// Clip returns s, truncated to most bytes. A truncated result is a copy and does not keep s in
// memory.
func Clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(strings.Clone(s[:most-3]), "") + "..."
}

// Find returns the recorded stages of a trace, oldest first.
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

// StartStages returns a StageTimer. Its first stage starts at now.
func StartStages(actor string, now time.Time) *StageTimer {
	return &StageTimer{actor: actor, last: now}
}

// Mark ends the stage that started at the previous Mark, and records it under name.
func (s *StageTimer) Mark(name, detail string, now time.Time) {
	if s == nil {
		return
	}
	s.stages = append(s.stages, Stage{Name: name, Actor: s.actor, Start: s.last, Duration: now.Sub(s.last), Detail: detail})
	s.last = now
}

// Stages returns the measured stages with their trace ID and object set. It returns nil if traceID
// is empty.
func (s *StageTimer) Stages(traceID, object string) []Stage {
	if s == nil || traceID == "" {
		return nil
	}
	for i := range s.stages {
		s.stages[i].TraceID, s.stages[i].Object = traceID, object
	}
	return s.stages
}

// TraceID returns the trace ID of a W3C traceparent ("00-<32 hex>-<16 hex>-01"), or "" if it is
// malformed.
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

// Shown returns the object as clients see it: o itself, or a copy without TraceParentAnnotation if
// the kind does not show it. The copy shares everything else with o.
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
