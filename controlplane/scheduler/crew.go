package scheduler

import (
	"context"
	"sync"
	"time"
)

// crewRest is how long a goroutine without a task waits for another.
const crewRest = time.Second

// crew runs tasks at once, each in a goroutine that may have run others before. What a new goroutine costs is the growth of
// its stack, which goes deep in a call of the API: a thousand bindings a second should not pay for it each.
type crew struct {
	tasks chan func() // without room: only who is idle takes one
	wg    sync.WaitGroup
}

func newCrew() *crew { return &crew{tasks: make(chan func())} }

// run has a task run, and does not wait for it. Idle goroutines end with ctx.
func (c *crew) run(ctx context.Context, task func()) {
	select {
	case c.tasks <- task:
	default:
		c.wg.Go(func() { c.work(ctx, task) })
	}
}

func (c *crew) work(ctx context.Context, task func()) {
	rest := time.NewTimer(crewRest)
	defer rest.Stop()
	for {
		task()
		rest.Reset(crewRest)
		select {
		case task = <-c.tasks:
		case <-rest.C:
			return
		case <-ctx.Done():
			return
		}
	}
}

// wait returns when all tasks have ended. Their ctx must have ended.
func (c *crew) wait() { c.wg.Wait() }
