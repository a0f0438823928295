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
	watchChunk    = 128       // events that a watcher takes at once ...
	watchBytes    = 256 << 10 // ... unless they are large: what it has taken stays in memory until it is read
	bookmarkEvery = time.Minute
)

// Watcher is a running watch. It owns no goroutine and no queue: it is a place
// in the kind's history, read at the reader's pace. A reader so slow that the
// history has moved on gets an error event (410) and the end, as soon as it has:
// what it has not read is let go. So all watches together keep nothing alive but
// what the history does, and the few events before its beginning.
//
// Read it with Next from one goroutine, or through ResultChan, not both.
type Watcher struct {
	of        *served
	filter    *filter
	after     raftstore.Revision // deliver what is later than this
	bookmarks bool

	next     uint64        // number of the next event; under of.mu
	epoch    uint64        // of the storage when the watch began
	lost     chan struct{} // closed, under of.mu, when the history has moved on beyond next
	whenLost func()        // under of.mu; may be nil
	wake     chan struct{} // capacity 1

	initial    []*entry           // synthetic ADDED events still to deliver
	initialEnd raftstore.Revision // announce the end of the initial events at this revision; 0 = no
	queue      []watch.Event      // ready to be delivered
	foreign    []foreign          // those of the queue that are not of the kind's version
	ended      bool

	wanted map[*entry]api.Object // of the events being queued, by a filter with a late part

	nextBookmark time.Time
	deadline     time.Time // zero = none

	stop    sync.Once
	stopped chan struct{}
	hook    sync.Mutex
	unhook  func() bool // from the context that began the watch; under hook
	pump    sync.Once
	results chan watch.Event
}

var _ watch.Interface = (*Watcher)(nil)

// position is where a watch begins.
type position struct {
	after   raftstore.Revision // live events later than this
	initial bool               // deliver the present state first
	endMark bool               // and announce its end
	// future is the revision of the store where it has not come to after: a restore has taken back what the client has
	// seen. A watch from there would swallow everything until the store has passed it, so it is 410.
	future raftstore.Revision
}

// newWatcher begins a watch. An expired position gives a watcher that delivers the error, as in Kubernetes.
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
	// State and place in history are taken under the lock that changes both: no gap and no overlap.
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

// fail ends the watch with the error that makes a client list again.
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

// convert brings what is queued into the version of the kind. When that fails, the watch does.
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

// Next waits for the next event. ok is false when the watch has ended or ctx has.
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

// Queued says that Next has an event without waiting. It is for the reader.
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

// collect queues events from history. It returns false, and leaves the watcher
// parked, when none exist.
func (w *Watcher) collect(ctx context.Context) bool {
	of := w.of
	var found [watchChunk]*event
	of.mu.Lock()
	if of.isParked(w) {
		w.next = of.history.end() // by an old token in wake, or at the end: what came meanwhile did not concern it
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

// change is an event with those of its objects that the filter has to see.
type change struct {
	*event
	cur, prev *entry // nil when out of the filter's range
	had       bool   // there is a prev that the filter shows without seeing it
}

// look finds the objects of events that may concern the watch.
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

// atOnce is how many of the events a watcher takes: at least one.
func atOnce(events []*event) []*event {
	var bytes int
	for i, ev := range events {
		if bytes += len(ev.cur.value); bytes >= watchBytes {
			return events[:i+1]
		}
	}
	return events
}

// translate queues what the filter shows of a change: an object that begins to
// match is added, one that ceases to match is deleted.
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

// sleep waits until there is something to do; false when the wait was given up.
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
	case <-w.wake: // whoever woke us has unparked us
		return true
	case <-alarm:
		w.onAlarm(time.Now())
	case <-w.of.cache.done:
		w.ended = true
	case <-w.of.gone:
		if w.collect(ctx) { // what was published before, at the same moment for us
			return true
		}
		// It has been told everything that happened before. A client lists again, and learns that there is no such resource.
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

// WhenLost has f called, once and on a goroutine of its own, when the reader has been so slow that the history has moved
// on: who waits for a client to take an event can give it up then.
func (w *Watcher) WhenLost(f func()) {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	if isClosed(w.lost) {
		go f()
		return
	}
	w.whenLost = f
}

// lose tells the reader that it was too slow. the lock of the storage is held.
func (w *Watcher) lose() {
	close(w.lost)
	if w.whenLost != nil {
		go w.whenLost()
	}
}

// onAlarm sends a bookmark, and ends the watch at its deadline.
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
	// Still parked after the progress was read: nothing up to it is undelivered.
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
			continue // what comes next is the error
		}
		select {
		case w.results <- ev:
		case <-w.stopped:
			return
		}
	}
}

// drain drops what has not been read.
func (w *Watcher) drain() {
	for {
		select {
		case <-w.results:
		default:
			return
		}
	}
}
