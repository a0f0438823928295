package framelimit

import (
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/internal/wakeup"
)

// requestSlots counts the unfinished requests of a connection. It is safe for concurrent use.
type requestSlots struct {
	limit   int64 // largest number of unfinished requests of an unauthenticated client
	running atomic.Int64
	ended   wakeup.Signal // sent when a request has finished
	closed  chan struct{} // closed with the connection
	closing sync.Once
}

func newRequestSlots(limit int) requestSlots {
	return requestSlots{limit: int64(limit), ended: wakeup.New(), closed: make(chan struct{})}
}

// startRequest counts a new request and returns true, or returns false if the limit is reached.
func (r *requestSlots) startRequest() bool {
	if r.running.Load() >= r.limit {
		return false
	}
	r.running.Add(1)
	return true
}

// finishRequest counts a request as finished, so that a waiting request can start.
func (r *requestSlots) finishRequest() {
	r.running.Add(-1)
	r.ended.Send()
}

// closeSlots ends the wait of a request for a slot. It is called when the connection is closed.
func (r *requestSlots) closeSlots() { r.closing.Do(func() { close(r.closed) }) }
