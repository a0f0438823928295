package nodegateway

import (
	"context"
	"sync"
	"time"

	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// work performs a session's writes: several keys at once, one at a time per key, and for each key
// only what was asked last. A failed one is retried with growing delays until it
// succeeds, is replaced, or ctx ends. put never blocks. What waits is bounded in bytes.
type work struct {
	ctx   context.Context
	limit int
	wg    sync.WaitGroup
	fails func(key string, tries int, err error) // told of each failed try; may be nil

	mu     sync.Mutex
	todo   map[string]job
	bytes  int      // of todo
	order  []string // keys of todo that no worker has, oldest first
	busy   map[string]bool
	active int
	closed bool // wait has begun: nothing is taken on any more
}

// job is what is to be done for a key, and about how many bytes it keeps until then.
type job struct {
	do    func(ctx context.Context) error
	bytes int
}

const (
	// maxWaiting is what may wait for one node: far more than all of a node's pods report at once.
	maxWaiting = 32 << 20
	// jobCost is what a job takes besides what it carries.
	jobCost = 1 << 10
)

func newWork(ctx context.Context, limit int) *work {
	return &work{ctx: ctx, limit: limit, todo: make(map[string]job), busy: make(map[string]bool)}
}

// put replaces what is to be done for key, which keeps so many bytes until then. It returns false, and takes nothing
// on, when too much waits.
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

// set is called under the lock.
func (w *work) set(key string, j job) {
	w.bytes += j.bytes - w.todo[key].bytes
	w.todo[key] = j
}

// wait refuses further work and returns when the workers have ended, as they do soon after ctx.
func (w *work) wait() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.wg.Wait()
}

// start adds a worker when there is work that nobody has. The lock is held.
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

// finish does what is to be done for key until nothing is left.
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

// backlog is how many keys wait.
func (w *work) backlog() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.todo)
}
