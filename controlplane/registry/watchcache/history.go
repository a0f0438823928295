package watchcache

import (
	"cmp"
	"fmt"
	"math"
	"sort"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// DefaultHistoryBytes is the default memory limit of the watch history, in bytes.
const DefaultHistoryBytes = 64 << 20

// HistoryBytesFor returns the memory limit of the watch history, in bytes, for a replica with the
// given memory: an eighth of it, but at least DefaultHistoryBytes and at most 1 GiB. Only a cluster
// with many changes uses all of it.
func HistoryBytesFor(memory int64) int64 { return min(max(memory/8, DefaultHistoryBytes), 1<<30) }

// historyBudget contains the limits of the watch history, and the memory that the histories of all
// storages use.
type historyBudget struct {
	limits  historyLimits
	bytes   atomic.Int64
	decoded atomic.Int64 // the part of bytes that decoded objects use

	ending []*storageCache // storages without kinds since the last sweep, with watches that have unread events
	ended  []*storageCache // such storages without kinds since before the last sweep
}

// historyLimits contains the limits of the watch history.
type historyLimits struct {
	events int           // per storage; 0 = limited by bytes only
	bytes  int64         // of memory, for all storages together
	age    time.Duration // older events are dropped, so that memory usage follows the rate of changes
	sweep  time.Duration // maximum interval between sweeps (removals of old events); 0 = historySweep
}

const (
	historySweep = 15 * time.Second
	// maxDecodedBytes is the maximum memory of the decoded objects in the history. They may also
	// use at most a quarter of the history's memory limit.
	maxDecodedBytes = 64 << 20
)

// sweepInterval returns the interval at which sweepHistory runs.
func (l historyLimits) sweepInterval() time.Duration {
	return min(cmp.Or(l.sweep, historySweep), max(l.age/4, 10*time.Millisecond))
}

// decodedLimit returns the maximum memory of the decoded objects in the history, in bytes.
func (l historyLimits) decodedLimit() int64 { return min(l.bytes/4, maxDecodedBytes) }

// event is one change of one object in the watch history. New events have decoded objects, because
// many watches read them. The decoded objects of older events are evicted
// (storageCache.evictWhile). They are decoded again for a watch that starts in the past.
type event struct {
	rev raftstore.Revision
	// cur is the object after the change. For a deletion, it is the last state of the object, with
	// the resourceVersion of the deletion.
	cur     *objectState
	prev    *objectState // the object before the change; nil for a creation
	deleted bool
	at      time.Time // when the cache applied the change

	left atomic.Pointer[Entry] // cached result of leavingEntry
}

// objectState is one state of an object in the watch history. It has the stored bytes, and the
// decoded entry until that is evicted. The events before and after the state share it.
type objectState struct {
	key   string
	value []byte
	rev   raftstore.Revision
	field string // value of the storage's indexed field

	entry atomic.Pointer[Entry] // decoded entry; nil after its eviction
	size  int64                 // memory accounted for entry, in bytes; under the lock of the storage
}

// newEvent returns the event of a change of an object from the entry previous to the entry current.
// previous is nil for a creation.
func (sc *storageCache) newEvent(current, previous *Entry, deleted bool) *event {
	ev := &event{rev: current.Revision, cur: sc.stateOf(current), deleted: deleted}
	if previous != nil {
		ev.prev = sc.stateOf(previous)
	}
	return ev
}

// stateOf returns the objectState of an entry, and creates it if it does not exist. Only Cache.Run
// may call it.
func (sc *storageCache) stateOf(e *Entry) *objectState {
	if e.state == nil {
		e.state = &objectState{key: e.key, value: e.Value, rev: e.Revision}
		if i := sc.spec.Index; i != nil {
			e.state.field = i.Of(e.Object)
		}
	}
	e.state.entry.Store(e) // the entry may have been evicted while the object was current
	return e.state
}

// entryOf returns the decoded entry of an object state. If the entry was evicted, entryOf decodes
// it again. It keeps the decoded entry if the memory limit allows it, so that many watches that
// start in the past decode it once.
func (sc *storageCache) entryOf(state *objectState) (*Entry, error) {
	if e := state.entry.Load(); e != nil {
		return e, nil
	}
	if e := sc.currentEntry(state.key); e != nil && e.Revision == state.rev {
		return e, nil
	}
	e, err := sc.cache.decodeEntry(sc, state.key, raftstore.Item{Value: state.value, Modified: state.rev}, nil)
	if err != nil {
		return nil, fmt.Errorf("reading an earlier state of %s from the history: %w", state.key, err)
	}
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if other := state.entry.Load(); other != nil {
		return other, nil
	}
	size := decodedSize(state.value)
	if !isClosed(sc.ended) && sc.cache.history.decoded.Load()+size <= sc.cache.history.limits.decodedLimit() &&
		sc.cache.history.bytes.Load()+size <= sc.cache.history.limits.bytes {
		sc.accountFor(func() { sc.history.keepDecoded(state, e, size) })
		sc.historyEntries[e.Object] = e
	}
	return e, nil
}

// leavingEntry returns the entry of the object before the change, with the revision of the change.
// A watch reports it as deleted if the change makes the object stop matching its filter. All such
// watches share the result while the event is new. previous is the decoded entry of ev.prev.
func (ev *event) leavingEntry(previous *Entry) *Entry {
	if shared := ev.left.Load(); shared != nil {
		return shared
	}
	out := previous.atRevision(ev.rev)
	if previous == ev.prev.entry.Load() && !ev.left.CompareAndSwap(nil, out) {
		if shared := ev.left.Load(); shared != nil {
			return shared
		}
	}
	return out
}

// A decoded object takes more memory than its stored bytes: about decodedSizeFactor bytes for each
// stored byte, plus decodedOverhead.
const (
	decodedSizeFactor = 5
	decodedOverhead   = 1 << 10
	eventBytes        = 384 // memory of an event without its objects
)

// decodedSize estimates the memory of a decoded object from its stored bytes.
func decodedSize(value []byte) int64 { return decodedSizeFactor*int64(len(value)) + decodedOverhead }

// encodedSize estimates the memory of an event without its decoded objects. It counts the stored
// bytes after the change, although the store usually has them too. The bytes before the change are
// counted by an earlier event, or were loaded with the cache.
func (ev *event) encodedSize() int64 { return eventBytes + int64(len(ev.cur.key)+len(ev.cur.value)) }

// history contains the newest events of a storage, with consecutive numbers. The position of a
// watcher is the number of the next event that it reads. The history contains every change after
// the revision completeAfter.
type history struct {
	events        []*event // queue; the oldest is events[0]
	first         uint64   // number of events[0]
	completeAfter raftstore.Revision
	evictedBelow  uint64         // the decoded objects of all events with a lower number were evicted
	redecoded     []*objectState // states of evicted events that were decoded again
	bytes         int64          // estimated memory
	decoded       int64          // the part of bytes that decoded objects use
}

// nextNumber returns the number that the next event will have.
func (h *history) nextNumber() uint64 { return h.first + uint64(len(h.events)) }

// addEvent appends an event to the history and accounts for its memory.
func (h *history) addEvent(ev *event) {
	h.events = append(h.events, ev)
	h.bytes += ev.encodedSize()
	h.setDecodedSize(ev.cur, decodedSize(ev.cur.value))
}

// setDecodedSize sets the memory that is accounted for the decoded entry of an object state, in
// bytes.
func (h *history) setDecodedSize(state *objectState, size int64) {
	h.bytes += size - state.size
	h.decoded += size - state.size
	state.size = size
}

// keepDecoded stores a decoded entry in its object state again, and accounts for size bytes.
func (h *history) keepDecoded(state *objectState, entry *Entry, size int64) {
	state.entry.Store(entry)
	h.setDecodedSize(state, size)
	h.redecoded = append(h.redecoded, state)
}

// dropOldest removes the oldest event from the history and returns it.
func (h *history) dropOldest() *event {
	ev := h.events[0]
	h.bytes -= ev.encodedSize()
	h.setDecodedSize(ev.cur, 0)
	if ev.prev != nil {
		h.setDecodedSize(ev.prev, 0)
	}
	h.completeAfter = ev.rev
	h.events[0] = nil
	h.events = h.events[1:]
	h.first++
	h.evictedBelow = max(h.evictedBelow, h.first)
	return ev
}

// firstAfter returns the number of the first event after a revision. ok is false if the history has
// already dropped events after that revision.
func (h *history) firstAfter(rev raftstore.Revision) (next uint64, ok bool) {
	if rev < h.completeAfter {
		return 0, false
	}
	i := sort.Search(len(h.events), func(i int) bool { return h.events[i].rev > rev })
	return h.first + uint64(i), true
}

// eventsFrom returns at most limit events, starting with the event that has the number next. ok is
// false if the history has dropped that event. The slice aliases the history: use it under the lock
// of the storage.
func (h *history) eventsFrom(next uint64, limit int) (events []*event, ok bool) {
	if next < h.first {
		return nil, false
	}
	events = h.events[next-h.first:]
	return events[:min(limit, len(events))], true
}

// accountFor calls change, which changes the history of sc, and adds the difference in its size to
// the totals in historyBudget. The caller holds sc.mu.
func (sc *storageCache) accountFor(change func()) {
	bytes, decoded := sc.history.bytes, sc.history.decoded
	change()
	sc.cache.history.bytes.Add(sc.history.bytes - bytes)
	sc.cache.history.decoded.Add(sc.history.decoded - decoded)
}

// dropWhile drops the oldest events of the history while tooMany returns true. Watches that have
// not read them end with an error (410). The caller holds sc.mu.
func (sc *storageCache) dropWhile(tooMany func(*history) bool) {
	h := &sc.history
	first := h.first
	for len(h.events) > 0 && tooMany(h) {
		ev := h.dropOldest()
		sc.removeHistoryEntry(ev.cur)
		if ev.prev != nil {
			sc.removeHistoryEntry(ev.prev)
		}
		if e, ok := sc.next.byKey.Get(ev.cur.key); ok && e.state == ev.cur {
			e.state = nil // no event refers to the current state any more
		}
	}
	if h.first != first {
		sc.expireSlowWatchers()
	}
	if len(h.events) == 0 {
		// Replace the map, because a map never shrinks.
		h.events, h.redecoded, sc.historyEntries = nil, nil, make(map[api.Object]*Entry)
	}
}

// removeHistoryEntry removes the decoded entry of an object state from sc.historyEntries, because
// the history drops the state or evicts the entry. The caller holds sc.mu.
func (sc *storageCache) removeHistoryEntry(state *objectState) {
	if e := state.entry.Load(); e != nil {
		delete(sc.historyEntries, e.Object)
	}
}

// evictDecoded removes the decoded entry of an object state from the history. The stored bytes
// stay. If the state is the object's current one, the snapshot still has the decoded entry. The
// caller holds sc.mu.
func (sc *storageCache) evictDecoded(state *objectState) {
	sc.removeHistoryEntry(state)
	state.entry.Store(nil)
	sc.history.setDecodedSize(state, 0)
}

// evictWhile evicts the decoded objects of all states that were decoded again after an eviction.
// Then it evicts the decoded objects of the oldest events while condition returns true. The caller
// holds sc.mu.
func (sc *storageCache) evictWhile(condition func(next *event) bool) {
	h := &sc.history
	for _, m := range h.redecoded {
		sc.evictDecoded(m)
	}
	h.redecoded = nil
	for h.evictedBelow < h.nextNumber() {
		ev := h.events[h.evictedBelow-h.first]
		if !condition(ev) {
			return
		}
		sc.evictDecoded(ev.cur)
		if ev.prev != nil {
			sc.evictDecoded(ev.prev)
		}
		ev.left.Store(nil)
		h.evictedBelow++
	}
}

// evictBytes evicts the decoded objects of the storage's oldest events until it has freed the given
// number of bytes.
func (sc *storageCache) evictBytes(bytes int64) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	target := sc.history.decoded - bytes
	sc.accountFor(func() { sc.evictWhile(func(*event) bool { return sc.history.decoded > target }) })
}

