package watch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/raftstore"
)

// The delays between attempts to send a revision to a catching-up watcher with a channel that has a
// free slot, but contains too many unread bytes. In this case a send on the channel would not wait
// for the reader. The delay doubles from minRetryDelay to maxRetryDelay.
const (
	minRetryDelay = time.Millisecond
	maxRetryDelay = 100 * time.Millisecond
)

// startCatchUp starts a goroutine that sends a watcher revisions from history until the watcher is
// synced again. The caller holds h.mu.
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

// catchUp sends the revisions of history to a watcher until the watcher has received the newest
// one. The watcher then becomes synced under the lock that Publish also holds, so that no revision
// is missed. catchUp returns earlier if the watcher ends.
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
			if h.tryRejoin(w) || w.pendingNote != 0 &&
				!h.sendBlocking(w, raftstore.Events{Revision: w.pendingNote}, stall.C) {
				return
			}
			w.pendingNote = 0
			continue
		}
		// Copy, because the original retains a whole segment of history.
		for _, r := range slices.Clone(revisions[:revisionsToHold(revisions)]) {
			if !h.sendMatching(w, filterByPrefix(r, w.prefix), stall.C) {
				return
			}
			w.cursor = r.Revision
		}
	}
}

// revisionsToHold returns how many of the revisions, counted from the first one, may be copied from
// history at once for a catching-up watcher. Their total size is at most maxUnread bytes, but the
// result is at least 1.
func revisionsToHold(revisions []raftstore.Events) int {
	var bytes int64
	for n := range revisions {
		if bytes += revisionBytes(revisions[n]); n > 0 && bytes > maxUnread {
			return n
		}
	}
	return len(revisions)
}

// sendMatching sends one revision to a catching-up watcher. ev contains only events with the
// watcher's prefix; a revision without events is skipped. sendMatching returns false if the watcher
// has ended. Each tick of stall triggers a check whether history still retains the revisions that
// the watcher needs; if not, the watcher is ended.
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

// sendBlocking sends one revision to a catching-up watcher, and waits until the channel has space
// for it. It returns false if the watcher has ended. Each tick of stall triggers a check whether
// history still retains the revisions after the watcher's cursor; if not, the watcher is ended.
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

// finishCatchUp ends a catching-up watcher with the given error and closes its channel. Only the
// watcher's own goroutine calls it. If history was compacted, the error also wraps ErrSlowWatcher.
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

// filterByPrefix returns the revision r with only the events of keys that have the prefix.
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
