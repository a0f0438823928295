package engine

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
)

// maxParallel is the maximum number of concurrent calls of InParallel. It is large enough to fill
// the store's commit batches, and leaves capacity for other controllers.
const maxParallel = 256

// maxBatch is the maximum number of calls of do between two calls of required, in SlowStart and
// InBatches.
const maxBatch = 500

// batchConcurrency is the maximum number of concurrent calls of do in SlowStart and InBatches. It
// is large enough to fill the store's commit batches. Each goroutine makes several calls, because a
// new goroutine must grow its stack for the deep call chain of the API.
const batchConcurrency = 128

// SlowStart calls do with 0, 1, 2 and so on until it has started as many calls as required returns.
// It starts with one concurrent call and allows one more after each success, up to
// batchConcurrency. It calls required again after at most maxBatch calls, because the result may
// change. After a failure it starts no further call. The number of calls is therefore at most twice
// the number of successes plus one, so that a refusal by quota or admission costs few calls.
// SlowStart returns the number of successful calls and the first error.
func SlowStart(ctx context.Context, required func() int, do func(ctx context.Context, i int) error) (int, error) {
	var (
		wg                   sync.WaitGroup
		calls, ends          = make(chan int), make(chan error, batchConcurrency)
		workers, begun, done int
		wanted, asked        int // last result of want, and the number of started calls at that time
		first                error
	)
	defer func() { close(calls); wg.Wait() }()
	begin := func() {
		if running := begun - done; workers == running {
			workers++
			wg.Go(func() {
				for i := range calls {
					ends <- do(ctx, i)
				}
			})
		}
		calls <- begun
		begun++
	}
	for running := 0; ; running-- {
		for first == nil && ctx.Err() == nil && running < min(done+1, batchConcurrency) {
			if begun >= wanted || begun-asked >= maxBatch {
				if wanted, asked = required(), begun; begun >= wanted {
					break
				}
			}
			begin()
			running++
		}
		if running == 0 {
			return done, cmp.Or(first, ctx.Err())
		}
		if err := <-ends; err != nil {
			first = cmp.Or(first, err)
		} else {
			done++
		}
	}
}

// InBatches calls do with 0, 1, 2 and so on until it has made as many calls as required returns, in
// batches of at most maxBatch calls. It calls required before each batch. It continues after
// failures and returns the first error.
func InBatches(ctx context.Context, required func() int, do func(ctx context.Context, i int) error) error {
	var first error
	for made := 0; ctx.Err() == nil; {
		n := min(maxBatch, required()-made)
		if n <= 0 {
			return first
		}
		if _, err := runBatch(ctx, made, n, do); first == nil {
			first = err
		}
		made += n
	}
	return cmp.Or(first, ctx.Err())
}

// runBatch calls do with n consecutive numbers from start on, batchConcurrency calls at a time. It
// returns the number of failures and the first error.
func runBatch(ctx context.Context, start, n int, do func(ctx context.Context, i int) error) (failed int, first error) {
	errs := make([]error, n)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, batchConcurrency) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				errs[i] = do(ctx, start+i)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			failed++
			first = cmp.Or(first, err)
		}
	}
	return failed, first
}

// InParallel calls do for every i from 0 to n-1, at most maxParallel calls at a time. It returns
// the first error after all calls have returned.
func InParallel(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		first error
		slots = make(chan struct{}, maxParallel)
	)
	for i := range n {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := do(ctx, i); err != nil {
				mu.Lock()
				defer mu.Unlock()
				if first == nil {
					first = err
				}
			}
		})
	}
	wg.Wait()
	return first
}
