package virtual_test

import (
	"runtime"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// Goroutines of a bubble that wake at the same moment each receive from a ticker. On two processors
// the detector crashes.
func TestTickersOfABubble(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	virtual.Test(t, func(t *testing.T) {
		done := make(chan struct{})
		for range 32 {
			go func() {
				often, rarely := time.NewTicker(time.Millisecond), time.NewTicker(2*time.Millisecond)
				defer often.Stop()
				defer rarely.Stop()
				for range 500 {
					time.Sleep(3 * time.Millisecond)
					select {
					case <-often.C:
					case <-rarely.C:
					}
				}
				done <- struct{}{}
			}()
		}
		for range 32 {
			<-done
		}
		virtual.Wait()
	})
	if now := runtime.GOMAXPROCS(0); now != before {
		t.Errorf("%d processors after the bubble, %d before", now, before)
	}
}
