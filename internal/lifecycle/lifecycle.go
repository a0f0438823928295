// Package lifecycle runs the parts of a daemon as one: when a part ends, or ctx
// does, all are cancelled and waited for.
package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// Part is one long-running piece: Run blocks until ctx ends or the part cannot go on.
type Part struct {
	Name string
	Run  func(ctx context.Context) error
}

// Run runs all parts until ctx ends or the first of them returns, then cancels
// the others and waits for them. A part that ends early without an error is an
// error too; the end of ctx is not.
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
