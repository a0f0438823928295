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
	minRetryDelay = time.Millisecond
	maxRetryDelay = 100 * time.Millisecond
)

// startCatchUp sets a watcher to catching up.
func (h *Hub) startCatchUp(w *Watcher) {
	if w.synced {
		h.leaveGroup(w)
	}
	h.catchingUp.Add(1)
	go func() {
		defer h.catchingUp.Done()
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
			h.finishCatchUp(w, err)
			return
		}
		if len(revisions) == 0 {
			if h.tryRejoin(w) || w.pendingNote != 0 && !h.sendBlocking(w, raftstore.Events{Revision: w.pendingNote}, stall.C) {
				return
			}
			w.pendingNote = 0
			continue
		}
		// A copy, because the original keeps a whole stretch of history alive.
		for _, r := range slices.Clone(revisions[:revisionsToHold(revisions)]) {
			if !h.sendMatching(w, filterByPrefix(r, w.prefix), stall.C) {
				return
			}
			w.cursor = r.Revision
		}
	}
}

// revisionsToHold is how many of the revisions a watcher holds at once, at least one.
func revisionsToHold(revisions []raftstore.Events) int {
	var bytes int64
	for n := range revisions {
		if bytes += revisionBytes(revisions[n]); n > 0 && bytes > maxUnread {
			return n
		}
	}
	return len(revisions)
}

// sendMatching hands a catching-up watcher what concerns it; false when it ended.
func (h *Hub) sendMatching(w *Watcher, ev raftstore.Events, stall <-chan time.Time) bool {
	if len(ev.Events) == 0 {
		select {
		case <-w.done:
			h.finishCatchUp(w, nil)
			return false
		default:
			return true
		}
	}
	return h.sendBlocking(w, ev, stall)
}

// sendBlocking waits for the reader of a catching-up watcher; false when it ended.
func (h *Hub) sendBlocking(w *Watcher, ev raftstore.Events, stall <-chan time.Time) bool {
	bytes := revisionBytes(ev)
	for wait := minRetryDelay; ; wait = min(2*wait, maxRetryDelay) {
		c, look := w.c, (<-chan time.Time)(nil)
		if !w.unreadBytes.hasSpaceFor(len(c), bytes) {
			c, look = nil, time.After(wait)
		}
		select {
		case c <- ev:
			w.reportedRevision = ev.Revision
			w.unreadBytes.recordSent(bytes)
			return true
		case <-look:
		case <-w.done:
			h.finishCatchUp(w, nil)
			return false
		case <-stall:
			if _, err := h.history.Read(w.cursor, 1); err != nil {
				h.finishCatchUp(w, err)
				return false
			}
		}
	}
}

// finishCatchUp ends a catching-up watcher from its own goroutine.
func (h *Hub) finishCatchUp(w *Watcher, err error) {
	if errors.Is(err, raftstore.ErrCompacted) {
		err = fmt.Errorf("watch of %q: %w: %w", w.prefix, raftstore.ErrSlowWatcher, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !w.ended {
		if err != nil {
			h.slowWatchers++
		}
		h.endWatcher(w, err)
	}
	close(w.c)
}

// filterByPrefix reduces a revision to the events with the prefix.
func filterByPrefix(r raftstore.Events, prefix string) raftstore.Events {
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
