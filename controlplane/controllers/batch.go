package controllers

import (
	"cmp"
	"context"
	"sync"
	"sync/atomic"
)

// maxParallel bounds how many calls of InParallel run at once: enough to fill the
// store's commit batches, few enough that one controller leaves room for others.
const maxParallel = 256

// maxBatch is the largest batch: after so many calls at most it is asked again whether more are wanted.
const maxBatch = 500

// atOnce is how many calls of a batch run at once: enough to fill the store's commit batches. Each goroutine makes several
// calls, for what a new one costs is the growth of its stack, which goes deep in a call of the API.
const atOnce = 128

// SlowStart calls do, one call first and with each that succeeds one more at a time, up to atOnce, until as many have
// succeeded as want says. want is asked after every maxBatch calls at the latest: what is wanted may have changed
// meanwhile. After a failure no further call begins, so that there are at most twice as many calls as succeeded, and one:
// a quota or an admission refusal then costs few calls, not all. It returns how many calls succeeded and the first error.
func SlowStart(ctx context.Context, want func() int, do func(ctx context.Context, i int) error) (int, error) {
	var (
		wg                   sync.WaitGroup
		calls, ends          = make(chan int), make(chan error, atOnce)
		workers, begun, done int
		wanted, asked        int // as want said last, and how many had begun then
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
		for first == nil && ctx.Err() == nil && running < min(done+1, atOnce) {
			if begun >= wanted || begun-asked >= maxBatch {
				if wanted, asked = want(), begun; begun >= wanted {
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

// InBatches calls do in batches of 500 calls, until as many have been made as want says, which is asked before
// every batch. It goes on after failures and returns the first.
func InBatches(ctx context.Context, want func() int, do func(ctx context.Context, i int) error) error {
	var first error
	for made := 0; ctx.Err() == nil; {
		n := min(maxBatch, want()-made)
		if n <= 0 {
			return first
		}
		if _, err := batch(ctx, made, n, do); first == nil {
			first = err
		}
		made += n
	}
	return cmp.Or(first, ctx.Err())
}

// batch makes the calls from..from+n, atOnce at a time, and returns how many failed, and the first error.
func batch(ctx context.Context, from, n int, do func(ctx context.Context, i int) error) (failed int, first error) {
	errs := make([]error, n)
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(n, atOnce) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				errs[i] = do(ctx, from+i)
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

// InParallel calls do for every i below n, a bounded number at once, and returns
// the first error after all have returned.
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
