package watchcache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/internal/wakeup"
	"keelson.dev/keelson/raftstore"
)

const (
	watchChunk    = 128       // maximum number of events that a watcher reads at once
	watchBytes    = 256 << 10 // maximum bytes of these events, which stay in memory until delivered
	bookmarkEvery = time.Minute
)

// Watcher is a running watch. It has no goroutine and no queue of its own: it is a position in the
// storage's history, from which events are read when the client asks for them. If the history drops
// events that the client has not read, the watch ends immediately with an error event (410). So
// slow clients do not increase the memory usage: each watch keeps only the few events that it has
// read ahead.
//
// Read it with Next from one goroutine, or through ResultChan, not both.
type Watcher struct {
	served    *Served
	filter    *filter
	after     raftstore.Revision // deliver only changes after this revision
	bookmarks bool

	cursor cursor
	wake   wakeup.Signal

	initial     []*Entry           // entries still to be delivered as synthetic ADDED events
	initialEnd  raftstore.Revision // revision of the bookmark after the initial events; 0 = no such bookmark
	queue       []watch.Event      // events to be delivered
	unconverted []unconvertedItem  // objects in queue that must be converted
	ended       bool
	// converted contains the converted objects of the events that are being queued. It is used only
	// if the filter has a selector on fields of the kind's version.
	converted map[*Entry]api.Object

	timer    watchTimer
	lifetime lifetime
	results  resultChan
}

// cursor is a watcher's position in the history of its storage. The lock of the storage guards it.
type cursor struct {
	next        uint64        // number of the next event to read
	epoch       uint64        // epoch of the storage when the watch started
	expired     chan struct{} // closed when the history has dropped an event that the watcher has not read
	whenExpired func()        // called when expired is closed; may be nil
}

// watchTimer holds the times at which a waiting watch wakes up: for bookmarks and at its deadline.
type watchTimer struct {
	nextBookmark time.Time
	deadline     time.Time // zero = no deadline
}

// lifetime makes sure that a watch is stopped only once.
type lifetime struct {
	once    sync.Once
	stopped chan struct{}
	mu      sync.Mutex
	detach  func() bool // stops the context.AfterFunc that calls Stop; guarded by mu
}

// resultChan holds the channel that Watcher.ResultChan returns. once starts the goroutine that
// sends events to the channel.
type resultChan struct {
	once sync.Once
	c    chan watch.Event
}

var _ watch.Interface = (*Watcher)(nil)

// position is where a watch starts in the sequence of changes, and what it delivers first.
type position struct {
	after       raftstore.Revision // deliver events after this revision
	initial     bool               // deliver the current objects first
	endBookmark bool               // deliver a bookmark after the initial objects
	// storeRevision is the store's revision if it is older than the requested revision (after),
	// because a restore has undone changes that the client has seen. Otherwise it is 0. Such a
	// watch fails with a 410: it would miss all changes until the store passes the requested
	// revision.
	storeRevision raftstore.Revision
}

// newWatcher starts a watch at a position. If the history no longer has the changes after that
// position, the watch delivers an error event (410), as in Kubernetes. The watch stops when ctx
// ends.
func (s *Served) newWatcher(ctx context.Context, f *filter, start position, options *metav1.ListOptions) *Watcher {
	w := &Watcher{
		served: s, filter: f, after: start.after, bookmarks: options.AllowWatchBookmarks,
		cursor: cursor{expired: make(chan struct{})}, wake: wakeup.New(),
		timer:    watchTimer{nextBookmark: time.Now().Add(bookmarkEvery + rand.N(bookmarkEvery/6))},
		lifetime: lifetime{stopped: make(chan struct{})},
		results:  resultChan{c: make(chan watch.Event, 16)},
	}
	if options.TimeoutSeconds != nil && *options.TimeoutSeconds > 0 {
		w.timer.deadline = time.Now().Add(time.Duration(*options.TimeoutSeconds) * time.Second)
	}
	w.startAt(start)
	w.lifetime.mu.Lock()
	defer w.lifetime.mu.Unlock()
	w.lifetime.detach = context.AfterFunc(ctx, w.Stop)
	return w
}

