package api

import (
	"fmt"
	"strings"
	"testing"
)

// The ring is bounded in number and in bytes, whatever clients write into it, and what is cut off is not held.
func TestTimelineIsBounded(t *testing.T) {
	line := NewTimeline(100)
	for i := range 1000 {
		line.Record(Stage{TraceID: "t", Name: fmt.Sprint(i)})
	}
	if got := line.StagesOfTrace("t"); len(got) != 100 || got[0].Name != "900" || got[99].Name != "999" {
		t.Fatalf("%d stages, from %s on", len(got), got[0].Name)
	}
	long := strings.Repeat("x", 1<<20)
	for i := range 1000 {
		line.Record(Stage{TraceID: "u", Name: fmt.Sprint(i), Actor: long, Object: long, Detail: long})
	}
	got := line.StagesOfTrace("u")
	if len(got) == 0 || got[len(got)-1].Name != "999" || len(line.StagesOfTrace("t")) != 0 {
		t.Fatalf("%d long stages, %d others", len(got), len(line.StagesOfTrace("t")))
	}
	bytes := 0
	for _, s := range got {
		bytes += s.memoryBytes()
	}
	if bytes > 100*averageStage || bytes != line.bytes {
		t.Errorf("%d bytes in %d stages, %d are counted", bytes, len(got), line.bytes)
	}
	if s := got[0]; len(s.Detail) > clipLong || !strings.HasSuffix(s.Detail, "...") || len(s.Actor) > clipShort {
		t.Errorf("a stage has %d bytes of detail and %d of actor", len(s.Detail), len(s.Actor))
	}
	NewTimeline(0).Record(Stage{Name: "nothing"})
}

func TestClip(t *testing.T) {
	for s, want := range map[string]string{"short": "short", "0123456789": "0123456...",
		"01234\u00e9\u00e9\u00e9": "01234\u00e9..."} {
		if got := Truncate(s, 10); s != "0123456789" && got != want || len(got) > 10 {
			t.Errorf("%q became %q, want %q", s, got, want)
		}
	}
	if got := Truncate("0123456789a", 10); got != "0123456..." {
		t.Errorf("got %q", got)
	}
}
