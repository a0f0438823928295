package replica

import (
	"sync"
	"sync/atomic"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/mvcc"
)

// Bounds of one batch. A single proposal may be larger than batchBytes.
const (
	batchOps   = 512
	batchBytes = 1 << 20
	// opCost is counted for each op beside its key and value.
	opCost = 48
)

// inFlight is how many batches are under way at once: one is being written
// while the next is on its way. A batch costs much the same whatever is in it:
// three replicas write, sync, send and answer. So another sets out beside those
// under way only when it is worth it; what is less waits until one of them ends.
const (
	inFlight   = 3
	worthOps   = 32
	worthBytes = 64 << 10
)

// result is what became of one attempt.
type result struct {
	outcome mvcc.Outcome
	index   uint64 // raft index that holds the commit
	err     error  // wraps errNotProposed or errMaybe
}

// States of an item: whoever moves it out of waiting decides.
const (
	itemWaiting int32 = iota
	itemTaken
	itemAbandoned
)

// item is one proposal in the queue.
type item struct {
	proposal *storev1.Proposal
	size     int
	local    bool // must not be forwarded
	state    atomic.Int32
	done     chan result // buffered: delivering never blocks
}

func newItem(p *storev1.Proposal) *item {
	it := &item{proposal: p, size: opCost, done: make(chan result, 1)}
	// An empty fenced proposal only asks, and may go to whoever leads now.
	it.local = p.GetFence() != 0 && len(p.GetOps()) > 0
	for _, op := range p.GetOps() {
		it.size += len(op.GetKey()) + len(op.GetValue()) + opCost
	}
	return it
}

// abandon takes the item back; false when it has been taken already.
func (it *item) abandon() bool { return it.state.CompareAndSwap(itemWaiting, itemAbandoned) }

func (it *item) finish(res result) { it.done <- res }

// queue holds proposals until the next batch takes them.
type queue struct {
	mu       sync.Mutex
	items    []*item
	size     int // of the items
	underWay int // batches, as told by the last take
	filled   chan struct{}
	closed   bool
}

func (q *queue) init() { q.filled = make(chan struct{}, 1) }

// put adds items, which may go in the same batch.
func (q *queue) put(items ...*item) {
	q.mu.Lock()
	closed := q.closed
	if !closed {
		q.items = append(q.items, items...)
		for _, it := range items {
			q.size += it.size
		}
	}
	worth := q.worth()
	q.mu.Unlock()
	switch {
	case closed:
		for _, it := range items {
			it.finish(result{err: errNotProposed})
		}
	case worth:
		nudge(q.filled)
	}
}

// worth reports whether what waits makes a batch now. q.mu is held.
func (q *queue) worth() bool {
	switch q.underWay {
	case 0:
		return len(q.items) > 0
	case inFlight:
		return false
	default:
		return len(q.items) >= worthOps || q.size >= worthBytes
	}
}

// take removes the next batch, if there is one to go beside those under way.
// Otherwise filled tells when there may be.
func (q *queue) take(underWay int) []*item {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.underWay = underWay
	if !q.worth() {
		return nil
	}
	var batch []*item
	size, n := 0, 0
	for _, it := range q.items {
		if len(batch) == batchOps || len(batch) > 0 && size+it.size > batchBytes {
			break
		}
		n++
		q.size -= it.size
		if it.state.CompareAndSwap(itemWaiting, itemTaken) {
			batch = append(batch, it)
			size += it.size
		}
	}
	rest := copy(q.items, q.items[n:])
	clear(q.items[rest:])
	q.items = q.items[:rest]
	return batch
}

// drain refuses what is queued and all that comes.
func (q *queue) drain() {
	q.mu.Lock()
	items := q.items
	q.items, q.size, q.closed = nil, 0, true
	q.mu.Unlock()
	for _, it := range items {
		if it.state.CompareAndSwap(itemWaiting, itemTaken) {
			it.finish(result{err: errNotProposed})
		}
	}
}
