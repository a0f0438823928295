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
	mu     sync.Mutex
	items  []*item
	filled chan struct{}
	closed bool
}

func (q *queue) init() { q.filled = make(chan struct{}, 1) }

func (q *queue) put(it *item) {
	q.mu.Lock()
	closed := q.closed
	if !closed {
		q.items = append(q.items, it)
	}
	q.mu.Unlock()
	if closed {
		it.finish(result{err: errNotProposed})
		return
	}
	nudge(q.filled)
}

// take removes the next batch.
func (q *queue) take() []*item {
	q.mu.Lock()
	defer q.mu.Unlock()
	var batch []*item
	size, n := 0, 0
	for _, it := range q.items {
		if len(batch) == batchOps || len(batch) > 0 && size+it.size > batchBytes {
			break
		}
		n++
		if it.state.CompareAndSwap(itemWaiting, itemTaken) {
			batch = append(batch, it)
			size += it.size
		}
	}
	rest := copy(q.items, q.items[n:])
	clear(q.items[rest:])
	q.items = q.items[:rest]
	if rest > 0 {
		nudge(q.filled)
	}
	return batch
}

// drain refuses what is queued and all that comes.
func (q *queue) drain() {
	q.mu.Lock()
	items := q.items
	q.items, q.closed = nil, true
	q.mu.Unlock()
	for _, it := range items {
		if it.state.CompareAndSwap(itemWaiting, itemTaken) {
			it.finish(result{err: errNotProposed})
		}
	}
}
