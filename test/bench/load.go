package main

import (
	"context"
	"errors"
	"sync"
	"time"
)

// closedLoop is a load of concurrent clients: each sends its next call when its previous call has
// returned.
type closedLoop struct {
	clients int
	during  time.Duration
	call    func(ctx context.Context, client, n int) error
}

// loadResult is the result of a closedLoop: the latency of each call, and the time that all took.
type loadResult struct {
	latencies []time.Duration
	took      time.Duration
}

// callsPerSecond returns the number of calls per second of the whole load.
func (r loadResult) callsPerSecond() float64 { return float64(len(r.latencies)) / r.took.Seconds() }

// runClients runs the load for l.during. It stops at the first failed call and returns its error,
// because a result that includes failures has no meaning.
func (l closedLoop) runClients(ctx context.Context) (loadResult, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu  sync.Mutex
		out loadResult
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
