package local

import (
	"context"
	"sync"
)

// jobSet runs named jobs that may take longer than the call that starts them. A job continues when
// the call is canceled. A call with the name of a running job waits for that job.
type jobSet struct {
	mu      sync.Mutex
	running sync.WaitGroup
	byName  map[string]*job
}

type job struct {
	done chan struct{}
	err  error
}

// runShared runs do as the job name, unless a job of this name is running, and waits for it. The
// result over is false if ctx was canceled before the job has ended. The job continues then, with
// life as its context.
func (j *jobSet) runShared(ctx, life context.Context, name string, do func(context.Context) error) (over bool, err error) {
	j.mu.Lock()
	one := j.byName[name]
	if one == nil {
		one = &job{done: make(chan struct{})}
		if j.byName == nil {
			j.byName = map[string]*job{}
		}
		j.byName[name] = one
		j.running.Go(func() {
			one.err = do(life)
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
