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

// SlowStart calls do in batches of 1, 2, 4, 8 ... 500 calls, until as many have succeeded as want says. want
// is asked before every batch: what is wanted may have changed meanwhile. SlowStart stops after the first batch with a
// failure and returns how many calls succeeded and the first error: a quota or an admission refusal then costs few
// calls, not all.
func SlowStart(ctx context.Context, want func() int, do func(ctx context.Context, i int) error) (int, error) {
	done := 0
	for size := 1; ctx.Err() == nil; size = min(2*size, maxBatch) {
		n := min(size, want()-done)
		if n <= 0 {
			return done, nil
		}
		failed, err := batch(ctx, done, n, do)
		if done += n - failed; err != nil {
			return done, err
		}
	}
	return done, ctx.Err()
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
