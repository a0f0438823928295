package local

import (
	"context"
	"sync"
)

// jobs are things that take longer than a call may: they go on when their caller has left, and whoever asks for the same
// again waits for the one that is under way.
type jobs struct {
	mu      sync.Mutex
	running sync.WaitGroup
	m       map[string]*job
}

type job struct {
	done chan struct{}
	err  error
}

// run does something unless it is under way, and waits until it is done, or ctx ends: then over is false. It is done with
// the life of the driver.
func (j *jobs) run(ctx, life context.Context, name string, do func(context.Context) error) (over bool, err error) {
	j.mu.Lock()
	one := j.m[name]
	if one == nil {
		one = &job{done: make(chan struct{})}
		if j.m == nil {
			j.m = map[string]*job{}
		}
		j.m[name] = one
		j.running.Go(func() {
			one.err = do(life)
			j.mu.Lock()
			delete(j.m, name)
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
