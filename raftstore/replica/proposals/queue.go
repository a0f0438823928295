// Package proposals queues proposals, divides them into batches and issues their IDs.
package proposals

import (
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/internal/wakeup"
	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/mvcc"
)

// The maximum size of one batch, in ops and bytes. A single proposal may be larger than BatchBytes.
const (
	BatchOps   = 512
	batchBytes = 1 << 20
	// opCost is added to the size of each op, in addition to its key and value.
	opCost = 48
)

// InFlight is the maximum number of batches in progress: one is written while the next is in
// transit. The cost of a batch hardly depends on its content: three replicas write, sync, send and
// respond. Another batch therefore starts while others are in progress only if it has worthOps ops
// or worthBytes bytes. A smaller batch waits until a batch has finished.
const (
	InFlight   = 3
	worthOps   = 32
	worthBytes = 64 << 10
)

// Result is the result of one attempt to commit a proposal.
type Result struct {
	Outcome mvcc.Outcome
	Index   uint64 // the raft index of the commit
	Err     error  // wraps ErrNotProposed or ErrMaybe
}

// States of an item. An item leaves the state itemWaiting once: it becomes part of a batch, or its
// caller withdraws it.
const (
	itemWaiting int32 = iota
	itemTaken
	itemAbandoned
)

// Item is one proposal in the queue.
type Item struct {
	Proposal *storev1.Proposal
	size     int
	Local    bool // the proposal must not be forwarded to another replica
	state    atomic.Int32
	Done     chan Result // receives the result; buffered, so that the sender does not block
}

// NewItem returns an item for a proposal.
func NewItem(p *storev1.Proposal) *Item {
	it := &Item{Proposal: p, size: opCost, Done: make(chan Result, 1)}
	// an empty fenced proposal only requests its outcome and may go to any leader
	it.Local = p.GetFence() != 0 && len(p.GetOps()) > 0
	for _, op := range p.GetOps() {
		it.size += len(op.GetKey()) + len(op.GetValue()) + opCost
	}
	return it
}

// Withdraw removes an item that is still queued and returns true. It returns false if the item is
// already part of a batch.
func (it *Item) Withdraw() bool { return it.state.CompareAndSwap(itemWaiting, itemAbandoned) }

// SetResult passes the result to the waiting caller. It must be called at most once per item.
func (it *Item) SetResult(res Result) { it.Done <- res }

// Queue holds the proposals that wait for the next batch. It is safe for concurrent use.
type Queue struct {
	Mu       sync.Mutex
	Items    []*Item
	size     int // total size of the items, in bytes
	underWay int // number of batches in progress, as passed to the last TakeBatch
	Filled   wakeup.Signal
	closed   bool
}

func (q *Queue) Initialize() { q.Filled = wakeup.New() }

// Enqueue adds items. Items that are added together may become part of one batch. After RefuseAll
// the result of each item is ErrNotProposed.
func (q *Queue) Enqueue(items ...*Item) {
	q.Mu.Lock()
	closed := q.closed
	if !closed {
		q.Items = append(q.Items, items...)
		for _, it := range items {
			q.size += it.size
		}
	}
	worth := q.isBatchReady()
	q.Mu.Unlock()
	switch {
	case closed:
		for _, it := range items {
			it.SetResult(Result{Err: ErrNotProposed})
		}
	case worth:
		q.Filled.Send()
	}
}

// isBatchReady reports whether the waiting items must be sent as a batch now. The caller holds
// q.Mu.
func (q *Queue) isBatchReady() bool {
	switch q.underWay {
	case 0:
		return len(q.Items) > 0
	case InFlight:
		return false
	default:
		return len(q.Items) >= worthOps || q.size >= worthBytes
	}
}

// TakeBatch removes and returns the next batch if it is to be sent now, in addition to the given
// number of batches in progress. Otherwise it returns nil, and Filled is signaled when a batch may
// be ready.
func (q *Queue) TakeBatch(inProgress int) []*Item {
	q.Mu.Lock()
	defer q.Mu.Unlock()
	q.underWay = inProgress
	if !q.isBatchReady() {
		return nil
	}
	var batch []*Item
	size, n := 0, 0
	for _, it := range q.Items {
		if len(batch) == BatchOps || len(batch) > 0 && size+it.size > batchBytes {
			break
		}
		n++
		q.size -= it.size
		if it.state.CompareAndSwap(itemWaiting, itemTaken) {
			batch = append(batch, it)
			size += it.size
		}
	}
	rest := copy(q.Items, q.Items[n:])
	clear(q.Items[rest:])
	q.Items = q.Items[:rest]
	return batch
}

// RefuseAll sets the result of the queued items, and of all later ones, to ErrNotProposed.
func (q *Queue) RefuseAll() {
	q.Mu.Lock()
	items := q.Items
	q.Items, q.size, q.closed = nil, 0, true
	q.Mu.Unlock()
	for _, it := range items {
		if it.state.CompareAndSwap(itemWaiting, itemTaken) {
			it.SetResult(Result{Err: ErrNotProposed})
		}
	}
}
