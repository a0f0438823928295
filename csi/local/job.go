package local

import (
	"context"
	"sync"
)

// jobSet runs jobs that may take longer than a call. A job continues when its caller is gone. A
// caller with the same name waits for the running job.
type jobSet struct {
	mu      sync.Mutex
	running sync.WaitGroup
	byName  map[string]*job
}

type job struct {
	done chan struct{}
	err  error
}

// runShared starts a job unless one with this name is running, and waits until it is done or ctx is
// canceled. over is false if ctx was canceled first. The job itself runs until life is canceled.
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
