package apiservertest

import (
	"context"
	"sync"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// Lagging is a store that can delay its watch events, as on an overloaded machine.
type Lagging struct {
	*storetest.Memory
	Mu     sync.Mutex
	Held   chan struct{} // nil while events are not delayed; closed when delayed events are released
	Asked  chan struct{} // closed at the first read that requires all acknowledged writes
	Before func(raftstore.Commit)
}

// Hold delays all watch events until release is called. asked is closed at the next Sync, with
// which a caller requires the newest state.
func (l *Lagging) Hold() (release func(), asked <-chan struct{}) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	held := make(chan struct{})
	l.Held, l.Asked = held, make(chan struct{})
	return sync.OnceFunc(func() {
		l.Mu.Lock()
		defer l.Mu.Unlock()
		l.Held, l.Asked = nil, nil
		close(held)
	}), l.Asked
}

// Sync returns the newest revision and closes the channel asked of Hold. It implements
// raftstore.Store.
func (l *Lagging) Sync(ctx context.Context) (raftstore.Revision, error) {
	l.Mu.Lock()
	if l.Asked != nil && !isClosed(l.Asked) {
		close(l.Asked)
	}
	l.Mu.Unlock()
	return l.Memory.Sync(ctx)
}

// Commit calls the function that First has set, and then commits. It implements raftstore.Store.
func (l *Lagging) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	l.Mu.Lock()
	before := l.Before
	l.Mu.Unlock()
	if before != nil {
		before(c)
	}
	return l.Memory.Commit(ctx, c)
}

// First sets a function that is called before each commit; nil removes it. The function may itself
// commit if it calls First(nil) before.
func (l *Lagging) First(f func(raftstore.Commit)) {
	l.Mu.Lock()
	defer l.Mu.Unlock()
	l.Before = f
}

// Watch returns a watcher that delays its events while Hold is in effect. It implements
// raftstore.Store.
func (l *Lagging) Watch(ctx context.Context, prefix string, after raftstore.Revision) (raftstore.Watcher, error) {
	w, err := l.Memory.Watch(ctx, prefix, after)
	if err != nil {
		return nil, err
	}
	out := make(chan raftstore.Events)
	ctx, stop := context.WithCancel(ctx)
	go func() {
		defer close(out)
		for e := range w.C() {
			l.Mu.Lock()
			held := l.Held
			l.Mu.Unlock()
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
	return &LateWatcher{Watcher: w, Out: out, stop: stop}, nil
}

// LateWatcher is a watcher of a Lagging store. The store can delay the watcher's events.
type LateWatcher struct {
	raftstore.Watcher
	Out  chan raftstore.Events
	stop func()
}

// C returns the channel of events. It implements raftstore.Watcher.
func (w *LateWatcher) C() <-chan raftstore.Events { return w.Out }

// Stop stops the watcher. It implements raftstore.Watcher.
func (w *LateWatcher) Stop() {
	w.stop()
	w.Watcher.Stop()
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
