package api

import (
	"maps"
	"strings"
	"sync"
	"time"
)

// TraceParentAnnotation is the W3C trace context of the client's write that led to the creation or
// the current spec of an object. It is set when an object is created or its spec changes, and is
// copied from owners to the objects that they own. It is never copied into a template or a hash.
//
// Clients see it only on kinds with ShowsTrace. On objects that clients write themselves, it would
// be a permanent difference from their manifests. For such an object, GET PathTimeline followed by
// the object's path returns the stages.
const TraceParentAnnotation = "keelson.dev/traceparent"

// PathTimeline, followed by a trace ID or by the path of an object, returns the stages of that
// trace or object.
const PathTimeline = "/timeline"

// Stage is one measured step of the processing of a client's write.
type Stage struct {
	TraceID string `json:"traceID"`
	// "authenticated", "committed", "scheduled", "sandbox" ...
	Name   string `json:"name"`
	Actor  string `json:"actor"`  // "apiserver/cp1", "scheduler/cp2", "agent/w1"
	Object string `json:"object"` // "pod/default/hello-abc12"
	// by the clock of the recording replica; times of agents are corrected by the clock offset
	Start    time.Time     `json:"start"`
	Duration time.Duration `json:"duration"`         // 0 for an event without a duration
	Detail   string        `json:"detail,omitempty"` // "index 41, leader cp2"
}

// Timeline is a replica's ring buffer of stages, bounded in number and in bytes. It is in memory
// only and never stored. A complete timeline must be collected from all replicas. All methods are
// safe for concurrent use; a nil *Timeline records nothing.
type Timeline struct {
	mu       sync.Mutex
	ring     []Stage // ring buffer: count stages, of which the oldest is at index first; grows up to size
	size     int
	first    int
	count    int
	bytes    int // size of the recorded stages
	maxBytes int
}

const (
	stageBytes   = 112 // size of a Stage without its strings
	averageStage = 320 // average size of a stage for which maxBytes is computed

	clipShort = 128 // maximum length of a stage's name, actor and trace
	clipLong  = 512 // maximum length of strings from clients and nodes: objects and details
)

// NewTimeline returns a Timeline that keeps the newest stages, at most size. It keeps fewer if they
// have more than 320 bytes on average.
func NewTimeline(size int) *Timeline { return &Timeline{size: size, maxBytes: size * averageStage} }

// Record adds stages and drops the oldest stages that exceed the limits. It truncates long strings
// in the given stages.
func (t *Timeline) Record(stages ...Stage) {
	if t == nil || t.size == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range stages {
		s.truncateStrings()
		if t.count == len(t.ring) {
			t.growRing()
		}
		for t.count == len(t.ring) || t.count > 0 && t.bytes+s.memoryBytes() > t.maxBytes {
			t.bytes -= t.ring[t.first].memoryBytes()
			t.ring[t.first] = Stage{}
			t.first = (t.first + 1) % len(t.ring)
			t.count--
		}
		t.ring[(t.first+t.count)%len(t.ring)] = s
		t.count++
		t.bytes += s.memoryBytes()
	}
}

// growRing doubles the ring's capacity, up to size, so that a replica with few requests uses little
// memory.
func (t *Timeline) growRing() {
	n := min(max(2*len(t.ring), 64), t.size)
	if n == len(t.ring) {
		return
	}
	ring := make([]Stage, n)
	k := copy(ring, t.ring[t.first:])
	copy(ring[k:], t.ring[:t.first])
	t.ring, t.first = ring, 0
}

func (s *Stage) memoryBytes() int {
	return stageBytes + len(s.TraceID) + len(s.Name) + len(s.Actor) + len(s.Object) + len(s.Detail)
}

func (s *Stage) truncateStrings() {
	s.TraceID, s.Name, s.Actor = Truncate(s.TraceID, clipShort), Truncate(s.Name, clipShort),
		Truncate(s.Actor, clipShort)
	s.Object, s.Detail = Truncate(s.Object, clipLong), Truncate(s.Detail, clipLong)
}

// Truncate returns a text, truncated to maxBytes. A truncated result is a copy, so that it does not
// keep the whole text in memory.
func Truncate(text string, maxBytes int) string {
	if len(text) <= maxBytes {
		return text
	}
	return strings.ToValidUTF8(strings.Clone(text[:maxBytes-3]), "") + "..."
}

// StagesOfTrace returns the recorded stages of a trace, oldest first.
func (t *Timeline) StagesOfTrace(traceID string) []Stage {
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

// StartStages returns a StageTimer. Its first stage starts at startTime.
func StartStages(actor string, startTime time.Time) *StageTimer {
	return &StageTimer{actor: actor, last: startTime}
}

// EndStage records a stage with the given name. The stage started at the end of the previous stage,
// and ends at endTime.
func (s *StageTimer) EndStage(name, detail string, endTime time.Time) {
	if s == nil {
		return
	}
	s.stages = append(s.stages, Stage{Name: name, Actor: s.actor, Start: s.last, Duration: endTime.Sub(s.last),
		Detail: detail})
	s.last = endTime
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

// ClientView returns the object as clients receive it: obj itself, or a copy without
// TraceParentAnnotation if the kind does not show that annotation. The copy shares everything else
// with obj.
func (k *Kind) ClientView(obj Object) Object {
	if _, traced := obj.GetAnnotations()[TraceParentAnnotation]; !traced || k.Serving.ShowsTrace {
		return obj
	}
	out := k.Type.Ops.Shallow(obj)
	annotations := maps.Clone(obj.GetAnnotations())
	delete(annotations, TraceParentAnnotation)
	if len(annotations) == 0 {
		annotations = nil
	}
	out.SetAnnotations(annotations)
	return out
}
