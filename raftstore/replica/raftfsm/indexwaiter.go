package raftfsm

import (
	"container/heap"
	"context"
	"sync"

	"keelson.dev/keelson/raftstore"
)

// indexWaiter is an index that only rises. Callers can wait until it reaches a value. It is safe
// for concurrent use.
type indexWaiter struct {
	over <-chan struct{} // closed when the index no longer rises; nil = never

	Mu    sync.Mutex
	level uint64
	Marks marks
}

type mark struct {
	at      uint64
	reached chan struct{}
}

type marks []mark

func (m marks) Len() int           { return len(m) }
func (m marks) Less(i, j int) bool { return m[i].at < m[j].at }
func (m marks) Swap(i, j int)      { m[i], m[j] = m[j], m[i] }
func (m *marks) Push(x any)        { *m = append(*m, x.(mark)) }
func (m *marks) Pop() any {
	old := *m
	last := old[len(old)-1]
	*m = old[:len(old)-1]
	return last
}

func (w *indexWaiter) CurrentIndex() uint64 {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	return w.level
}

func (w *indexWaiter) raiseIndex(to uint64) {
	w.Mu.Lock()
	defer w.Mu.Unlock()
	w.level = max(w.level, to)
	for len(w.Marks) > 0 && w.Marks[0].at <= w.level {
		close(heap.Pop(&w.Marks).(mark).reached)
	}
}

// AwaitIndex waits until w has reached the given index and returns nil. It returns ErrClosed if the
// index no longer rises, or the error of ctx. If ctx ends first, the memory of this call is
// released only when w reaches the index.
func (w *indexWaiter) AwaitIndex(ctx context.Context, index uint64) error {
	w.Mu.Lock()
	if w.level >= index {
		w.Mu.Unlock()
		return nil
	}
	m := mark{at: index, reached: make(chan struct{})}
	heap.Push(&w.Marks, m)
	w.Mu.Unlock()
	select {
	case <-m.reached:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-w.over:
		return raftstore.ErrClosed
	}
}
