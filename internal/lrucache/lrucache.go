// Package lrucache keeps values that can be made again, as far as there is room: those used last.
package lrucache

import (
	"sync"
	"sync/atomic"
)

// Room bounds what is kept of many values by the sum of their sizes, which are estimates. Safe for concurrent use.
type Room struct {
	most int64

	mu    sync.Mutex
	queue []keeper // in the order in which they came
	taken int64
}

// New returns a room for so many bytes.
func New(most int64) *Room { return &Room{most: most} }

// Taken is what the kept values take, by estimate, and how many they are.
func (r *Room) Taken() (bytes int64, values int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.taken, len(r.queue)
}

// keeper is what a room drops.
type keeper interface {
	// rest says that nobody has used it since it was last asked.
	rest() bool
	// drop forgets it, and returns what it took.
	drop() int64
}

// add takes something in, and drops before what came first. What has been used since it came, or since it was last looked
// at, waits once more. One that is larger than the room is there alone.
func (r *Room) add(k keeper, size int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for again := len(r.queue); r.taken+size > r.most && len(r.queue) > 0; again-- {
		first := r.queue[0]
		r.queue[0] = nil
		if r.queue = r.queue[1:]; again > 0 && !first.rest() {
			r.queue = append(r.queue, first)
			continue
		}
		r.taken -= first.drop()
	}
	r.queue = append(r.queue, k)
	r.taken += size
}

// compiled is a value that is made when it is needed, by one of those who need it, and kept while there is room.
type compiled[T any] struct {
	room *Room
	make func() (value T, size int64, err error)

	making sync.Mutex
	kept   atomic.Pointer[made[T]]
}

type made[T any] struct {
	value T
	size  int64 // by estimate
	err   error
	used  atomic.Bool
}

// Keep returns what gets a value, made again by f whenever it is no longer kept.
func Keep[T any](in *Room, f func() (value T, size int64, err error)) func() (T, error) {
	c := &compiled[T]{room: in, make: f}
	return c.get
}

func (c *compiled[T]) get() (T, error) {
	m := c.kept.Load()
	if m == nil {
		m = c.again()
	} else if !m.used.Load() {
		m.used.Store(true)
	}
	return m.value, m.err
}

func (c *compiled[T]) again() *made[T] {
	c.making.Lock()
	defer c.making.Unlock()
	if m := c.kept.Load(); m != nil {
		return m
	}
	m := &made[T]{}
	m.value, m.size, m.err = c.make()
	c.kept.Store(m)
	c.room.add(c, m.size)
	return m
}

func (c *compiled[T]) rest() bool { return !c.kept.Load().used.Swap(false) }

func (c *compiled[T]) drop() int64 { return c.kept.Swap(nil).size }
