package client

import (
	"fmt"
	"sync"

	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
)

// queueEntry is an entry in the queue of an informer's event handler: the initial state or a list
// of changes.
type queueEntry struct {
	initial api.View
	changes []api.Delta
}

// listener calls one event handler of an informer from one goroutine, in order. The entries of its
// queue are shared with the informer's other handlers. The objects of an initial state are iterated
// only when the handler reaches the entry of that state.
type listener struct {
	handler cache.ResourceEventHandler
	synced  doneSignal

	mu     sync.Mutex
	some   sync.Cond // uses mu; signals that the queue is not empty, or that the listener is closed
	queue  []queueEntry
	closed bool
}

var _ cache.ResourceEventHandlerRegistration = (*listener)(nil)

func newListener(h cache.ResourceEventHandler, k *api.Kind) *listener {
	l := &listener{handler: h, synced: newDone(fmt.Sprintf("handler %T of %s", h, k.GVK))}
	l.some.L = &l.mu
	return l
}

// HasSynced implements cache.ResourceEventHandlerRegistration. It reports whether the handler was
// called for all objects of the initial state.
func (l *listener) HasSynced() bool { return l.synced.isDone() }

// HasSyncedChecker implements cache.ResourceEventHandlerRegistration.
func (l *listener) HasSyncedChecker() cache.DoneChecker { return l.synced }

func (l *listener) pushEvent(t queueEntry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queue = append(l.queue, t)
	l.some.Signal()
}

// closeListener discards the queue and makes runHandler return after the current call of the
// handler.
func (l *listener) closeListener() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed, l.queue = true, nil
	l.some.Signal()
}

// nextEvent waits until the queue is not empty, and removes and returns all its entries. It returns
// false if the listener is closed.
func (l *listener) nextEvent() ([]queueEntry, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.queue) == 0 && !l.closed {
		l.some.Wait()
	}
	all := l.queue
	l.queue = nil
	return all, !l.closed
}

func (l *listener) isClosed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.closed
}

func (l *listener) runHandler() {
	for {
		all, ok := l.nextEvent()
		if !ok {
			return
		}
		for i := range all {
			l.callHandler(&all[i])
			all[i] = queueEntry{} // release the entry
		}
	}
}

func (l *listener) callHandler(t *queueEntry) {
	if t.initial != nil {
		t.initial.Scan("", func(_ string, obj api.Object) bool {
			l.handler.OnAdd(obj, true)
			return !l.isClosed()
		})
		l.synced.signalDone()
	}
	for i := range t.changes {
		if l.isClosed() {
			return
		}
		switch c := &t.changes[i]; {
		case c.Guessed:
			l.handler.OnDelete(cache.DeletedFinalStateUnknown{Key: c.Key, Obj: c.New})
		case c.Gone:
			l.handler.OnDelete(c.New)
		case c.Old == nil:
			l.handler.OnAdd(c.New, false)
		default:
			l.handler.OnUpdate(c.Old, c.New)
		}
	}
}

// doneSignal is a signal that is set at most once. It implements cache.DoneChecker.
type doneSignal struct {
	name string
	c    chan struct{}
	once *sync.Once
}

func newDone(name string) doneSignal {
	return doneSignal{name: name, c: make(chan struct{}), once: new(sync.Once)}
}

func (d doneSignal) signalDone() { d.once.Do(func() { close(d.c) }) }

func (d doneSignal) isDone() bool {
	select {
	case <-d.c:
		return true
	default:
		return false
	}
}

// Name implements cache.DoneChecker.
func (d doneSignal) Name() string { return d.name }

// Done implements cache.DoneChecker.
func (d doneSignal) Done() <-chan struct{} { return d.c }