// startAt sets the position of a new watch in the history, and collects the initial events.
func (w *Watcher) startAt(start position) {
	sc := w.served.storage
	if start.storeRevision != 0 {
		w.endWith(storeerrors.NewExpired(fmt.Sprintf("resourceVersion %d is newer than the restored store (%d): list "+
			"again", start.after, start.storeRevision)))
		return
	}
	// Read the state and the history's end under the lock that guards both, so that no change is
	// missed or reported twice.
	sc.mu.Lock()
	w.cursor.epoch = sc.epoch
	s, rev := sc.latestSnapshot()
	floor, available := sc.history.completeAfter, true
	w.cursor.next = sc.history.nextNumber()
	if !start.initial {
		w.cursor.next, available = sc.history.firstAfter(start.after)
	}
	if available {
		sc.watchers.awake[w] = struct{}{}
	}
	sc.mu.Unlock()
	if !available {
		w.failExpired(start.after, floor)
	}
	if !start.initial {
		return
	}
	w.after = s.changed
	w.filter.visitMatches(s, "", func(e *Entry) bool {
		w.initial = append(w.initial, e)
		return true
	})
	if start.endBookmark && w.bookmarks {
		w.initialEnd = rev
	}
}

// failExpired ends the watch with an error event (410), which makes the client list again. position
// is the requested revision, oldest the oldest revision that the history still has.
func (w *Watcher) failExpired(position, oldest raftstore.Revision) {
	w.endWith(storeerrors.NewExpired(fmt.Sprintf("too old resource version: %d (%d)", position, oldest)))
}

func (w *Watcher) endWith(status *metav1.Status) {
	w.queue, w.unconverted, w.initial, w.initialEnd = nil, nil, nil, 0
	w.queueEvent(watch.Error, nil, status)
	w.ended = true
}

// queueEvent queues an event with the object of an entry, or with the status if e is nil.
func (w *Watcher) queueEvent(eventType watch.EventType, e *Entry, status *metav1.Status) {
	ev := watch.Event{Type: eventType}
	if e != nil {
		ev.Object = e.Object
		if obj := w.converted[e]; obj != nil {
			ev.Object = obj
		} else if !w.served.isServable(e, w.filter.acceptsLight) {
			w.unconverted = append(w.unconverted, unconvertedItem{len(w.queue), e})
		}
	} else {
		ev.Object = status
	}
	w.queue = append(w.queue, ev)
}

// convertQueued replaces the queued objects that are not in the kind's version, or not complete,
// with converted objects. If a conversion fails, it ends the watch with an error event.
func (w *Watcher) convertQueued(ctx context.Context) {
	if len(w.unconverted) == 0 {
		return
	}
	entries := make([]*Entry, len(w.unconverted))
	for i, f := range w.unconverted {
		entries[i] = f.entry
	}
	shown, err := w.served.convertEntries(ctx, entries...)
	if err != nil {
		w.failConversion(err)
		return
	}
	for i, f := range w.unconverted {
		w.queue[f.item].Object = shown[i]
	}
}

// Next waits for the next event of the watch and returns it. ok is false if the watch or ctx has
// ended.
func (w *Watcher) Next(ctx context.Context) (ev watch.Event, ok bool) {
	for {
		if !w.ended && isClosed(w.cursor.expired) {
			w.served.storage.mu.RLock()
			floor := w.served.storage.history.completeAfter
			w.served.storage.mu.RUnlock()
			w.failExpired(w.after, floor)
		}
		if len(w.queue) > 0 {
			ev, w.queue = w.queue[0], w.queue[1:]
			return ev, !isClosed(w.lifetime.stopped)
		}
		if w.ended || isClosed(w.lifetime.stopped) {
			w.Stop()
			return watch.Event{}, false
		}
		w.queue, w.unconverted, w.converted = w.queue[:0:0], nil, nil
		switch {
		case len(w.initial) > 0:
			w.queueInitial(ctx)
		case w.initialEnd != 0:
			w.queueBookmark(w.initialEnd, true)
			w.initialEnd = 0
		case !w.readHistory(ctx):
			if !w.waitForWork(ctx) {
				return watch.Event{}, false
			}
		}
		w.convertQueued(ctx)
	}
}

// Queued reports whether Next can return an event without waiting. Only the goroutine that calls
// Next may call it.
func (w *Watcher) Queued() bool { return len(w.queue) > 0 && !isClosed(w.cursor.expired) }

func (w *Watcher) queueInitial(ctx context.Context) {
	n := min(len(w.initial), watchChunk)
	entries := w.initial[:n]
	w.initial = w.initial[n:]
	if w.filter.versionFields != nil {
		if err := w.convertMatching(ctx, entries); err != nil {
			w.failConversion(err)
			return
		}
	}
	for _, e := range entries {
		if w.filter.versionFields == nil || w.converted[e] != nil {
			w.queueEvent(watch.Added, e, nil)
		}
	}
}

