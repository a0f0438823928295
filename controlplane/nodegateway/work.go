package nodegateway

import (
	"context"
	"sync"
	"time"

	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// work performs a session's API writes: several keys concurrently, one write at a time per key. A
// newer write for a key replaces a queued one. A failed write is retried with backoff until it
// succeeds, is replaced, or ctx ends. The queue is bounded in bytes.
type work struct {
	ctx   context.Context
	limit int
	wg    sync.WaitGroup
	fails func(key string, tries int, err error) // called after each failed attempt; may be nil

	mu     sync.Mutex
	todo   map[string]job
	bytes  int      // total of todo
	order  []string // keys of todo that no worker handles, oldest first
	busy   map[string]bool
	active int
	closed bool // wait was called: no new jobs
}

// job is the queued write of a key; bytes is its approximate memory use.
type job struct {
	do    func(ctx context.Context) error
	bytes int
}

const (
	// maxWaiting bounds the queue of one node; it is far more than all its pods report at once.
	maxWaiting = 32 << 20
	// jobCost is the memory use of a job besides its content.
	jobCost = 1 << 10
)

func newWork(ctx context.Context, limit int) *work {
	return &work{ctx: ctx, limit: limit, todo: make(map[string]job), busy: make(map[string]bool)}
}

// put queues a write for key, which replaces a queued one; bytes is its memory use. It never
// blocks. It returns false, and does not queue, if the queue is full.
func (w *work) put(key string, bytes int, do func(ctx context.Context) error) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.ctx.Err() != nil {
		return true
	}
	old, queued := w.todo[key]
	next := job{do, bytes + len(key) + jobCost}
	if w.bytes-old.bytes+next.bytes > maxWaiting {
		return false
	}
	w.set(key, next)
	if !queued && !w.busy[key] {
		w.order = append(w.order, key)
	}
	w.start()
	return true
}

// set stores a job and updates the total size. The lock must be held.
func (w *work) set(key string, j job) {
	w.bytes += j.bytes - w.todo[key].bytes
	w.todo[key] = j
}

// wait stops the queue and returns when the workers have ended, which they do soon after ctx.
func (w *work) wait() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.wg.Wait()
}

// start adds a worker if a key has none and the limit allows it. The lock must be held.
func (w *work) start() {
	if len(w.order) == 0 || w.active >= w.limit || w.closed {
		return
	}
	w.active++
	w.wg.Add(1)
	go w.run()
}

func (w *work) run() {
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
		w.start()
		w.mu.Unlock()
		w.finish(key)
	}
}

// finish performs the writes of key until none is queued.
func (w *work) finish(key string) {
	tries := 0
	delay := backoff.Backoff{Min: 20 * time.Millisecond, Max: 2 * time.Second, Jitter: 0.3}
	for {
		w.mu.Lock()
		j, ok := w.todo[key]
		if !ok || w.ctx.Err() != nil {
			delete(w.busy, key)
			w.mu.Unlock()
			return
		}
		delete(w.todo, key)
		w.bytes -= j.bytes
		w.mu.Unlock()
		err := j.do(w.ctx)
		if err == nil {
			delay.Reset()
			tries = 0
			continue
		}
		if tries++; w.fails != nil && w.ctx.Err() == nil {
			w.fails(key, tries, err)
		}
		w.mu.Lock()
		if _, newer := w.todo[key]; !newer {
			w.set(key, j)
		}
		w.mu.Unlock()
		if wait.Delay(w.ctx, delay.Next()) != nil {
			continue
		}
	}
}

// backlog returns the number of queued keys.
func (w *work) backlog() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.todo)
}
