// Package virtual is testing/synctest for tests that also run with the race detector.
//
// In Go 1.26 the timers of a bubble share one state of the detector, which two processors may use at once when goroutines
// of the bubble find timers due at the same moment (golang/go#78156): the program crashes then. A bubble has one processor
// for as long as it lives where the detector is on. It sees races by what happens before what, not by what runs beside what.
package virtual

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

// Test is synctest.Test.
func Test(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	if raceDetectorEnabled {
		enterBubble()
		defer leaveBubble()
	}
	synctest.Test(t, f)
}

// Wait is synctest.Wait.
func Wait() { synctest.Wait() }

var bubbles struct {
	sync.Mutex
	n          int // that live
	processors int // when there are none
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