// readHistory reads events from the history into the queue. If the history has no unread events, it
// marks the watcher as waiting and returns false.
func (w *Watcher) readHistory(ctx context.Context) bool {
	sc := w.served.storage
	var found [watchChunk]*event
	sc.mu.Lock()
	if sc.isWaiting(w) {
		// The watcher was woken by an earlier signal, or has already read all events: no newer
		// event concerns it.
		w.cursor.next = sc.history.nextNumber()
	}
	if w.cursor.epoch != sc.epoch {
		floor := sc.history.completeAfter
		sc.mu.Unlock()
		w.failExpired(w.after, floor)
		return true
	}
	events, available := sc.history.eventsFrom(w.cursor.next, len(found))
	if !available {
		floor := sc.history.completeAfter
		sc.mu.Unlock()
		w.failExpired(w.after, floor)
		return true
	}
	n := copy(found[:], limitBytes(events))
	w.cursor.next += uint64(n)
	if n == 0 {
		sc.markWaiting(w)
	} else {
		sc.markAwake(w, w.cursor.next)
	}
	sc.mu.Unlock()
	changes, err := w.affectedChanges(found[:n])
	if err != nil {
		w.endWith(storeerrors.NewExpired(err.Error()))
		return true
	}
	if err := w.convertChanges(ctx, changes); err != nil {
		w.failConversion(err)
		return true
	}
	for _, c := range changes {
		w.queueChange(c)
	}
	if n > 0 {
		w.after = max(w.after, found[n-1].rev)
	}
	return n > 0
}

// change is an event with the decoded objects on which the filter must be evaluated.
type change struct {
	*event
	cur, prev *Entry // nil if outside the filter's key range
	matched   bool   // prev is known to match the filter
}

// affectedChanges returns the changes of events that may match the filter, with their decoded
// objects.
func (w *Watcher) affectedChanges(events []*event) ([]change, error) {
	var changes []change
	for _, ev := range events {
		if ev.rev <= w.after {
			continue
		}
		c := change{event: ev}
		var err error
		if w.filter.mayMatch(ev.cur) {
			if c.cur, err = w.served.storage.entryOf(ev.cur); err != nil {
				return nil, err
			}
		}
		if w.filter.mayMatch(ev.prev) {
			if c.matched = !w.filter.isSelective(); !c.matched {
				c.prev, err = w.served.storage.entryOf(ev.prev)
			}
			if err != nil {
				return nil, err
			}
		}
		if c.cur != nil || c.prev != nil {
			changes = append(changes, c)
		}
	}
	return changes, nil
}

// limitBytes returns the first of the events, which a watcher reads at once. It returns at least
// one event, and stops when the events reach watchBytes.
func limitBytes(events []*event) []*event {
	var bytes int
	for i, ev := range events {
		if bytes += len(ev.cur.value); bytes >= watchBytes {
			return events[:i+1]
		}
	}
	return events
}

// queueChange queues the event that a change means for this watch: MODIFIED, ADDED if the object
// starts to match the filter, or DELETED if it stops matching. A change of an object that does not
// match is not queued.
func (w *Watcher) queueChange(c change) {
	after := !c.deleted && c.cur != nil && w.isMatch(c.cur)
	before := c.matched || (c.prev != nil && w.isMatch(c.prev))
	switch {
	case after && before:
		w.queueEvent(watch.Modified, c.cur, nil)
	case after:
		w.queueEvent(watch.Added, c.cur, nil)
	case before && c.deleted:
		w.queueEvent(watch.Deleted, c.cur, nil)
	case before:
		w.queueEvent(watch.Deleted, c.leavingEntry(c.prev), nil)
	}
}

func (w *Watcher) wakeUp() {
	w.wake.Send()
}

