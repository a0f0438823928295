package linear

import (
	"context"
	"errors"
	"time"

	"keelson.dev/keelson/raftstore"
)

// session is one watch: from a revision, through one door, until it ended.
type session struct {
	watcher int // which follower this is
	door    string
	prefix  string
	after   raftstore.Revision
	seen    []sighting
	through raftstore.Revision // the last revision that was delivered or passed over
}

// sighting is one delivery and when it was taken.
type sighting struct {
	raftstore.Events
	at time.Duration
}

// Follower watches a prefix as a cache does: it lists, watches from there, and
// goes on at another door from the revision it has seen. Only when history is
// gone does it list again.
type Follower struct {
	rec    *Recorder
	id     int
	prefix string
	cursor raftstore.Revision
	listed bool
}

// Follow returns a follower of a prefix, which must lie under the recorder's.
// It begins where the recording does. Only what a follower of the recorder's
// whole prefix has seen is history.
func (r *Recorder) Follow(id int, prefix string) *Follower {
	return &Follower{rec: r, id: id, prefix: prefix, cursor: r.base.Revision, listed: true}
}

// Forget makes the follower list again before it goes on.
func (f *Follower) Forget() { f.listed = false }

// Rewind makes the follower go on from a revision that it has seen already, or
// from the beginning of the recording if that is later.
func (f *Follower) Rewind(to raftstore.Revision) {
	if f.listed {
		f.cursor = max(f.rec.base.Revision, min(to, f.cursor))
	}
}

// Cursor is the revision up to which the follower has seen everything.
func (f *Follower) Cursor() raftstore.Revision { return f.cursor }

// Watch goes on through a door until ctx ends, enough returns true for the
// revision seen last, or the watch ends; the error says why. It is made once
// more, through any door, for as long as the caller likes.
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
		s.seen = append(s.seen, sighting{ev, f.rec.now()})
		s.through = max(s.through, ev.Revision)
		f.cursor = s.through
	}
	return nil
}
