package local

import (
	"context"
	"sync"
)

// jobSet runs named jobs that may outlast the call that started them. A job continues when the call
// is canceled. A call with the name of a running job waits for that job.
type jobSet struct {
	mu      sync.Mutex
	running sync.WaitGroup
	byName  map[string]*job
}

type job struct {
	done chan struct{}
	err  error
}

// runShared waits for the job with this name. If no such job is running, it starts do with the
// context jobCtx as the job. ended is false if ctx was canceled before the job ended; the job then
// continues.
func (j *jobSet) runShared(ctx, jobCtx context.Context, name string, do func(context.Context) error) (
	ended bool, err error,
) {
	j.mu.Lock()
	one := j.byName[name]
	if one == nil {
		one = &job{done: make(chan struct{})}
		if j.byName == nil {
			j.byName = map[string]*job{}
		}
		j.byName[name] = one
		j.running.Go(func() {
			one.err = do(jobCtx)
			j.mu.Lock()
			delete(j.byName, name)
			j.mu.Unlock()
			close(one.done)
		})
	}
	j.mu.Unlock()
	select {
	case <-one.done:
		return true, one.err
	case <-ctx.Done():
		return false, ctx.Err()
	}
}
