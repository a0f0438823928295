package assign

import (
	"sync"
	"time"
)

const (
	// batchPause is the pause after a batch for each session that was woken. Without the pause,
	// each of thousands of joining nodes would be announced to all others one by one, at quadratic
	// cost.
	batchPause = 2 * time.Millisecond
	// maxBatchPause is the maximum pause. It is the maximum time until a new node is announced.
	maxBatchPause = 2 * time.Second
)

// batches limits how often many sessions are woken for a change that can wait, such as a new node.
// All changes during a pause are announced together, as a batch. The first batch after a pause is
// immediate. The zero value is ready to use.
type batches struct {
	mu        sync.Mutex
	next      time.Time // earliest time of the next batch
	scheduled bool      // a batch is scheduled
}

// requestBatch calls notify now, or at the end of the pause after the last batch. notify wakes
// sessions and returns their number.
func (w *batches) requestBatch(notify func() int) {
	rest, first := w.reserveBatch()
	switch {
	case !first: // the scheduled batch includes this request
	case rest > 0:
		time.AfterFunc(rest, func() { w.sendBatch(notify) })
	default:
		w.sendBatch(notify)
	}
}

// reserveBatch returns the time until the next batch, and whether no batch was scheduled yet.
func (w *batches) reserveBatch() (rest time.Duration, first bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	first, w.scheduled = !w.scheduled, true
	return time.Until(w.next), first
}

func (w *batches) sendBatch(notify func() int) {
	w.mu.Lock()
	w.scheduled = false // reset first: notify may not include changes of a later request
	w.next = time.Now().Add(maxBatchPause)
	w.mu.Unlock()
	reached := notify()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next = time.Now().Add(min(time.Duration(reached)*batchPause, maxBatchPause))
}
