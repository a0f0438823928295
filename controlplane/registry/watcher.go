package registry

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

const (
	watchChunk    = 128       // maximum number of events that a watcher reads at once
	watchBytes    = 256 << 10 // maximum bytes of them, because they stay in memory until delivered
	bookmarkEvery = time.Minute
)

// Watcher is a running watch. It has no goroutine and no queue of its own: it is a position in the
// storage's history, read at the client's pace. If the history drops events that the client has not
// read, the watch ends at once with an error event (410), and unread events are discarded. So all
// watches together keep only the history in memory, plus the few events that each has read ahead.
//
// Read it with Next from one goroutine, or through ResultChan, not both.
type Watcher struct {
	of        *served
	filter    *filter
	after     raftstore.Revision // deliver changes after this revision
	bookmarks bool

	next     uint64        // number of the next event; under of.mu
	epoch    uint64        // epoch of the storage when the watch started
	lost     chan struct{} // closed, under of.mu, when the history has dropped event next
	whenLost func()        // under of.mu; may be nil
	wake     chan struct{} // capacity 1

	initial    []*entry           // synthetic ADDED events to deliver
	initialEnd raftstore.Revision // revision of the bookmark after the initial events; 0 = none
	queue      []watch.Event      // ready to be delivered
	foreign    []foreign          // items of queue that must be converted
	ended      bool

	wanted map[*entry]api.Object // converted objects of the events being queued, if the filter has a late selector

	nextBookmark time.Time
	deadline     time.Time // zero = none

	stop    sync.Once
	stopped chan struct{}
	hook    sync.Mutex
	unhook  func() bool // stops the AfterFunc of the watch's context; under hook
	pump    sync.Once
	results chan watch.Event
}

var _ watch.Interface = (*Watcher)(nil)

// position is where a watch starts.
type position struct {
	after   raftstore.Revision // deliver events after this revision
	initial bool               // deliver the current state first
	endMark bool               // and a bookmark after it
	// future is the store's revision if after is newer, because a restore has undone changes that
	// the client has seen. The watch then fails with a 410, because it would miss all changes until
	// the store has passed after.
	future raftstore.Revision
}

// newWatcher starts a watch. With an expired position, the watcher delivers the error, as in
// Kubernetes.
func (s *served) newWatcher(ctx context.Context, f *filter, p position, o *metav1.ListOptions) *Watcher {
	w := &Watcher{
		of: s, filter: f, after: p.after, bookmarks: o.AllowWatchBookmarks,
		wake: make(chan struct{}, 1), stopped: make(chan struct{}), lost: make(chan struct{}), results: make(chan watch.Event, 16),
		nextBookmark: time.Now().Add(bookmarkEvery + rand.N(bookmarkEvery/6)),
	}
	if o.TimeoutSeconds != nil && *o.TimeoutSeconds > 0 {
		w.deadline = time.Now().Add(time.Duration(*o.TimeoutSeconds) * time.Second)
	}
	w.begin(p)
	w.hook.Lock()
	defer w.hook.Unlock()
	w.unhook = context.AfterFunc(ctx, w.Stop)
	return w
}

func (w *Watcher) begin(p position) {
	of := w.of
	if p.future != 0 {
		w.endWith(expired(fmt.Sprintf("resource version %d is of a time that was taken back: the store is at %d", p.after, p.future)))
		return
	}
	// Read the state and the history's end under the lock that guards both: no gap and no overlap.
	of.mu.Lock()
	w.epoch = of.epoch
	s, rev := of.state()
	floor, kept := of.history.floor, true
	w.next = of.history.end()
	if !p.initial {
		w.next, kept = of.history.after(p.after)
	}
	if kept {
		of.awake[w] = struct{}{}
	}
	of.mu.Unlock()
	if !kept {
		w.fail(p.after, floor)
	}
	if !p.initial {
		return
	}
	w.after = s.changed
	w.filter.scan(s, "", func(e *entry) bool {
		w.initial = append(w.initial, e)
		return true
	})
	if p.endMark && w.bookmarks {
		w.initialEnd = rev
	}
}

// fail ends the watch with the error (410) that makes a client list again.
func (w *Watcher) fail(have, oldest raftstore.Revision) {
	w.endWith(expired(fmt.Sprintf("too old resource version: %d (%d)", have, oldest)))
}

func (w *Watcher) endWith(why *metav1.Status) {
	w.queue, w.foreign, w.initial, w.initialEnd = nil, nil, nil, 0
	w.push(watch.Error, nil, why)
	w.ended = true
}

func expired(message string) *metav1.Status {
	err := apierrors.NewResourceExpired(message)
	status := err.Status()
	status.Code = http.StatusGone
	return &status
}

