// Package lrucache caches values that can be computed again. The values that were used least
// recently are dropped first.
package lrucache

import (
	"sync"
	"sync/atomic"
)

// Budget bounds the total size of many cached values. Sizes are estimates. It is safe for
// concurrent use.
type Budget struct {
	maxBytes int64

	mu    sync.Mutex
	queue []evictable // in the order of insertion
	used  int64
}

// New returns a budget of maxBytes bytes.
func New(maxBytes int64) *Budget { return &Budget{maxBytes: maxBytes} }

// Used returns the estimated size of the cached values and their number.
func (r *Budget) Used() (bytes int64, values int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.used, len(r.queue)
}

// evictable is a cached value that a Budget can drop.
type evictable interface {
	// clearUsed reports whether the value was not used since the last call.
	clearUsed() bool
	// evict drops the value, and returns its size.
	evict() int64
}

// addEntry adds a value and first drops the oldest values until it fits. A value that was used
// since it was added, or since it was last considered, is moved to the end once. A value that is
// larger than the budget is cached alone.
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

// lazyValue is a value that is computed on first use and cached while the budget allows it.
// Concurrent callers share one computation.
type lazyValue[T any] struct {
	budget  *Budget
	compute func() (value T, size int64, err error)

	computing sync.Mutex
	cached    atomic.Pointer[cachedValue[T]]
}

type cachedValue[T any] struct {
	value T
	size  int64 // estimate
	err   error
	used  atomic.Bool
}

// Memoize returns a function that returns the value of f. f is called again whenever the value is
// no longer cached.
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
