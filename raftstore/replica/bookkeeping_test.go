package replica

import (
	"testing"
	"time"
)

func TestAges(t *testing.T) {
	var a ages
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	if got := a.addSample(at(0), 5, time.Minute); got != 0 {
		t.Errorf("first sample: %d", got)
	}
	a.addSample(at(30), 9, time.Minute)
	if got := a.addSample(at(60), 9, time.Minute); got != 5 {
		t.Errorf("after a minute: %d, want 5", got)
	}
	if got := a.addSample(at(90), 9, time.Minute); got != 9 {
		t.Errorf("after a quiet minute: %d, want 9", got)
	}
	if len(a) != 0 {
		t.Errorf("%d samples remain", len(a))
	}
}
