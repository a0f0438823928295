// Package ttlcache caches values for a limited time, within a limit in bytes. The least recently
// used entries are dropped first.
package ttlcache

import (
	"container/list"
	"sync"
	"time"
)

// Cache maps keys to values that expire. It is safe for concurrent use. Keys should be small
// compared to the values, for example hashes, because their size is not counted.
type Cache[K comparable, V any] struct {
	maxBytes int64

	mu    sync.Mutex
	used  int64
	byKey map[K]*list.Element
	order *list.List // of *entry[K, V], most recently used first
}

type entry[K comparable, V any] struct {
	key     K
	value   V
	bytes   int64
	expires time.Time
}

// entryOverhead is the memory of an entry in bytes, in addition to the size passed to Put.
const entryOverhead = 256

// New returns a cache with entries that together use at most maxBytes bytes.
func New[K comparable, V any](maxBytes int64) *Cache[K, V] {
	return &Cache[K, V]{maxBytes: maxBytes, byKey: make(map[K]*list.Element), order: list.New()}
}

// Get returns the value of a key. It returns false if no value is cached, or if the value has
// expired at the time now.
func (c *Cache[K, V]) Get(key K, now time.Time) (v V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.byKey[key]
	if at == nil {
		return v, false
	}
	e := at.Value.(*entry[K, V])
	if !now.Before(e.expires) {
		c.removeElement(at)
		return v, false
	}
	c.order.MoveToFront(at)
	return e.value, true
}

// Put caches a value of the given size in bytes until it expires. A value that is larger than a
// hundredth of the cache is not cached, because it would replace many entries that are in use.
func (c *Cache[K, V]) Put(key K, v V, bytes int64, expires time.Time) {
	bytes += entryOverhead
	c.mu.Lock()
	defer c.mu.Unlock()
	if at := c.byKey[key]; at != nil {
		c.removeElement(at)
	}
	if bytes > c.maxBytes/100 {
		return
	}
	for c.used+bytes > c.maxBytes {
		c.removeElement(c.order.Back())
	}
	c.byKey[key] = c.order.PushFront(&entry[K, V]{key: key, value: v, bytes: bytes, expires: expires})
	c.used += bytes
}

// Len returns the number of cached entries, including those that have expired.
func (c *Cache[K, V]) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.byKey)
}

// Clear removes all entries.
func (c *Cache[K, V]) Clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.byKey)
	c.order.Init()
	c.used = 0
}

func (c *Cache[K, V]) removeElement(at *list.Element) {
	e := c.order.Remove(at).(*entry[K, V])
	delete(c.byKey, e.key)
	c.used -= e.bytes
}
