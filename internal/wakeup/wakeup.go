// Package wakeup provides a signal that wakes a waiting goroutine.
package wakeup

// Signal wakes the goroutine that receives from it. It holds at most one value: several calls of
// Send before a receive wake the receiver once. The state that the receiver reads must therefore be
// changed before Send is called. It is safe for concurrent use. The nil Signal ignores Send and is
// never received.
type Signal chan struct{}

// New returns a Signal that has not been sent.
func New() Signal { return make(Signal, 1) }

// Send wakes the receiver. It never blocks.
func (s Signal) Send() {
	select {
	case s <- struct{}{}:
	default:
	}
}