// waitForWork waits until the watcher may have an event, a bookmark or an error to deliver, or has
// ended. It returns false if ctx has ended.
func (w *Watcher) waitForWork(ctx context.Context) bool {
	until := w.timer.deadline
	if w.bookmarks && (until.IsZero() || w.timer.nextBookmark.Before(until)) {
		until = w.timer.nextBookmark
	}
	var alarm <-chan time.Time
	if !until.IsZero() {
		t := time.NewTimer(time.Until(until))
		defer t.Stop()
		alarm = t.C
	}
	select {
	case <-w.wake: // markAwake has already marked the watcher as awake
		return true
	case <-alarm:
		w.handleTimer(time.Now())
	case <-w.served.storage.cache.done:
		w.ended = true
	case <-w.served.Gone:
		if w.readHistory(ctx) { // deliver the events that were published before the kind was dropped
			return true
		}
		// All earlier events were delivered. The client lists again and gets the error that the
		// resource does not exist.
		w.endWith(storeerrors.NewExpired(fmt.Sprintf("%s is no longer served", w.served.Kind.GroupResource())))
	case <-w.lifetime.stopped:
	case <-ctx.Done():
	}
	w.stopWaiting()
	return ctx.Err() == nil
}

// stopWaiting marks the watcher as no longer waiting for events, and sets its position to the end
// of the history.
func (w *Watcher) stopWaiting() {
	w.served.storage.mu.Lock()
	w.served.storage.markAwake(w, w.served.storage.history.nextNumber())
	w.served.storage.mu.Unlock()
}

// WhenExpired makes the watcher call f once, in its own goroutine, when the history has dropped
// events that the watch has not read. A server that waits for a slow client can then stop waiting.
func (w *Watcher) WhenExpired(f func()) {
	w.served.storage.mu.Lock()
	defer w.served.storage.mu.Unlock()
	if isClosed(w.cursor.expired) {
		go f()
		return
	}
	w.cursor.whenExpired = f
}

// markExpired records that the history has dropped events that the watcher has not read, so that
// the watch ends with an error (410). The caller holds the lock of the storage.
func (w *Watcher) markExpired() {
	close(w.cursor.expired)
	if w.cursor.whenExpired != nil { // nil for informers, which continue with the current state
		w.served.storage.counts.terminated.Add(1)
		go w.cursor.whenExpired()
	}
}

// handleTimer queues a bookmark if one is due, and ends the watch at its deadline.
func (w *Watcher) handleTimer(now time.Time) {
	w.ended = !w.timer.deadline.IsZero() && !now.Before(w.timer.deadline)
	if !w.bookmarks {
		return
	}
	w.timer.nextBookmark = now.Add(bookmarkEvery)
	rev := w.served.storage.cache.progress.currentRevision()
	w.served.storage.mu.Lock()
	caughtUp := w.served.storage.isWaiting(w)
	w.served.storage.mu.Unlock()
	// The watcher was still waiting after the progress was read, so it has delivered everything up
	// to it.
	if caughtUp && rev >= w.after {
		w.queueBookmark(rev, false)
	}
}

func (w *Watcher) queueBookmark(rev raftstore.Revision, endOfInitial bool) {
	obj := w.served.Kind.Type.New()
	w.served.Kind.SetTypeMeta(obj)
	obj.SetResourceVersion(storedform.FormatRevision(rev))
	if endOfInitial {
		obj.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	w.queue = append(w.queue, watch.Event{Type: watch.Bookmark, Object: obj})
}

// Stop ends the watch. It may be called more than once and from any goroutine.
func (w *Watcher) Stop() {
	w.lifetime.once.Do(func() {
		close(w.lifetime.stopped)
		w.served.storage.mu.Lock()
		w.served.storage.markAwake(w, w.cursor.next) // a stopped watcher that waits is no longer in its group
		delete(w.served.storage.watchers.awake, w)
		w.served.storage.mu.Unlock()
		w.lifetime.mu.Lock()
		defer w.lifetime.mu.Unlock()
		w.lifetime.detach()
	})
}

// ResultChan implements watch.Interface. The channel is closed when the watch has ended.
func (w *Watcher) ResultChan() <-chan watch.Event {
	w.results.once.Do(func() { go w.deliverResults() })
	return w.results.c
}

func (w *Watcher) deliverResults() {
	defer close(w.results.c)
	for {
		ev, ok := w.Next(context.Background())
		if !ok {
			return
		}
		select {
		case w.results.c <- ev:
			continue
		case <-w.lifetime.stopped:
			return
		case <-w.cursor.expired:
		}
		w.discardResults()
		if !w.ended {
			continue // the next event is the error
		}
		select {
		case w.results.c <- ev:
		case <-w.lifetime.stopped:
			return
		}
	}
}

// discardResults removes the events from the result channel that the client has not received.
func (w *Watcher) discardResults() {
	for {
		select {
		case <-w.results.c:
		default:
			return
		}
	}
}
