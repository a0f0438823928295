// Package watch fans out events to watchers and never blocks the commit that caused them.
//
// A watcher has one of two states. A synced watcher has received everything, and the hub sends it
// each new revision when it is published. A catching-up watcher is behind, because it started at a
// past revision or its reader was slow. Each catching-up watcher has a goroutine that sends it
// revisions from history, as fast as its reader receives them, until it is synced again. A watcher
// is ended if history is compacted before the watcher has received it. The memory of a watcher is
// therefore bounded regardless of its reader: one buffered channel and a few revisions, limited in
// number and bytes.
package watch

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
)

// History is the sequence of revisions that have not been compacted. It is read without locks. Read
// returns consecutive revisions, beginning with the first that is greater than after. It returns at
// most limit revisions, and possibly fewer than exist. It returns no revisions if after is the
// newest revision, and ErrCompacted if the revisions have been compacted.
type History interface {
	Read(after raftstore.Revision, limit int) ([]raftstore.Events, error)
}

const (
	channelSize = 128 // how many unread revisions a synced watcher may have
	readAhead   = 64  // how many revisions are copied from history at once for a catching-up watcher
)

// Options configure a hub. Zero values mean the defaults.
type Options struct {
	// ProgressEvery is the interval of progress notes (revisions without events) for synced
	// watchers that have not received the newest revision. Default 5 s.
	ProgressEvery time.Duration
	// StallCheck is the interval at which a catching-up watcher that waits for its reader is
	// checked: whether history still retains the revisions that the watcher needs. Default 10 s.
	StallCheck time.Duration
}

// Hub sends new revisions to the watchers with a matching prefix, and revisions from history to
// watchers that are behind.
type Hub struct {
	history History
	opts    Options

	mu            sync.Mutex
	revision      raftstore.Revision // the last published revision
	groups        map[string]*group  // synced watchers by prefix
	prefixLengths []int              // distinct prefix lengths of groups, ascending
	touchedGroups []*group           // reused by publishRevision
	all           map[*Watcher]struct{}
	closed        bool
	slowWatchers  uint64         // number of watchers that ended because their history was compacted
	catchingUp    sync.WaitGroup // goroutines of catching-up watchers
}

// group is the set of synced watchers of one prefix.
type group struct {
	prefix   string
	watchers map[*Watcher]struct{}
	matched  []int // reused by publishRevision: indices of events
}

// New returns a hub with the given revision as its last published revision. A watcher receives
// later revisions, or revisions from history if it starts at an earlier revision.
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

// Run sends progress notes at the interval Options.ProgressEvery until ctx ends. It then ends every
// watcher with ErrClosed and waits for the goroutines of the watchers.
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

// Close ends every watcher with ErrClosed and waits for their goroutines. Later calls of Watch fail
// with ErrClosed.
func (h *Hub) Close() {
	h.mu.Lock()
	h.closed = true
	for w := range h.all {
		h.endWatcher(w, raftstore.ErrClosed)
	}
	h.mu.Unlock()
	h.catchingUp.Wait()
}

// Publish sends new revisions to the watchers. They must follow the last published revision, and
// History must contain them already. Publish never blocks.
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

// selectEvents returns the revision r with only the events at the given indices.
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

// sendOrCatchUp sends one revision to a synced watcher. bytes is the revision's size. If the
// watcher's channel is full, or has too many unread bytes, the watcher catches up from history
// instead.
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

// Reset sets the last published revision. It must be called after a snapshot at that revision has
// replaced the whole state. Watchers continue from the history of the new state.
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

// Revision returns the last published revision.
func (h *Hub) Revision() raftstore.Revision {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.revision
}

// Watchers returns the number of running watchers and how many of them are catching up.
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

// SlowWatchers returns how many watchers were ended because their history had been compacted.
func (h *Hub) SlowWatchers() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.slowWatchers
}

// sendProgressNotes sends a progress note to each synced watcher that has not received the newest
// revision. It skips a watcher with a full channel, because the channel's contents already report
// progress.
func (h *Hub) sendProgressNotes() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.all {
		if w.synced && w.reportedRevision < h.revision {
			h.trySendProgress(w)
		}
	}
}

// trySendProgress sends a synced watcher a progress note, and returns false if its channel is full.
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

// Watch starts a watcher of the keys with the prefix, for revisions greater than after. 0 means the
// current revision. Watch returns ErrCompacted if history does not retain the revisions, and
// ErrFutureRevision if the hub has not published the revision after yet.
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
		return nil, fmt.Errorf("watch of %q after revision %d: store is at %d: %w", prefix, after, h.revision,
			raftstore.ErrFutureRevision)
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

// joinGroup makes a watcher synced. It adds the watcher to the group of its prefix, to which
// Publish sends. The caller holds h.mu.
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

// tryRejoin makes a catching-up watcher synced if it has received the newest revision. It returns
// true if the watcher's goroutine must stop, because the watcher is synced or has ended. It returns
// false if more revisions must be read, or if the requested progress note must be sent first.
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

// leaveGroup removes a synced watcher from the group of its prefix. The watcher is then no longer
// synced. The caller holds h.mu.
func (h *Hub) leaveGroup(w *Watcher) {
	g := h.groups[w.prefix]
	delete(g.watchers, w)
	w.synced = false
	// publishRevision may be emptying this group. Removing it from the map is safe because
	// touchedGroups still refers to it.
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

// endWatcher marks a watcher as ended with the given error. It closes the channel of a synced
// watcher. The goroutine of a catching-up watcher closes its channel itself, because it is the only
// sender. The caller holds h.mu.
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

// Watcher receives the revisions with events under one prefix. It implements raftstore.Watcher and
// raftstore.ProgressRequester.
type Watcher struct {
	hub             *Hub
	prefix          string
	c               chan raftstore.Events
	done            chan struct{} // closed when the watcher has ended
	stopContextFunc func() bool   // stops the context.AfterFunc; written once, under hub.mu

	// cursor is the last revision that was delivered or skipped. It is guarded by hub.mu while the
	// watcher is synced, and owned by the watcher's goroutine otherwise.
	cursor           raftstore.Revision
	reportedRevision raftstore.Revision // last revision that was reported to the reader; guarded like cursor
	pendingNote      raftstore.Revision // revision of the progress note that its goroutine sends next
	unreadBytes      unreadCounter      // counts the bytes of the revisions in c; guarded like cursor

	// Guarded by hub.mu.
	synced            bool
	ended             bool
	progressRequested bool
	err               error
}

// C returns the channel of revisions.
func (w *Watcher) C() <-chan raftstore.Events { return w.c }

// Err returns the reason why C was closed, as described for raftstore.Watcher.
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

// RequestProgress requests a progress note, which is sent when everything up to the current
// revision has been delivered. A synced watcher receives it immediately.
func (w *Watcher) RequestProgress() {
	w.hub.mu.Lock()
	defer w.hub.mu.Unlock()
	switch {
	case w.ended:
	case w.synced && w.hub.trySendProgress(w):
	default:
		// The note follows the unread revisions.
		w.progressRequested = true
		if w.synced {
			w.hub.startCatchUp(w)
		}
	}
}
