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

	"keelson.dev/keelson/raftstore"
)

const (
	watchChunk    = 128       // events that a watcher takes at once ...
	watchBytes    = 256 << 10 // ... unless they are large: what it has taken stays in memory until it is read
	bookmarkEvery = time.Minute
)

// Watcher is a running watch. It owns no goroutine and no queue: it is a place
// in the kind's history, read at the reader's pace. A reader so slow that the
// history has moved on gets an error event (410) and the end.
//
// Read it with Next from one goroutine, or through ResultChan, not both.
type Watcher struct {
	kc        *kindCache
	filter    *filter
	after     raftstore.Revision // deliver what is later than this
	bookmarks bool

	next  uint64        // number of the next event; kc.mu while parked, the reader's otherwise
	epoch uint64        // of kc when the watch began
	wake  chan struct{} // capacity 1

	initial    []*entry           // synthetic ADDED events still to deliver
	initialEnd raftstore.Revision // announce the end of the initial events at this revision; 0 = no
	queue      []watch.Event      // ready to be delivered
	ended      bool

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
}

// newWatcher begins a watch. An expired position gives a watcher that delivers the error, as in Kubernetes.
func (kc *kindCache) newWatcher(ctx context.Context, f *filter, p position, o *metav1.ListOptions) *Watcher {
	w := &Watcher{
		kc: kc, filter: f, after: p.after, bookmarks: o.AllowWatchBookmarks,
		wake: make(chan struct{}, 1), stopped: make(chan struct{}), results: make(chan watch.Event, 16),
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
	kc := w.kc
	// State and place in history are taken under the lock that changes both: no gap and no overlap.
	kc.mu.RLock()
	w.epoch = kc.epoch
	s, rev := kc.state()
	floor, next, kept := kc.history.floor, kc.history.end(), true
	if !p.initial {
		next, kept = kc.history.after(p.after)
	}
	kc.mu.RUnlock()
	w.next = next
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
	w.queue, w.initial, w.initialEnd = nil, nil, 0
	w.push(watch.Error, nil, expired(fmt.Sprintf("too old resource version: %d (%d)", have, oldest)))
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
	} else {
		ev.Object = status
	}
	w.queue = append(w.queue, ev)
}

// Next waits for the next event. ok is false when the watch has ended or ctx has.
func (w *Watcher) Next(ctx context.Context) (ev watch.Event, ok bool) {
	for {
		if len(w.queue) > 0 {
			ev, w.queue = w.queue[0], w.queue[1:]
			return ev, !isClosed(w.stopped)
		}
		if w.ended || isClosed(w.stopped) {
			w.Stop()
			return watch.Event{}, false
		}
		w.queue = w.queue[:0:0]
		switch {
		case len(w.initial) > 0:
			w.queueInitial()
		case w.initialEnd != 0:
			w.queueBookmark(w.initialEnd, true)
			w.initialEnd = 0
		case !w.collect():
			if !w.sleep(ctx) {
				return watch.Event{}, false
			}
		}
	}
}

func (w *Watcher) queueInitial() {
	n := min(len(w.initial), watchChunk)
	for _, e := range w.initial[:n] {
		w.push(watch.Added, e, nil)
	}
	w.initial = w.initial[n:]
}

// collect queues events from history. It returns false, and leaves the watcher
// parked, when there are none.
func (w *Watcher) collect() bool {
	kc := w.kc
	var found [watchChunk]*event
	kc.mu.Lock()
	if w.epoch != kc.epoch {
		floor := kc.history.floor
		kc.mu.Unlock()
		w.fail(w.after, floor)
		return true
	}
	events, ok := kc.history.from(w.next, len(found))
	if !ok {
		floor := kc.history.floor
		kc.mu.Unlock()
		w.fail(w.after, floor)
		return true
	}
	n := copy(found[:], atOnce(events))
	w.next += uint64(n)
	if n == 0 {
		kc.parked[w] = struct{}{}
	} else {
		delete(kc.parked, w) // an old token in wake can wake a parked watcher
	}
	kc.mu.Unlock()
	for _, e := range found[:n] {
		w.translate(e)
	}
	return n > 0
}

// atOnce is how many of the events a watcher takes: at least one.
func atOnce(events []*event) []*event {
	var bytes int
	for i, e := range events {
		if bytes += len(e.cur.value); bytes >= watchBytes {
			return events[:i+1]
		}
	}
	return events
}

// translate queues what the filter shows of an event: an object that begins to
// match is added, one that ceases to match is deleted.
func (w *Watcher) translate(e *event) {
	if e.rev <= w.after {
		return
	}
	w.after = e.rev
	now := !e.deleted && w.filter.matches(e.cur)
	before := e.prev != nil && w.filter.matches(e.prev)
	switch {
	case now && before:
		w.push(watch.Modified, e.cur, nil)
	case now:
		w.push(watch.Added, e.cur, nil)
	case before && e.deleted:
		w.push(watch.Deleted, e.cur, nil)
	case before:
		w.push(watch.Deleted, &entry{obj: at(w.kc.kind, e.prev.obj, e.rev)}, nil)
	}
}

// concernedBy says whether a sleeping watcher has to be woken. Called under kc.mu.
func (w *Watcher) concernedBy(events []event) bool {
	for i := range events {
		if w.filter.concerned(&events[i]) {
			return true
		}
	}
	return false
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
	case <-w.kc.cache.done:
		w.ended = true
	case <-w.stopped:
	case <-ctx.Done():
	}
	w.unpark()
	return ctx.Err() == nil
}

func (w *Watcher) unpark() {
	w.kc.mu.Lock()
	delete(w.kc.parked, w)
	w.kc.mu.Unlock()
}

// onAlarm sends a bookmark, and ends the watch at its deadline.
func (w *Watcher) onAlarm(now time.Time) {
	w.ended = !w.deadline.IsZero() && !now.Before(w.deadline)
	if !w.bookmarks {
		return
	}
	w.nextBookmark = now.Add(bookmarkEvery)
	rev := w.kc.cache.progress.at()
	w.kc.mu.Lock()
	_, caughtUp := w.kc.parked[w]
	w.kc.mu.Unlock()
	// Still parked after the progress was read: nothing up to it is undelivered.
	if caughtUp && rev >= w.after {
		w.queueBookmark(rev, false)
	}
}

func (w *Watcher) queueBookmark(rev raftstore.Revision, endOfInitial bool) {
	obj := w.kc.kind.New()
	w.kc.kind.SetTypeMeta(obj)
	obj.SetResourceVersion(formatRevision(rev))
	if endOfInitial {
		obj.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	}
	w.push(watch.Bookmark, &entry{obj: obj}, nil)
}

// Stop ends the watch. It may be called more than once and from any goroutine.
func (w *Watcher) Stop() {
	w.stop.Do(func() {
		close(w.stopped)
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
		case <-w.stopped:
			return
		}
	}
}
