package main

import (
	"context"
	"errors"
	"sync"
	"time"
)

// load is clients in a closed loop: each calls again as soon as it has its answer.
type load struct {
	clients int
	during  time.Duration
	call    func(ctx context.Context, client, n int) error
}

// result is what a load came to.
type result struct {
	latencies []time.Duration
	took      time.Duration
}

// rate is calls per second.
func (r result) rate() float64 { return float64(len(r.latencies)) / r.took.Seconds() }

// run ends at the first call that fails: a figure over failures means nothing.
func (l load) run(ctx context.Context) (result, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu  sync.Mutex
		out result
		wg  sync.WaitGroup
	)
	began := time.Now()
	until := began.Add(l.during)
	for c := range l.clients {
		wg.Add(1)
		go func() {
			defer wg.Done()
			var mine []time.Duration
			for n := 0; ctx.Err() == nil; n++ {
				sent := time.Now()
				if !sent.Before(until) {
					break
				}
				if err := l.call(ctx, c, n); err != nil {
					cancel(err)
					break
				}
				mine = append(mine, time.Since(sent))
			}
			mu.Lock()
			defer mu.Unlock()
			out.latencies = append(out.latencies, mine...)
		}()
	}
	wg.Wait()
	out.took = time.Since(began)
	if err := context.Cause(ctx); err != nil {
		return out, err
	}
	if len(out.latencies) == 0 {
		return out, errors.New("no call was made")
	}
	return out, nil
}
