package linear

import (
	"context"
	"errors"
	"time"

	"keelson.dev/keelson/raftstore"
)

// session is one watch of a Follower through one replica, with everything that was delivered.
type session struct {
	watcher int // ID of the Follower that started the watch
	door    string
	prefix  string
	after   raftstore.Revision
	seen    []sighting
	through raftstore.Revision // last revision that the watch has delivered or, without events, has passed
}

// sighting is one delivery of a watch, with the time from the start of the recording until it was
// received.
type sighting struct {
	raftstore.Events
	at time.Duration
}

// Follower watches a prefix as a cache does: it lists, watches from the revision of the list, and
// resumes from the last received revision, possibly through another replica. It lists again only if
// history was compacted.
type Follower struct {
	rec    *Recorder
	id     int
	prefix string
	cursor raftstore.Revision
	listed bool
}

// Follow returns a follower of a prefix, which must be the recorder's prefix or below it. The
// follower starts at the revision at which the recording started. Check derives the history only
// from followers of the recorder's whole prefix.
func (r *Recorder) Follow(id int, prefix string) *Follower {
	return &Follower{rec: r, id: id, prefix: prefix, cursor: r.base.Revision, listed: true}
}

// Forget makes the next call of Watch list the prefix and watch from the revision of the list.
func (f *Follower) Forget() { f.listed = false }

// Rewind makes the follower resume from an earlier revision, but at the earliest from the start of
// the recording. It has no effect if the next call of Watch lists.
func (f *Follower) Rewind(revision raftstore.Revision) {
	if f.listed {
		f.cursor = max(f.rec.base.Revision, min(revision, f.cursor))
	}
}

// Cursor returns the last revision up to which the follower has received all events of its prefix.
func (f *Follower) Cursor() raftstore.Revision { return f.cursor }

// Watch watches the prefix through the replica of d and records the deliveries. It calls enough
// with each received revision, and returns nil when enough returns true. Otherwise it returns the
// error with which the watch ended. It may be called again, with any replica, and then resumes.
func (f *Follower) Watch(ctx context.Context, d Door, enough func(raftstore.Revision) bool) error {
	if !f.listed {
		l, err := f.rec.Through(d).List(ctx, f.prefix, raftstore.ListOptions{})
		if err != nil {
			return err
		}
		f.cursor, f.listed = l.Revision, true
	}
	w, err := d.Store.Watch(ctx, f.prefix, f.cursor)
	if err != nil {
		f.listed = !errors.Is(err, raftstore.ErrCompacted)
		return err
	}
	s := &session{watcher: f.id, door: d.Name, prefix: f.prefix, after: f.cursor, through: f.cursor}
	defer func() {
		w.Stop()
		f.rec.mu.Lock()
		defer f.rec.mu.Unlock()
		f.rec.sessions = append(f.rec.sessions, s)
	}()
	for !enough(f.cursor) {
		ev, open := <-w.C()
		if !open {
			err := w.Err()
			f.listed = !errors.Is(err, raftstore.ErrSlowWatcher) && !errors.Is(err, raftstore.ErrCompacted)
			return err
		}
		s.seen = append(s.seen, sighting{ev, f.rec.elapsed()})
		s.through = max(s.through, ev.Revision)
		f.cursor = s.through
	}
	return nil
}
