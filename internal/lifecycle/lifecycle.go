// Package lifecycle runs the parts of a daemon together: when one part returns or the context ends,
// all parts are canceled and awaited.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Part is one long-running component of a daemon. Run blocks until ctx ends or the component cannot
// continue.
type Part struct {
	Name string
	Run  func(ctx context.Context) error
}

// Run runs all parts concurrently. When ctx ends or the first part returns, it cancels the contexts
// of all parts and waits for them. It returns the joined errors of the parts. A part that returns
// without an error before its context ends is an error too. The end of ctx is not an error.
func Run(ctx context.Context, parts ...Part) error {
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	var wg sync.WaitGroup
	errs := make([]error, len(parts))
	for i, p := range parts {
		wg.Add(1)
		go func() {
			defer wg.Done()
			defer cancel()
			err := p.Run(inner)
			switch {
			case err != nil && !errors.Is(err, context.Canceled):
				errs[i] = fmt.Errorf("%s: %w", p.Name, err)
			case inner.Err() == nil:
				errs[i] = fmt.Errorf("%s: ended unexpectedly", p.Name)
			}
		}()
	}
	wg.Wait()
	return errors.Join(errs...)
}
