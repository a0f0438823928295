// Package virtual wraps testing/synctest for tests that also run with the race detector.
//
// In Go 1.26 the timers of a bubble share one state of the detector. If goroutines of the bubble
// observe timers that are due at the same moment on two processors, the program crashes
// (golang/go#78156). With the race detector, this package therefore limits the process to one
// processor while a bubble exists. The detector still works: it detects races by the happens-before
// relation, not by parallel execution.
package virtual

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

// Test calls synctest.Test. With the race detector, the process uses only one processor until all
// concurrent tests of this kind have returned.
func Test(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	if raceDetectorEnabled {
		enterBubble()
		defer leaveBubble()
	}
	synctest.Test(t, f)
}

// Wait calls synctest.Wait.
func Wait() { synctest.Wait() }

var bubbles struct {
	sync.Mutex
	n          int // number of running bubbles
	processors int // GOMAXPROCS while no bubble runs
}

func enterBubble() {
	bubbles.Lock()
	defer bubbles.Unlock()
	if bubbles.n++; bubbles.n == 1 {
		bubbles.processors = runtime.GOMAXPROCS(1)
	}
}

func leaveBubble() {
	bubbles.Lock()
	defer bubbles.Unlock()
	if bubbles.n--; bubbles.n == 0 {
		runtime.GOMAXPROCS(bubbles.processors)
	}
}
