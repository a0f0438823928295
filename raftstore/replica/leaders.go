package replica

import (
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
)

// lately keeps when this replica had another leader: many of them in a short time are none that died, but machines or a network
// that stall for longer than the heartbeat's timeout.
type lately struct {
	mu sync.Mutex
	at []time.Time
}

// mostLately is how many are kept: one is elected in no less than some hundred milliseconds.
const mostLately = 1000

func (l *lately) note(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(now)
	if l.at = append(l.at, now); len(l.at) > mostLately {
		l.at = slices.Delete(l.at, 0, 1)
	}
}

// count is how many there were within raftstore.LeadersWithin.
func (l *lately) count(now time.Time) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(now)
	return len(l.at)
}

// forget drops what is older; l.mu is held.
func (l *lately) forget(now time.Time) {
	old := 0
	for old < len(l.at) && now.Sub(l.at[old]) > raftstore.LeadersWindow {
		old++
	}
	l.at = slices.Delete(l.at, 0, old)
}
