package replica

import (
	"container/heap"
	"context"
	"sync"

	"keelson.dev/keelson/raftstore"
)

// waterline is an index that rises, and those who wait for it to reach a mark.
type waterline struct {
	over <-chan struct{} // closed when it rises no more; nil = never

	mu    sync.Mutex
	level uint64
	marks marks
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

func (w *waterline) get() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.level
}

func (w *waterline) rise(to uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.level = max(w.level, to)
	for len(w.marks) > 0 && w.marks[0].at <= w.level {
		close(heap.Pop(&w.marks).(mark).reached)
	}
}

// wait returns nil once the level is at least at, ErrClosed when it will not
// rise any more. A waiter that gives up leaves its mark behind until the level
// passes it.
func (w *waterline) wait(ctx context.Context, at uint64) error {
	w.mu.Lock()
	if w.level >= at {
		w.mu.Unlock()
		return nil
	}
	m := mark{at: at, reached: make(chan struct{})}
	heap.Push(&w.marks, m)
	w.mu.Unlock()
	select {
	case <-m.reached:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-w.over:
		return raftstore.ErrClosed
	}
}
