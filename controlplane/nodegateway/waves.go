package nodegateway

import (
	"sync"
	"time"
)

const (
	// wavePause is the time after a wave for each session that it has reached. Thousands of nodes that join one after the
	// other would otherwise each be told of to all others at once, which costs the square of their number.
	wavePause = 2 * time.Millisecond
	// maxWavePause is the longest time for which a node is not known to the others.
	maxWavePause = 2 * time.Second
)

// waves bounds how often all sessions are woken for what may wait. The first wave after a pause goes out at once. The zero
// value is ready to use.
type waves struct {
	mu    sync.Mutex
	next  time.Time // no wave goes out before
	asked bool      // one will go out then
}

// ask has a wave go out, which tells how many sessions it has reached, now or when the last one is long enough ago.
func (w *waves) ask(wave func() int) {
	rest, first := w.reserve()
	switch {
	case !first: // one will go out that serves this one, too
	case rest > 0:
		time.AfterFunc(rest, func() { w.send(wave) })
	default:
		w.send(wave)
	}
}

// reserve says how long the next wave has to wait, and whether it was not asked for before.
func (w *waves) reserve() (rest time.Duration, first bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	first, w.asked = !w.asked, true
	return time.Until(w.next), first
}

func (w *waves) send(wave func() int) {
	w.mu.Lock()
	w.asked = false // who asks from now on may have missed this one
	w.next = time.Now().Add(maxWavePause)
	w.mu.Unlock()
	reached := wave()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = time.Now().Add(min(time.Duration(reached)*wavePause, maxWavePause))
}
