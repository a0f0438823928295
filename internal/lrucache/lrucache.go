// Package lrucache keeps values that can be made again, as far as there is room: those used last.
package lrucache

import (
	"sync"
	"sync/atomic"
)

// Budget bounds what is kept of many values by the sum of their sizes, which are estimates. Safe for concurrent use.
type Budget struct {
	maxBytes int64

	mu    sync.Mutex
	queue []evictable // in the order in which they came
	used  int64
}

// New returns a room for so many bytes.
func New(maxBytes int64) *Budget { return &Budget{maxBytes: maxBytes} }

// Used is what the kept values take, by estimate, and how many they are.
func (r *Budget) Used() (bytes int64, values int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.used, len(r.queue)
}

// evictable is what a room drops.
type evictable interface {
	// clearUsed says that nobody has used it since it was last asked.
	clearUsed() bool
	// evict forgets it, and returns what it took.
	evict() int64
}

// addEntry takes something in, and drops before what came first. What has been used since it came, or since it was last looked
// at, waits once more. One that is larger than the room is there alone.
func (r *Budget) addEntry(k evictable, size int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for again := len(r.queue); r.used+size > r.maxBytes && len(r.queue) > 0; again-- {
		first := r.queue[0]
		r.queue[0] = nil
		if r.queue = r.queue[1:]; again > 0 && !first.clearUsed() {
			r.queue = append(r.queue, first)
			continue
		}
		r.used -= first.evict()
	}
	r.queue = append(r.queue, k)
	r.used += size
}

// lazyValue is a value that is made when it is needed, by one of those who need it, and kept while there is room.
type lazyValue[T any] struct {
	budget  *Budget
	compute func() (value T, size int64, err error)

	computing sync.Mutex
	cached    atomic.Pointer[cachedValue[T]]
}

type cachedValue[T any] struct {
	value T
	size  int64 // by estimate
	err   error
	used  atomic.Bool
}

// Memoize returns what gets a value, made again by f whenever it is no longer kept.
func Memoize[T any](budget *Budget, f func() (value T, size int64, err error)) func() (T, error) {
	c := &lazyValue[T]{budget: budget, compute: f}
	return c.value
}

func (c *lazyValue[T]) value() (T, error) {
	m := c.cached.Load()
	if m == nil {
		m = c.computeOnce()
	} else if !m.used.Load() {
		m.used.Store(true)
	}
	return m.value, m.err
}

func (c *lazyValue[T]) computeOnce() *cachedValue[T] {
	c.computing.Lock()
	defer c.computing.Unlock()
	if m := c.cached.Load(); m != nil {
		return m
	}
	m := &cachedValue[T]{}
	m.value, m.size, m.err = c.compute()
	c.cached.Store(m)
	c.budget.addEntry(c, m.size)
	return m
}

func (c *lazyValue[T]) clearUsed() bool { return !c.cached.Load().used.Swap(false) }

func (c *lazyValue[T]) evict() int64 { return c.cached.Swap(nil).size }
