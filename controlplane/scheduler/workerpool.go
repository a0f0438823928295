package scheduler

import (
	"context"
	"sync"
	"time"
)

// idleWorkerTimeout is how long a goroutine of a workerPool waits for another task before it exits.
const idleWorkerTimeout = time.Second

// workerPool runs each task immediately in a goroutine. It reuses idle goroutines, because a new
// goroutine must first grow its stack for an API call. This cost is significant at a thousand
// bindings per second.
type workerPool struct {
	tasks chan func() // unbuffered, so that a send succeeds only if a goroutine is idle
	wg    sync.WaitGroup
}

func newWorkerPool() *workerPool { return &workerPool{tasks: make(chan func())} }

// startTask runs the task in an idle goroutine, or in a new one if none is idle. It does not wait
// for the task. Idle goroutines exit when ctx ends.
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

// waitForTasks waits until all goroutines of the pool have exited. The contexts that were passed to
// startTask must have ended.
func (c *workerPool) waitForTasks() { c.wg.Wait() }