func (w *Watcher) push(t watch.EventType, e *entry, status *metav1.Status) {
	ev := watch.Event{Type: t}
	if e != nil {
		ev.Object = e.obj
		if obj := w.wanted[e]; obj != nil {
			ev.Object = obj
		} else if !w.of.shows(e, w.filter.light) {
			w.foreign = append(w.foreign, foreign{len(w.queue), e})
		}
	} else {
		ev.Object = status
	}
	w.queue = append(w.queue, ev)
}

// convert converts the queued objects to the kind's version. On an error, the watch ends.
func (w *Watcher) convert(ctx context.Context) {
	if len(w.foreign) == 0 {
		return
	}
	entries := make([]*entry, len(w.foreign))
	for i, f := range w.foreign {
		entries[i] = f.entry
	}
	shown, err := w.of.show(ctx, entries...)
	if err != nil {
		w.failConversion(err)
		return
	}
	for i, f := range w.foreign {
		w.queue[f.item].Object = shown[i]
	}
}

// Next waits for the next event. ok is false if the watch or ctx has ended.
func (w *Watcher) Next(ctx context.Context) (ev watch.Event, ok bool) {
	for {
		if !w.ended && isClosed(w.lost) {
			w.of.mu.RLock()
			floor := w.of.history.floor
			w.of.mu.RUnlock()
			w.fail(w.after, floor)
		}
		if len(w.queue) > 0 {
			ev, w.queue = w.queue[0], w.queue[1:]
			return ev, !isClosed(w.stopped)
		}
		if w.ended || isClosed(w.stopped) {
			w.Stop()
			return watch.Event{}, false
		}
		w.queue, w.foreign, w.wanted = w.queue[:0:0], nil, nil
		switch {
		case len(w.initial) > 0:
			w.queueInitial(ctx)
		case w.initialEnd != 0:
			w.queueBookmark(w.initialEnd, true)
			w.initialEnd = 0
		case !w.collect(ctx):
			if !w.sleep(ctx) {
				return watch.Event{}, false
			}
		}
		w.convert(ctx)
	}
}

// Queued reports whether Next can return an event without waiting. Only the reader may call it.
func (w *Watcher) Queued() bool { return len(w.queue) > 0 && !isClosed(w.lost) }

func (w *Watcher) queueInitial(ctx context.Context) {
	n := min(len(w.initial), watchChunk)
	some := w.initial[:n]
	w.initial = w.initial[n:]
	if w.filter.late != nil {
		if err := w.keep(ctx, some); err != nil {
			w.failConversion(err)
			return
		}
	}
	for _, e := range some {
		if w.filter.late == nil || w.wanted[e] != nil {
			w.push(watch.Added, e, nil)
		}
	}
}

// collect reads events from the history into the queue. If none exist, it parks the watcher and
// returns false.
func (w *Watcher) collect(ctx context.Context) bool {
	of := w.of
	var found [watchChunk]*event
	of.mu.Lock()
	if of.isParked(w) {
		w.next = of.history.end() // woken by an old token, or already at the end: the events meanwhile did not concern it
	}
	if w.epoch != of.epoch {
		floor := of.history.floor
		of.mu.Unlock()
		w.fail(w.after, floor)
		return true
	}
	events, ok := of.history.from(w.next, len(found))
	if !ok {
		floor := of.history.floor
		of.mu.Unlock()
		w.fail(w.after, floor)
		return true
	}
	n := copy(found[:], atOnce(events))
	w.next += uint64(n)
	if n == 0 {
		of.park(w)
	} else {
		of.rouse(w, w.next)
	}
	of.mu.Unlock()
	changes, err := w.look(found[:n])
	if err != nil {
		w.endWith(expired(err.Error()))
		return true
	}
	if err := w.sift(ctx, changes); err != nil {
		w.failConversion(err)
		return true
	}
	for _, c := range changes {
		w.translate(c)
	}
	if n > 0 {
		w.after = max(w.after, found[n-1].rev)
	}
	return n > 0
}

// change is an event with the entries that the filter must evaluate.
type change struct {
	*event
	cur, prev *entry // nil if outside the filter's range
	had       bool   // prev matches the filter without evaluation
}

