package drive

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"
)

// pace puts Count values, one Every, each with its sequence as its first eight
// bytes, and notes when each was acknowledged.
func pace(ctx context.Context, o Order, target Target) Reply {
	var out Reply
	tick := time.NewTicker(o.Every)
	defer tick.Stop()
	value := Value(max(o.Size, 8))
	for n := range o.Count {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return Fail(ctx.Err())
		}
		// A store in this process may keep the slice: each put has its own.
		own := append([]byte(nil), value...)
		binary.LittleEndian.PutUint64(own, uint64(n))
		sent := time.Now()
		if err := target.Put(ctx, []string{fmt.Sprintf("%s%d", o.Prefix, n)}, [][]byte{own}); err != nil {
			return Fail(err)
		}
		now := time.Now()
		out.Micros = append(out.Micros, uint32(now.Sub(sent).Microseconds()))
		out.Acks = append(out.Acks, now.UnixMicro())
	}
	return out
}

// watching is a set of watchers on one prefix.
type watching struct {
	count int
	stop  context.CancelFunc
	seen  sync.WaitGroup // one for each watcher that has not seen everything

	mu       sync.Mutex
	arrivals [][]int64 // by watcher and sequence
	strange  error     // the first thing seen that should not be
}

// watch sets the watchers and returns when all are set.
func (e *Engine) watch(ctx context.Context, o Order, doors []Door) Reply {
	// The watches outlive the order; they end with "watched" or the process.
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	w := &watching{count: o.Count, stop: stop, arrivals: make([][]int64, o.Clients)}
	w.seen.Add(o.Clients)
	for i := range o.Clients {
		w.arrivals[i] = make([]int64, 0, o.Count)
		if err := doors[i%len(doors)].Target.Watch(life, o.Prefix, func(value []byte) { w.note(i, value) }); err != nil {
			stop()
			return Fail(fmt.Errorf("setting watcher %d: %w", i, err))
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if old := e.watches[o.Prefix]; old != nil {
		old.stop()
	}
	e.watches[o.Prefix] = w
	return Reply{}
}

// note is called by one watcher for each put it sees.
func (w *watching) note(watcher int, value []byte) {
	at := time.Now().UnixMicro()
	w.mu.Lock()
	defer w.mu.Unlock()
	mine := w.arrivals[watcher]
	if len(mine) == w.count {
		return
	}
	if len(value) < 8 || binary.LittleEndian.Uint64(value) != uint64(len(mine)) {
		if w.strange == nil {
			w.strange = fmt.Errorf("watcher %d wanted put %d and saw another", watcher, len(mine))
		}
		return
	}
	w.arrivals[watcher] = append(mine, at)
	if len(mine)+1 == w.count {
		w.seen.Done()
	}
}

// watched waits until every watcher has seen everything and takes them away.
func (e *Engine) watched(ctx context.Context, o Order) Reply {
	e.mu.Lock()
	w := e.watches[o.Prefix]
	delete(e.watches, o.Prefix)
	e.mu.Unlock()
	if w == nil {
		return Fail(fmt.Errorf("nobody watches %s", o.Prefix))
	}
	defer w.stop()
	all := make(chan struct{})
	go func() { w.seen.Wait(); close(all) }()
	select {
	case <-all:
	case <-time.After(callTimeout):
		return Fail(fmt.Errorf("watchers of %s have not seen everything after %s (%w)", o.Prefix, callTimeout, w.trouble()))
	case <-ctx.Done():
		return Fail(ctx.Err())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.strange != nil {
		return Fail(w.strange)
	}
	return Reply{Arrivals: w.arrivals}
}

func (w *watching) trouble() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.strange != nil {
		return w.strange
	}
	return context.DeadlineExceeded
}