// dropBytes drops the storage's oldest events until it has freed the given number of bytes.
func (sc *storageCache) dropBytes(bytes int64) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	target := sc.history.bytes - bytes
	sc.accountFor(func() { sc.dropWhile(func(h *history) bool { return h.bytes > target }) })
}

// dropOld drops the storage's events from before dropBefore, and evicts the decoded objects of
// events from before evictBefore.
func (sc *storageCache) dropOld(dropBefore, evictBefore time.Time) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.accountFor(func() {
		sc.dropWhile(func(h *history) bool { return h.events[0].at.Before(dropBefore) })
		sc.evictWhile(func(next *event) bool { return next.at.Before(evictBefore) })
	})
}

// shrinkHistory reduces the watch history to its memory limits. It always shrinks the storage with
// the largest history. Only Cache.Run calls it.
func (c *Cache) shrinkHistory() {
	// Free slightly more than necessary, so that the next event does not exceed the limit again.
	for limit := c.history.limits.decodedLimit(); c.history.decoded.Load() > limit; {
		c.largestHistory(func(h *history) int64 {
			return h.decoded
		}).evictBytes(c.history.decoded.Load() - limit + limit/16)
	}
	for limit := c.history.limits.bytes; c.history.bytes.Load() > limit; {
		c.largestHistory(func(h *history) int64 { return h.bytes }).dropBytes(c.history.bytes.Load() - limit + limit/16)
	}
}

// largestHistory returns the storage with the largest history, measured by the function property
// (bytes or decoded bytes).
func (c *Cache) largestHistory(property func(*history) int64) (largest *storageCache) {
	maximum := int64(math.MinInt64)
	for _, sc := range c.routes.Load().byStorage {
		sc.mu.RLock()
		n := property(&sc.history)
		sc.mu.RUnlock()
		if n > maximum {
			largest, maximum = sc, n
		}
	}
	return largest
}

// sweepHistory drops events that are too old, and evicts the decoded objects of events older than
// one sweep interval. It also ends watches of storages without kinds. Only Cache.Run calls it.
func (c *Cache) sweepHistory() {
	now, limits := c.options.Now(), &c.history.limits
	for _, sc := range c.routes.Load().byStorage {
		sc.dropOld(now.Add(-limits.age), now.Add(-limits.sweepInterval()))
	}
	for _, sc := range c.history.ended {
		sc.expireWatchers()
	}
	c.history.ended, c.history.ending = c.history.ending, nil
}
