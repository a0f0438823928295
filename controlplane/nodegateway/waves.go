package nodegateway

import (
	"sync"
	"time"
)

const (
	// wavePause is the pause after a wave, per session that it reached. Without it, thousands of
	// nodes joining in sequence would each be announced to all others at once, at quadratic cost.
	wavePause = 2 * time.Millisecond
	// maxWavePause bounds the delay until other nodes learn of a node.
	maxWavePause = 2 * time.Second
)

// waves limits the rate of waves, that is, of wake-ups of all sessions for a change that may wait.
// The first wave after a pause is immediate. The zero value is ready to use.
type waves struct {
	mu    sync.Mutex
	next  time.Time // earliest time of the next wave
	asked bool      // a wave is scheduled
}

// ask calls wave now, or when the pause after the last wave is over. wave returns the number of
// sessions that it reached.
func (w *waves) ask(wave func() int) {
	rest, first := w.reserve()
	switch {
	case !first: // a scheduled wave covers this request
	case rest > 0:
		time.AfterFunc(rest, func() { w.send(wave) })
	default:
		w.send(wave)
	}
}

// reserve returns the wait until the next wave, and whether no wave was scheduled yet.
func (w *waves) reserve() (rest time.Duration, first bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	first, w.asked = !w.asked, true
	return time.Until(w.next), first
}

func (w *waves) send(wave func() int) {
	w.mu.Lock()
	w.asked = false // before the wave: a later request may not be covered by it
	w.next = time.Now().Add(maxWavePause)
	w.mu.Unlock()
	reached := wave()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = time.Now().Add(min(time.Duration(reached)*wavePause, maxWavePause))
}
