package pod

import (
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// told remembers the names of events.
type told struct {
	agent.Reporter
	names []string
}

func (t *told) Event(e *v1.Event) { t.names = append(t.names, e.Name) }

// Events of one moment, and those told after the clock was set back, have names in the order in which they happened.
func TestEventNamesAreInOrder(t *testing.T) {
	clock := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	var out told
	r := &recorder{reporter: &out, now: func() time.Time { return clock }, seen: map[string]*v1.Event{}}
	p := &v1.Pod{}
	p.Name = "web"
	for i, reason := range []string{"Pulled", "Created", "Started", "Unhealthy", "Killing"} {
		if i == 3 {
			clock = clock.Add(-time.Hour)
		}
		r.event(p, "", v1.EventTypeNormal, reason, "")
	}
	if len(out.names) != 5 || !slices.IsSorted(out.names) || len(slices.Compact(slices.Clone(out.names))) != 5 {
		t.Errorf("names: %q", out.names)
	}
}
