package linear

import (
	"context"
	"errors"
	"time"

	"keelson.dev/keelson/raftstore"
)

// session is one watch through one door, from its first revision to its end.
type session struct {
	watcher int // ID of the follower
	door    string
	prefix  string
	after   raftstore.Revision
	seen    []sighting
	through raftstore.Revision // last revision that was delivered or skipped
}

// sighting is one delivery with its time.
type sighting struct {
	raftstore.Events
	at time.Duration
}

// Follower watches a prefix like a cache: it lists, watches from there, and resumes at another door
// from the last revision. It lists again only if history was compacted.
type Follower struct {
	rec    *Recorder
	id     int
	prefix string
	cursor raftstore.Revision
	listed bool
}

// Follow returns a follower of a prefix, which must be below the recorder's prefix. It starts at
// the start of the recording. Only followers of the recorder's whole prefix define the history.
func (r *Recorder) Follow(id int, prefix string) *Follower {
	return &Follower{rec: r, id: id, prefix: prefix, cursor: r.base.Revision, listed: true}
}

// Forget makes the follower list again before it resumes.
func (f *Follower) Forget() { f.listed = false }

// Rewind makes the follower resume from an earlier revision, or from the start of the recording if
// that is later.
func (f *Follower) Rewind(to raftstore.Revision) {
	if f.listed {
		f.cursor = max(f.rec.base.Revision, min(to, f.cursor))
	}
}

// Cursor returns the revision up to which the follower has received everything.
func (f *Follower) Cursor() raftstore.Revision { return f.cursor }

// Watch watches through a door until ctx ends, enough returns true for the last revision, or the
// watch ends. The error is the reason. Watch may be called again, with any door.
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
