package drive

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"time"
)

// putAtRate writes Count values, one per interval Every of the load, and records their
// acknowledgement times. The first eight bytes of a value are its sequence number.
func putAtRate(ctx context.Context, o Request, target Target) Reply {
	var out Reply
	tick := time.NewTicker(o.Every)
	defer tick.Stop()
	value := RandomValue(max(o.Size, 8))
	for n := range o.Count {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ErrorReply(ctx.Err())
		}
		// A store in this process may keep the slice, so each put has its own.
		own := append([]byte(nil), value...)
		binary.LittleEndian.PutUint64(own, uint64(n))
		sent := time.Now()
		if err := target.Put(ctx, []string{fmt.Sprintf("%s%d", o.Prefix, n)}, [][]byte{own}); err != nil {
			return ErrorReply(err)
		}
		now := time.Now()
		out.Micros = append(out.Micros, uint32(now.Sub(sent).Microseconds()))
		out.Acks = append(out.Acks, now.UnixMicro())
	}
	return out
}

// watcherSet is a set of watchers on one prefix.
type watcherSet struct {
	count int
	stop  context.CancelFunc
	seen  sync.WaitGroup // one for each watcher that has not received everything

	mu         sync.Mutex
	arrivals   [][]int64 // by watcher and sequence number
	unexpected error     // the first unexpected event
}

// startWatchers starts the watchers of a request DoWatch and returns when all are started. It
// replaces earlier watchers of the prefix.
func (e *Engine) startWatchers(ctx context.Context, o Request, connections []Connection) Reply {
	// The watches outlive the request. They end with the request DoWatched or with the process.
	life, stop := context.WithCancel(context.WithoutCancel(ctx))
	w := &watcherSet{count: o.Count, stop: stop, arrivals: make([][]int64, o.Clients)}
	w.seen.Add(o.Clients)
	for i := range o.Clients {
		w.arrivals[i] = make([]int64, 0, o.Count)
		if err := connections[i%len(connections)].Target.Watch(life, o.Prefix, func(value []byte) {
			w.recordArrival(i,
				value)
		}); err != nil {
			stop()
			return ErrorReply(fmt.Errorf("starting watcher %d: %w", i, err))
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

// recordArrival records the arrival of a put at a watcher. Each watcher calls it in order.
func (w *watcherSet) recordArrival(watcher int, value []byte) {
	at := time.Now().UnixMicro()
	w.mu.Lock()
	defer w.mu.Unlock()
	mine := w.arrivals[watcher]
	if len(mine) == w.count {
		return
	}
	if len(value) < 8 || binary.LittleEndian.Uint64(value) != uint64(len(mine)) {
		if w.unexpected == nil {
			w.unexpected = fmt.Errorf("watcher %d has received another value than put %d", watcher, len(mine))
		}
		return
	}
	w.arrivals[watcher] = append(mine, at)
	if len(mine)+1 == w.count {
		w.seen.Done()
	}
}

// awaitWatchers waits until every watcher of a prefix has received everything, and stops the
// watchers.
func (e *Engine) awaitWatchers(ctx context.Context, o Request) Reply {
	e.mu.Lock()
	w := e.watches[o.Prefix]
	delete(e.watches, o.Prefix)
	e.mu.Unlock()
	if w == nil {
		return ErrorReply(fmt.Errorf("prefix %s has no watchers", o.Prefix))
	}
	defer w.stop()
	all := make(chan struct{})
	go func() { w.seen.Wait(); close(all) }()
	select {
	case <-all:
	case <-time.After(callTimeout):
		return ErrorReply(fmt.Errorf("watchers of %s have not received all puts after %s: %w", o.Prefix,
			callTimeout, w.firstError()))
	case <-ctx.Done():
		return ErrorReply(ctx.Err())
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unexpected != nil {
		return ErrorReply(w.unexpected)
	}
	return Reply{Arrivals: w.arrivals}
}

func (w *watcherSet) firstError() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unexpected != nil {
		return w.unexpected
	}
	return context.DeadlineExceeded
}
