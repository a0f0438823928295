package watch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/raftstore"
)

// A catching-up watcher whose channel has room for another revision, but not for
// its bytes, cannot wait for its reader as it can for a full channel: it looks
// again and again, less often the longer the reader does not read.
const (
	lookSoon = time.Millisecond
	lookLate = 100 * time.Millisecond
)

// chase sets a watcher to catching up.
func (h *Hub) chase(w *Watcher) {
	if w.synced {
		h.leave(w)
	}
	h.chasing.Add(1)
	go func() {
		defer h.chasing.Done()
		h.catchUp(w)
	}()
}

// catchUp reads a watcher forward until it has seen everything, then makes it
// synced under the lock that publish holds: no revision falls between.
func (h *Hub) catchUp(w *Watcher) {
	stall := time.NewTicker(h.opts.StallCheck)
	defer stall.Stop()
	for {
		revisions, err := h.history.Read(w.cursor, readAhead)
		if err != nil {
			h.finish(w, err)
			return
		}
		if len(revisions) == 0 {
			if h.rejoin(w) || w.note != 0 && !h.give(w, raftstore.Events{Revision: w.note}, stall.C) {
				return
			}
			w.note = 0
			continue
		}
		// A copy, because the original keeps a whole stretch of history alive.
		for _, r := range slices.Clone(revisions[:few(revisions)]) {
			if !h.feed(w, filter(r, w.prefix), stall.C) {
				return
			}
			w.cursor = r.Revision
		}
	}
}

// few is how many of the revisions a watcher holds at once, at least one.
func few(revisions []raftstore.Events) int {
	var bytes int64
	for n := range revisions {
		if bytes += weight(revisions[n]); n > 0 && bytes > maxUnread {
			return n
		}
	}
	return len(revisions)
}

// feed hands a catching-up watcher what concerns it; false when it ended.
func (h *Hub) feed(w *Watcher, ev raftstore.Events, stall <-chan time.Time) bool {
	if len(ev.Events) == 0 {
		select {
		case <-w.done:
			h.finish(w, nil)
			return false
		default:
			return true
		}
	}
	return h.give(w, ev, stall)
}

// give waits for the reader of a catching-up watcher; false when it ended.
func (h *Hub) give(w *Watcher, ev raftstore.Events, stall <-chan time.Time) bool {
	bytes := weight(ev)
	for wait := lookSoon; ; wait = min(2*wait, lookLate) {
		c, look := w.c, (<-chan time.Time)(nil)
		if !w.unread.fits(len(c), bytes) {
			c, look = nil, time.After(wait)
		}
		select {
		case c <- ev:
			w.told = ev.Revision
			w.unread.sent(bytes)
			return true
		case <-look:
		case <-w.done:
			h.finish(w, nil)
			return false
		case <-stall:
			if _, err := h.history.Read(w.cursor, 1); err != nil {
				h.finish(w, err)
				return false
			}
		}
	}
}

// finish ends a catching-up watcher from its own goroutine.
func (h *Hub) finish(w *Watcher, err error) {
	if errors.Is(err, raftstore.ErrCompacted) {
		err = fmt.Errorf("watch of %q: %w: %w", w.prefix, raftstore.ErrSlowWatcher, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !w.ended {
		if err != nil {
			h.cut++
		}
		h.end(w, err)
	}
	close(w.c)
}

// filter reduces a revision to the events with the prefix.
func filter(r raftstore.Events, prefix string) raftstore.Events {
	n := 0
	for i := range r.Events {
		if strings.HasPrefix(r.Events[i].Item.Key, prefix) {
			n++
		}
	}
	if n == len(r.Events) {
		return r
	}
	part := raftstore.Events{Revision: r.Revision}
	for i := range r.Events {
		if strings.HasPrefix(r.Events[i].Item.Key, prefix) {
			part.Events = append(part.Events, r.Events[i])
		}
	}
	return part
}
