package replica

import (
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
)

func TestLeadersOfLate(t *testing.T) {
	var l lately
	at := time.Now()
	for range 5 {
		l.note(at)
		at = at.Add(time.Minute)
	}
	if n := l.count(at); n != 5 {
		t.Errorf("%d in five minutes, want 5", n)
	}
	if n := l.count(at.Add(raftstore.LeadersWindow - 2*time.Minute)); n != 2 {
		t.Errorf("%d when the first three are too long ago, want 2", n)
	}
	for range 3 * mostLately {
		l.note(at)
	}
	if n := l.count(at); n != mostLately {
		t.Errorf("%d are kept, want %d at most", n, mostLately)
	}
	if n := l.count(at.Add(2 * raftstore.LeadersWindow)); n != 0 {
		t.Errorf("%d in the end, want none", n)
	}
}
