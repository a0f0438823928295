package replica

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// Heartbeats do not wait for the disk, so that a slow one costs no leadership. But
// a leader whose disk does not answer at all would lead for ever and commit
// nothing. When a write of its log has taken longer than DiskPatience it falls
// silent instead: the others miss it and elect one of them, and what it has
// under way is proposed there under its own id. It follows once its disk answers,
// or stops when that reports a failure.

// writing is when the write of one file that is under way began.
type writing struct {
	from    time.Time    // what since counts from, by the monotonic clock
	since   atomic.Int64 // nanoseconds; 0 = nothing is being written
	noticed atomic.Int64 // the write that was logged as hanging
}

func (w *writing) begin() { w.since.Store(max(1, int64(time.Since(w.from)))) }
func (w *writing) end()   { w.since.Store(0) }

// pending is for how long the write under way has taken; 0 when none exists.
func (w *writing) pending() time.Duration {
	since := w.since.Load()
	if since == 0 {
		return 0
	}
	return time.Since(w.from) - time.Duration(since)
}

// pendingWrite returns how long the oldest write of the log or of a vote that is under way has taken; 0 when none exists.
func (m *meters) pendingWrite() time.Duration { return max(m.writing.pending(), m.voting.pending()) }

// hangs reports whether a write of this replica's log or vote has not returned for DiskPatience.
func (r *Replica) hangs() bool {
	hangs := false
	for _, w := range []*writing{&r.meters.writing, &r.meters.voting} {
		since, took := w.since.Load(), w.pending()
		if took < r.cfg.DiskPatience || took == 0 {
			continue
		}
		hangs = true
		if w.noticed.Swap(since) != since {
			r.log.Error("the disk does not answer: if this replica leads it falls silent, so that another is elected", "log", r.cfg.DataDir, "after", took)
		}
	}
	return hangs
}

// untilHung returns the time after which hangs can have changed: no write that is under way now, or starts later, hangs earlier.
func (r *Replica) untilHung() time.Duration {
	if r.hangs() {
		return max(hungPoll, r.cfg.DiskPatience/50)
	}
	return max(time.Millisecond, r.cfg.DiskPatience-r.meters.pendingWrite())
}

// hungPoll is the least time between two checks whether a disk that hung answers again.
const hungPoll = 10 * time.Millisecond

var errDiskHangs = errors.New("not sent: the disk of this replica does not answer")

// silentWhenHung sends nothing that would keep the followers from an election
// while this replica's disk hangs.
type silentWhenHung struct {
	*overheard
	hangs func() bool
}

// AppendEntries implements raft.Transport.
func (t *silentWhenHung) AppendEntries(id raft.ServerID, target raft.ServerAddress, args *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	if t.hangs() {
		return fmt.Errorf("entries for %s: %w", id, errDiskHangs)
	}
	return t.overheard.AppendEntries(id, target, args, resp)
}