// look returns the changes that may concern the watch, with their entries.
func (w *Watcher) look(events []*event) ([]change, error) {
	var changes []change
	for _, ev := range events {
		if ev.rev <= w.after {
			continue
		}
		c := change{event: ev}
		var err error
		if w.filter.mayMatch(ev.cur) {
			if c.cur, err = w.of.entryOf(ev.cur); err != nil {
				return nil, err
			}
		}
		if w.filter.mayMatch(ev.prev) {
			if c.had = !w.filter.selective(); !c.had {
				c.prev, err = w.of.entryOf(ev.prev)
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

// atOnce returns the events that a watcher reads at once: at least one, up to watchBytes.
func atOnce(events []*event) []*event {
	var bytes int
	for i, ev := range events {
		if bytes += len(ev.cur.value); bytes >= watchBytes {
			return events[:i+1]
		}
	}
	return events
}

// translate queues the event of a change as seen through the filter. The event is ADDED if the
// object starts to match, and DELETED if it stops matching.
func (w *Watcher) translate(c change) {
	now := !c.deleted && c.cur != nil && w.wants(c.cur)
	before := c.had || (c.prev != nil && w.wants(c.prev))
	switch {
	case now && before:
		w.push(watch.Modified, c.cur, nil)
	case now:
		w.push(watch.Added, c.cur, nil)
	case before && c.deleted:
		w.push(watch.Deleted, c.cur, nil)
	case before:
		w.push(watch.Deleted, c.leaving(c.prev), nil)
	}
}

func (w *Watcher) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// sleep waits for an event, bookmark or end. It returns false if ctx has ended.
func (w *Watcher) sleep(ctx context.Context) bool {
	until := w.deadline
	if w.bookmarks && (until.IsZero() || w.nextBookmark.Before(until)) {
		until = w.nextBookmark
	}
	var alarm <-chan time.Time
	if !until.IsZero() {
		t := time.NewTimer(time.Until(until))
		defer t.Stop()
		alarm = t.C
	}
	select {
	case <-w.wake: // rouse has already unparked the watcher
		return true
	case <-alarm:
		w.onAlarm(time.Now())
	case <-w.of.cache.done:
		w.ended = true
	case <-w.of.gone:
		if w.collect(ctx) { // deliver the events that were published before the end
			return true
		}
		// All earlier events were delivered. The client lists again and gets the error that the
		// resource does not exist.
		w.endWith(expired(fmt.Sprintf("%s is not served any more", w.of.kind.GroupResource())))
	case <-w.stopped:
	case <-ctx.Done():
	}
	w.unpark()
	return ctx.Err() == nil
}

func (w *Watcher) unpark() {
	w.of.mu.Lock()
	w.of.rouse(w, w.of.history.end())
	w.of.mu.Unlock()
}

// WhenLost makes f run once, in its own goroutine, when the history has dropped events that the
// reader has not read. A server that waits for a slow client can then stop waiting.
func (w *Watcher) WhenLost(f func()) {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	if isClosed(w.lost) {
		go f()
		return
	}
	w.whenLost = f
}

// lose marks the watch as lost. The lock of the storage is held.
func (w *Watcher) lose() {
	close(w.lost)
	if w.whenLost != nil {
		go w.whenLost()
	}
}

// onAlarm queues a bookmark, and ends the watch at its deadline.
func (w *Watcher) onAlarm(now time.Time) {
	w.ended = !w.deadline.IsZero() && !now.Before(w.deadline)
	if !w.bookmarks {
		return
	}
	w.nextBookmark = now.Add(bookmarkEvery)
	rev := w.of.cache.progress.at()
	w.of.mu.Lock()
	caughtUp := w.of.isParked(w)
	w.of.mu.Unlock()
	// It was still parked after the progress was read, so it has delivered everything up to it.
	if caughtUp && rev >= w.after {
		w.queueBookmark(rev, false)
	}
}

func (w *Watcher) queueBookmark(rev raftstore.Revision, endOfInitial bool) {
	obj := w.of.kind.New()
	w.of.kind.SetTypeMeta(obj)
	obj.SetResourceVersion(formatRevision(rev))
	if endOfInitial {
		obj.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	w.queue = append(w.queue, watch.Event{Type: watch.Bookmark, Object: obj})
}

// Stop ends the watch. It may be called more than once and from any goroutine.
func (w *Watcher) Stop() {
	w.stop.Do(func() {
		close(w.stopped)
		w.of.mu.Lock()
		delete(w.of.awake, w)
		w.of.mu.Unlock()
		w.hook.Lock()
		defer w.hook.Unlock()
		w.unhook()
	})
}

// ResultChan implements watch.Interface. The channel is closed when the watch has ended.
func (w *Watcher) ResultChan() <-chan watch.Event {
	w.pump.Do(func() { go w.deliver() })
	return w.results
}

func (w *Watcher) deliver() {
	defer close(w.results)
	for {
		ev, ok := w.Next(context.Background())
		if !ok {
			return
		}
		select {
		case w.results <- ev:
			continue
		case <-w.stopped:
			return
		case <-w.lost:
		}
		w.drain()
		if !w.ended {
			continue // the next event is the error
		}
		select {
		case w.results <- ev:
		case <-w.stopped:
			return
		}
	}
}

// drain discards the results that have not been read.
func (w *Watcher) drain() {
	for {
		select {
		case <-w.results:
		default:
			return
		}
	}
}
