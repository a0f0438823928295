package rolelog

import (
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
)

func TestLeadersOfLate(t *testing.T) {
	var l LeaderChanges
	at := time.Now()
	for range 5 {
		l.RecordChange(at)
		at = at.Add(time.Minute)
	}
	if n := l.CountChanges(at); n != 5 {
		t.Errorf("%d in five minutes, want 5", n)
	}
	if n := l.CountChanges(at.Add(raftstore.LeadersWindow - 2*time.Minute)); n != 2 {
		t.Errorf("%d when the first three are too long ago, want 2", n)
	}
	for range 3 * maxRecordedChanges {
		l.RecordChange(at)
	}
	if n := l.CountChanges(at); n != maxRecordedChanges {
		t.Errorf("%d are kept, want %d at most", n, maxRecordedChanges)
	}
	if n := l.CountChanges(at.Add(2 * raftstore.LeadersWindow)); n != 0 {
		t.Errorf("%d in the end, want none", n)
	}
}
