package apiserver

import (
	"context"
	"sync"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// lagging is a store that delays its events to this replica, as on an overloaded machine.
type lagging struct {
	*storetest.Memory
	mu     sync.Mutex
	held   chan struct{} // nil while no event is held back; closed when the events are released
	asked  chan struct{} // closed at the first read that requires all acknowledged writes
	before func(raftstore.Commit)
}

// hold delays all events until release is called. asked is closed at the next read that requires
// the newest state.
func (l *lagging) hold() (release func(), asked <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make(chan struct{})
	l.held, l.asked = held, make(chan struct{})
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.held, l.asked = nil, nil
		close(held)
	}), l.asked
}

func (l *lagging) Sync(ctx context.Context) (raftstore.Revision, error) {
	l.mu.Lock()
	if l.asked != nil && !isClosed(l.asked) {
		close(l.asked)
	}
	l.mu.Unlock()
	return l.Memory.Sync(ctx)
}

// Commit lets the test come first.
func (l *lagging) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	l.mu.Lock()
	before := l.before
	l.mu.Unlock()
	if before != nil {
		before(c)
	}
	return l.Memory.Commit(ctx, c)
}

// first sets a function that is called before each commit; nil = none. The function may commit
// itself if it calls first(nil) before.
func (l *lagging) first(f func(raftstore.Commit)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.before = f
}

func (l *lagging) Watch(ctx context.Context, prefix string, after raftstore.Revision) (raftstore.Watcher, error) {
	w, err := l.Memory.Watch(ctx, prefix, after)
	if err != nil {
		return nil, err
	}
	out := make(chan raftstore.Events)
	ctx, stop := context.WithCancel(ctx)
	go func() {
		defer close(out)
		for e := range w.C() {
			l.mu.Lock()
			held := l.held
			l.mu.Unlock()
			if held != nil {
				select {
				case <-held:
				case <-ctx.Done():
				}
			}
			select {
			case out <- e:
			case <-ctx.Done():
			}
		}
	}()
	return &lateWatcher{Watcher: w, out: out, stop: stop}, nil
}

type lateWatcher struct {
	raftstore.Watcher
	out  chan raftstore.Events
	stop func()
}

func (w *lateWatcher) C() <-chan raftstore.Events { return w.out }

func (w *lateWatcher) Stop() {
	w.stop()
	w.Watcher.Stop()
}
