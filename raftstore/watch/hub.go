// Package watch fans out events to watchers without ever blocking the commit
// that made them.
//
// A watcher is in one of two states. Synced: it has seen everything and the
// hub hands it each new revision as it is published. Catching up: it is
// behind, because it began in the past or because its reader was slow, and a
// goroutine of its own reads it forward from history at the reader's pace,
// until it is synced again. A watcher so slow that history has been compacted
// under it is ended. What a watcher holds is therefore bounded, whatever its
// reader does: one buffered channel and a few revisions, in number and in bytes.
package watch

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
)

// History is the retained past, read without locks. Read returns revisions
// that follow after, in order and without a gap, at most max and possibly
// fewer, none when after is the newest; ErrCompacted when they are gone.
type History interface {
	Read(after raftstore.Revision, max int) ([]raftstore.Events, error)
}

const (
	channelSize = 128 // revisions a synced watcher may be behind
	readAhead   = 64  // revisions a catching-up watcher holds, and at most maxUnread bytes or one
)

// Options tune a hub; zero values mean the defaults.
type Options struct {
	// ProgressEvery is the longest time for which a synced watcher is left
	// without word of a revision that did not concern it. Default 5 s.
	ProgressEvery time.Duration
	// StallCheck is how often a watcher whose reader does not read is compared
	// with the compacted revision. Default 10 s.
	StallCheck time.Duration
}

// Hub distributes revisions to watchers.
type Hub struct {
	history History
	opts    Options

	mu            sync.Mutex
	revision      raftstore.Revision // the last one published
	groups        map[string]*group  // synced watchers by prefix
	prefixLengths []int              // distinct lengths of the prefixes in groups, ascending
	touchedGroups []*group           // scratch of publish
	all           map[*Watcher]struct{}
	closed        bool
	slowWatchers  uint64         // watchers ended because history was gone
	catchingUp    sync.WaitGroup // goroutines of watchers that catch up
}

// group is the synced watchers of one prefix.
type group struct {
	prefix   string
	watchers map[*Watcher]struct{}
	matched  []int // scratch of publish: indices of events
}

// New returns a hub whose watchers have been told everything up to revision.
func New(history History, revision raftstore.Revision, o Options) *Hub {
	if o.ProgressEvery == 0 {
		o.ProgressEvery = 5 * time.Second
	}
	if o.StallCheck == 0 {
		o.StallCheck = 10 * time.Second
	}
	return &Hub{history: history, opts: o, revision: revision,
		groups: make(map[string]*group), all: make(map[*Watcher]struct{})}
}

// Run sends progress notes until ctx ends, then ends every watcher with
// ErrClosed and waits for their goroutines.
func (h *Hub) Run(ctx context.Context) error {
	tick := time.NewTicker(h.opts.ProgressEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			h.sendProgressNotes()
		case <-ctx.Done():
			h.Close()
			return nil
		}
	}
}

// Close ends every watcher with ErrClosed. Later calls of Watch fail with it.
func (h *Hub) Close() {
	h.mu.Lock()
	h.closed = true
	for w := range h.all {
		h.endWatcher(w, raftstore.ErrClosed)
	}
	h.mu.Unlock()
	h.catchingUp.Wait()
}

// Publish hands out new revisions, which must follow the last one published
// and be readable from History already. It never blocks.
func (h *Hub) Publish(revisions []raftstore.Events) {
	if len(revisions) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range revisions {
		h.publishRevision(r)
	}
}

func (h *Hub) publishRevision(r raftstore.Events) {
	h.revision = r.Revision
	for i := range r.Events {
		key := r.Events[i].Item.Key
		for _, n := range h.prefixLengths {
			if n > len(key) {
				break
			}
			g := h.groups[key[:n]]
			if g == nil {
				continue
			}
			if len(g.matched) == 0 {
				h.touchedGroups = append(h.touchedGroups, g)
			}
			g.matched = append(g.matched, i)
		}
	}
	for _, g := range h.touchedGroups {
		part := selectEvents(r, g.matched)
		bytes := revisionBytes(part)
		for w := range g.watchers {
			h.sendOrCatchUp(w, part, bytes)
		}
		g.matched = g.matched[:0]
	}
	h.touchedGroups = h.touchedGroups[:0]
}

// selectEvents returns the revision reduced to the events at the indices.
func selectEvents(r raftstore.Events, indices []int) raftstore.Events {
	if len(indices) == len(r.Events) {
		return r
	}
	part := raftstore.Events{Revision: r.Revision, Events: make([]raftstore.Event, len(indices))}
	for to, from := range indices {
		part.Events[to] = r.Events[from]
	}
	return part
}

// sendOrCatchUp hands one revision of so many bytes to a synced watcher, or sets it
// aside to catch up.
func (h *Hub) sendOrCatchUp(w *Watcher, ev raftstore.Events, bytes int64) {
	if ev.Revision <= w.cursor {
		return
	}
	if !w.unreadBytes.hasSpaceFor(len(w.c), bytes) {
		h.startCatchUp(w)
		return
	}
	select {
	case w.c <- ev:
		w.cursor, w.reportedRevision = ev.Revision, ev.Revision
		w.unreadBytes.recordSent(bytes)
	default:
		h.startCatchUp(w)
	}
}

// Reset tells the hub that the state was replaced as a whole, by a snapshot
// that is at revision. Watchers go on from the history that came with it.
func (h *Hub) Reset(revision raftstore.Revision) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.revision = revision
	for w := range h.all {
		if w.synced && w.cursor < revision {
			h.startCatchUp(w)
		}
	}
}

// Revision is the last revision published.
func (h *Hub) Revision() raftstore.Revision {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.revision
}

