package report

import (
	"context"
	"sync"
	"time"

	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// writeQueue performs a session's API writes: concurrently for several keys, one at a time for each
// key. A newer write with a key replaces a queued one. A failed write is retried with backoff until
// it succeeds, is replaced, or ctx ends. The size of the queue is limited.
type writeQueue struct {
	ctx       context.Context
	limit     int
	wg        sync.WaitGroup
	onFailure func(key string, tries int, err error) // called after each failed attempt; may be nil

	mu     sync.Mutex
	queued map[string]queuedWrite
	bytes  int      // total size of queued
	order  []string // keys in queued that no worker handles, oldest first
	busy   map[string]bool
	active int
	closed bool // closeAndWait was called: no worker is started
}

// queuedWrite is the queued write of a key. bytes is its approximate memory use.
type queuedWrite struct {
	write func(ctx context.Context) error
	bytes int
}

const (
	// maxQueuedBytes is the maximum size of the queue of one node. It is far more than all pods of
	// a node report at once.
	maxQueuedBytes = 32 << 20
	// writeCost is the memory use of a queued write in addition to its content.
	writeCost = 1 << 10
)

func newWriteQueue(ctx context.Context, limit int) *writeQueue {
	return &writeQueue{ctx: ctx, limit: limit, queued: make(map[string]queuedWrite), busy: make(map[string]bool)}
}

// enqueueWrite queues a write with a key, which replaces a queued write with the same key. bytes is
// its memory use. It never blocks. If the queue would exceed its limit, it returns false and queues
// nothing.
func (w *writeQueue) enqueueWrite(key string, bytes int, write func(ctx context.Context) error) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.ctx.Err() != nil {
		return true
	}
	old, queued := w.queued[key]
	next := queuedWrite{write, bytes + len(key) + writeCost}
	if w.bytes-old.bytes+next.bytes > maxQueuedBytes {
		return false
	}
	w.storeWrite(key, next)
	if !queued && !w.busy[key] {
		w.order = append(w.order, key)
	}
	w.startWorker()
	return true
}

// storeWrite adds the write j to the queue and updates the total size. The lock must be held.
func (w *writeQueue) storeWrite(key string, j queuedWrite) {
	w.bytes += j.bytes - w.queued[key].bytes
	w.queued[key] = j
}

// closeAndWait starts no more workers, and returns when the running workers have stopped. They stop
// when no write is queued, or soon after the context of newWriteQueue has ended.
func (w *writeQueue) closeAndWait() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.wg.Wait()
}

// startWorker starts a worker if a queued key has none and the limit of workers allows it. The lock
// must be held.
func (w *writeQueue) startWorker() {
	if len(w.order) == 0 || w.active >= w.limit || w.closed {
		return
	}
	w.active++
	w.wg.Add(1)
	go w.runWorker()
}

func (w *writeQueue) runWorker() {
	defer w.wg.Done()
	for {
		w.mu.Lock()
		if len(w.order) == 0 || w.ctx.Err() != nil {
			w.active--
			w.mu.Unlock()
			return
		}
		key := w.order[0]
		w.order = w.order[1:]
		w.busy[key] = true
		w.startWorker()
		w.mu.Unlock()
		w.performWrites(key)
	}
}

// performWrites performs the writes with a key until none is queued.
func (w *writeQueue) performWrites(key string) {
	tries := 0
	delay := backoff.Backoff{Min: 20 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.3}
	for {
		w.mu.Lock()
		j, ok := w.queued[key]
		if !ok || w.ctx.Err() != nil {
			delete(w.busy, key)
			w.mu.Unlock()
			return
		}
		delete(w.queued, key)
		w.bytes -= j.bytes
		w.mu.Unlock()
		err := j.write(w.ctx)
		if err == nil {
			delay.Reset()
			tries = 0
			continue
		}
		if tries++; w.onFailure != nil && w.ctx.Err() == nil {
			w.onFailure(key, tries, err)
		}
		w.mu.Lock()
		if _, newer := w.queued[key]; !newer {
			w.storeWrite(key, j)
		}
		w.mu.Unlock()
		if wait.Delay(w.ctx, delay.Next()) != nil {
			continue
		}
	}
}

// queuedKeys returns the number of queued keys.
func (w *writeQueue) queuedKeys() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.queued)
}
