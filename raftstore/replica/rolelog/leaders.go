package rolelog

import (
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
)

// LeaderChanges records when this replica observed a new leader. Many changes within a short time
// indicate machines or networks that stall for longer than HeartbeatTimeout. It is safe for
// concurrent use.
type LeaderChanges struct {
	mu sync.Mutex
	at []time.Time
}

// maxRecordedChanges is the maximum number of recorded changes. An election takes at least some
// hundred milliseconds.
const maxRecordedChanges = 1000

func (l *LeaderChanges) RecordChange(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropOld(now)
	if l.at = append(l.at, now); len(l.at) > maxRecordedChanges {
		l.at = slices.Delete(l.at, 0, 1)
	}
}

// CountChanges returns the number of changes within raftstore.LeadersWindow before the time now.
func (l *LeaderChanges) CountChanges(now time.Time) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropOld(now)
	return len(l.at)
}

// dropOld removes the changes that are older than raftstore.LeadersWindow. The caller holds l.mu.
func (l *LeaderChanges) dropOld(now time.Time) {
	old := 0
	for old < len(l.at) && now.Sub(l.at[old]) > raftstore.LeadersWindow {
		old++
	}
	l.at = slices.Delete(l.at, 0, old)
}