// Watchers counts the running watchers and those of them that catch up.
func (h *Hub) Watchers() (running, behind int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.all {
		if !w.synced {
			behind++
		}
	}
	return len(h.all), behind
}

// SlowWatchers counts the watchers that were ended because history had been compacted
// under them.
func (h *Hub) SlowWatchers() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.slowWatchers
}

// sendProgressNotes sends progress to the synced watchers that do not know of the newest
// revision. A full channel is left alone: what is in it is progress.
func (h *Hub) sendProgressNotes() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.all {
		if w.synced && w.reportedRevision < h.revision {
			h.trySendProgress(w)
		}
	}
}

// trySendProgress tells a synced watcher that it has everything, if it reads.
func (h *Hub) trySendProgress(w *Watcher) bool {
	select {
	case w.c <- raftstore.Events{Revision: h.revision}:
		w.cursor, w.reportedRevision = h.revision, h.revision
		w.unreadBytes.recordSent(0)
		return true
	default:
		return false
	}
}

// Watch starts a watcher of prefix that begins after a revision; 0 means from
// now. ErrCompacted when that is no longer retained, ErrFutureRevision when it
// has not been published yet.
func (h *Hub) Watch(ctx context.Context, prefix string, after raftstore.Revision) (*Watcher, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("watch of %q: %w", prefix, err)
	}
	w := &Watcher{hub: h, prefix: prefix, c: make(chan raftstore.Events, channelSize), done: make(chan struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, fmt.Errorf("watch of %q: %w", prefix, raftstore.ErrClosed)
	}
	if after > h.revision {
		return nil, fmt.Errorf("watch of %q after revision %d: store is at %d: %w", prefix, after, h.revision, raftstore.ErrFutureRevision)
	}
	if after == 0 {
		after = h.revision
	}
	w.cursor, w.reportedRevision = after, after
	if after < h.revision {
		if _, err := h.history.Read(after, 1); err != nil {
			return nil, fmt.Errorf("watch of %q: %w", prefix, err)
		}
		h.all[w] = struct{}{}
		h.startCatchUp(w)
	} else {
		h.all[w] = struct{}{}
		h.joinGroup(w)
	}
	w.stopContextFunc = context.AfterFunc(ctx, w.Stop)
	return w, nil
}

// joinGroup makes a watcher synced.
func (h *Hub) joinGroup(w *Watcher) {
	g := h.groups[w.prefix]
	if g == nil {
		g = &group{prefix: w.prefix, watchers: make(map[*Watcher]struct{})}
		h.groups[w.prefix] = g
		h.updatePrefixLengths()
	}
	g.watchers[w] = struct{}{}
	w.synced = true
}

// tryRejoin makes a watcher synced if nothing was published meanwhile. It reports
// whether the watcher's goroutine is finished with it; if not, there is more to
// read, or a note to be given first.
func (h *Hub) tryRejoin(w *Watcher) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w.ended {
		close(w.c)
		return true
	}
	if w.cursor < h.revision {
		return false
	}
	if w.progressRequested {
		w.progressRequested, w.pendingNote = false, w.cursor
		return false
	}
	h.joinGroup(w)
	return true
}

// leaveGroup takes a watcher out of its group.
func (h *Hub) leaveGroup(w *Watcher) {
	g := h.groups[w.prefix]
	delete(g.watchers, w)
	w.synced = false
	// A group in the middle of publish is emptied by it; removing it is safe
	// because touched holds it.
	if len(g.watchers) == 0 {
		delete(h.groups, w.prefix)
		h.updatePrefixLengths()
	}
}

func (h *Hub) updatePrefixLengths() {
	h.prefixLengths = h.prefixLengths[:0]
	for prefix := range h.groups {
		if !slices.Contains(h.prefixLengths, len(prefix)) {
			h.prefixLengths = append(h.prefixLengths, len(prefix))
		}
	}
	slices.Sort(h.prefixLengths)
}

// endWatcher marks a watcher as ended. The channel of a synced one is closed here,
// that of a catching-up one by its goroutine, which alone sends on it.
func (h *Hub) endWatcher(w *Watcher, err error) {
	if w.ended {
		return
	}
	w.ended, w.err = true, err
	delete(h.all, w)
	close(w.done)
	if w.stopContextFunc != nil {
		w.stopContextFunc()
	}
	if w.synced {
		h.leaveGroup(w)
		close(w.c)
	}
}

// Watcher implements raftstore.Watcher.
type Watcher struct {
	hub             *Hub
	prefix          string
	c               chan raftstore.Events
	done            chan struct{} // closed when the watcher has ended
	stopContextFunc func() bool   // from the context; written once, under hub.mu

	// cursor is the last revision delivered or passed over. It belongs to
	// hub.mu while synced and to the watcher's goroutine while not.
	cursor           raftstore.Revision
	reportedRevision raftstore.Revision // the last revision that the reader was given word of; owned alike
	pendingNote      raftstore.Revision // of the note that its goroutine is about to give
	unreadBytes      unreadCounter      // what c holds; owned alike

	// Under hub.mu.
	synced            bool
	ended             bool
	progressRequested bool
	err               error
}

// C delivers the revisions.
func (w *Watcher) C() <-chan raftstore.Events { return w.c }

// Err says why C was closed.
func (w *Watcher) Err() error {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	return w.err
}

// Stop ends the watcher. It may be called any number of times.
func (w *Watcher) Stop() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	w.hub.endWatcher(w, nil)
}

// RequestProgress asks for a progress note as soon as everything up to the
// present revision has been delivered: at once for a synced watcher.
func (w *Watcher) RequestProgress() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	switch {
	case w.ended:
	case w.synced && w.hub.trySendProgress(w):
	default:
		// The note follows what is unread, or not read from history yet.
		w.progressRequested = true
		if w.synced {
			w.hub.startCatchUp(w)
		}
	}
}
