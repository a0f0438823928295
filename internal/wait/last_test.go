package wait

import (
	"context"
	"errors"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// A condition that ends the waiting itself is not asked again, however long it took: what it said is what is told.
func TestLastWordIsTold(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		refused := errors.New("refused")
		for range 100 {
			ctx, cancel := context.WithCancel(t.Context())
			asked := 0
			err := For(ctx, time.Second, func() error {
				asked++
				time.Sleep(2 * time.Second)
				cancel()
				return refused
			})
			if asked != 1 || !errors.Is(err, refused) || !errors.Is(err, context.Canceled) {
				t.Fatalf("asked %d times: %v", asked, err)
			}
		}
	})
}
