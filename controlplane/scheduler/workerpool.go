package scheduler

import (
	"context"
	"sync"
	"time"
)

// idleWorkerTimeout is how long a goroutine of a workerPool waits for another task before it exits.
const idleWorkerTimeout = time.Second

// workerPool runs each task at once in a goroutine, and reuses goroutines that are idle. A new
// goroutine must grow its stack for an API call. At a thousand bindings a second, reuse avoids that
// cost.
type workerPool struct {
	tasks chan func() // unbuffered: only an idle goroutine receives a task
	wg    sync.WaitGroup
}

func newWorkerPool() *workerPool { return &workerPool{tasks: make(chan func())} }

// startTask runs a task in an idle or new goroutine and returns at once. Idle goroutines exit when
// ctx ends.
func (c *workerPool) startTask(ctx context.Context, task func()) {
	select {
	case c.tasks <- task:
	default:
		c.wg.Go(func() { c.runTasks(ctx, task) })
	}
}

func (c *workerPool) runTasks(ctx context.Context, task func()) {
	rest := time.NewTimer(idleWorkerTimeout)
	defer rest.Stop()
	for {
		task()
		rest.Reset(idleWorkerTimeout)
		select {
		case task = <-c.tasks:
		case <-rest.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// waitForTasks waits until all goroutines of the pool have exited. The contexts of the tasks must
// have ended.
func (c *workerPool) waitForTasks() { c.wg.Wait() }
