package controllers

import (
	"context"
	"sync"
)

// maxParallel bounds how many calls of one batch run at once: enough to fill the
// store's commit batches, few enough that one controller leaves room for others.
const maxParallel = 256

// SlowStart calls do n times in batches of 1, 2, 4, 8 ... calls at once. It stops
// after the first batch with a failure and returns how many calls succeeded and
// the first error: a quota or an admission refusal then costs few calls, not n.
func SlowStart(ctx context.Context, n int, do func(ctx context.Context, i int) error) (int, error) {
	done := 0
	for size := min(n, 1); size > 0; size = min(2*size, n-done, maxParallel) {
		errs := make([]error, size)
		var wg sync.WaitGroup
		for i := range size {
			wg.Go(func() { errs[i] = do(ctx, done+i) })
		}
		wg.Wait()
		ok := 0
		var first error
		for _, err := range errs {
			if err == nil {
				ok++
			} else if first == nil {
				first = err
			}
		}
		if done += ok; first != nil {
			return done, first
		}
	}
	return done, nil
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
