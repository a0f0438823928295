package podevents

import (
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// Event names sort in the order of occurrence, also within one instant and after the clock was set
// back.
func TestEventNamesAreInOrder(t *testing.T) {
	clock := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	var out eventLog
	r := New(&out, "w1", func() time.Time { return clock }, false)
	p := &v1.Pod{}
	p.Name = "web"
	for i, reason := range []string{"Pulled", "Created", "Started", "Unhealthy", "Killing"} {
		if i == 3 {
			clock = clock.Add(-time.Hour)
		}
		r.Emit(p, "", v1.EventTypeNormal, reason, "")
	}
	if len(out.names) != 5 || !slices.IsSorted(out.names) || len(slices.Compact(slices.Clone(out.names))) != 5 {
		t.Errorf("names: %q", out.names)
	}
}

// eventLog records the names of events.
type eventLog struct {
	agent.Reporter
	names []string
	last  *v1.Event
}

func (l *eventLog) Event(e *v1.Event) { l.names, l.last = append(l.names, e.Name), e }

// An event is cut at a character boundary.
func TestLongMessagesAreCut(t *testing.T) {
	var out eventLog
	r := New(&out, "w1", time.Now, false)
	r.Emit(&v1.Pod{}, "", v1.EventTypeWarning, "Failed", strings.Repeat("é", 1000))
	if m := out.last.Message; len(m) > 1024 || !utf8.ValidString(m) || !strings.HasSuffix(m, "é...") {
		t.Errorf("an event of %d bytes", len(m))
	}
}
