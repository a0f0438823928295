package scheduler

import (
	"context"
	"sync"
	"time"
)

// idleWorkerTimeout is how long a goroutine without a task waits for another.
const idleWorkerTimeout = time.Second

// workerPool runs tasks at once, each in a goroutine that may have run others before. What a new goroutine costs is the growth of
// its stack, which goes deep in a call of the API: a thousand bindings a second should not pay for it each.
type workerPool struct {
	tasks chan func() // without room: only who is idle takes one
	wg    sync.WaitGroup
}

func newWorkerPool() *workerPool { return &workerPool{tasks: make(chan func())} }

// startTask has a task run, and does not wait for it. Idle goroutines end with ctx.
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

// waitForTasks returns when all tasks have ended. Their ctx must have ended.
func (c *workerPool) waitForTasks() { c.wg.Wait() }
