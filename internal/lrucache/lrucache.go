// Package lrucache caches values that can be computed again. The values that were used least
// recently are dropped first.
package lrucache

import (
	"sync"
	"sync/atomic"
)

// Budget bounds the total size of the values that the functions returned by Memoize cache. Sizes
// are estimates. It is safe for concurrent use.
type Budget struct {
	maxBytes int64

	mu    sync.Mutex
	queue []evictable // in the order of insertion
	used  int64
}

// New returns a Budget for cached values of at most maxBytes bytes in total.
func New(maxBytes int64) *Budget { return &Budget{maxBytes: maxBytes} }

// Used returns the total estimated size of the cached values, and their number.
func (r *Budget) Used() (bytes int64, values int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.used, len(r.queue)
}

// evictable is a cached value that a Budget can remove from memory.
type evictable interface {
	// clearUsed returns true if the value was not used since the previous call of clearUsed, or
	// since it was cached. It marks the value as unused.
	clearUsed() bool
	// evict drops the value, and returns its size.
	evict() int64
}

// addEntry adds a cached value of the given size. It first evicts the oldest values until the new
// value fits. A value that was used since it was added, or since an earlier call, is moved to the
// end of the queue instead. This happens once per value and call. A value larger than the budget is
// cached alone.
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

// lazyValue is a value that is computed when it is requested. It is cached until the Budget evicts
// it. Concurrent callers wait for one computation.
type lazyValue[T any] struct {
	budget  *Budget
	compute func() (value T, size int64, err error)

	computing sync.Mutex
	cached    atomic.Pointer[cachedValue[T]]
}

type cachedValue[T any] struct {
	value T
	size  int64 // estimated size in bytes
	err   error
	used  atomic.Bool
}

// Memoize returns a function that returns the result of f and caches it within the budget. f is
// called again after the result was evicted. f also returns the estimated size of its result. An
// error is cached like a value.
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
