package scheduler

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// Every task runs once, at once with the others; those that come one after the other share a goroutine; nobody is left.
func TestCrew(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		c := newWorkerPool()
		var done, at, most atomic.Int64
		task := func() {
			for n := at.Add(1); n > most.Load(); {
				most.CompareAndSwap(most.Load(), n)
			}
			time.Sleep(10 * time.Millisecond)
			at.Add(-1)
			done.Add(1)
		}
		for range 100 {
			c.startTask(ctx, task)
		}
		time.Sleep(10 * time.Millisecond)
		virtual.Wait()
		if done.Load() != 100 || most.Load() != 100 {
			t.Errorf("%d tasks of 100 are done, %d ran at once", done.Load(), most.Load())
		}
		crowd := runtime.NumGoroutine()
		for range 50 {
			c.startTask(ctx, task)
			virtual.Wait()
		}
		if n := runtime.NumGoroutine(); n > crowd {
			t.Errorf("%d goroutines where %d were idle", n, crowd)
		}
		time.Sleep(2 * idleWorkerTimeout)
		virtual.Wait()
		if n := runtime.NumGoroutine(); n > crowd-90 {
			t.Errorf("%d goroutines of %d still wait for a task", n, crowd)
		}
		c.startTask(ctx, task)
		cancel()
		c.waitForTasks()
		if done.Load() != 151 {
			t.Errorf("%d tasks of 151 are done", done.Load())
		}
	})
}
