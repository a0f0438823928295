package registry

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

// historyLimits bounds the watch history.
type historyLimits struct {
	events int           // per kind; 0 = limited by bytes only
	bytes  int64         // of memory, of all kinds together
	age    time.Duration // older events are dropped, so that memory usage follows the activity
	sweep  time.Duration // minimum interval between sweeps; 0 is historySweep
}

const (
	historySweep = 15 * time.Second
	// maxLive bounds the decoded objects of events, in addition to a quarter of the limit.
	maxLive = 64 << 20
)

// every returns the interval between sweeps for events that are too old.
func (l historyLimits) every() time.Duration {
	return min(cmp.Or(l.sweep, historySweep), max(l.age/4, 10*time.Millisecond))
}

// live returns the part of the limit that decoded objects may use.
func (l historyLimits) live() int64 { return min(l.bytes/4, maxLive) }

// event is one change of one object. New events have decoded objects, because many watches read
// them. Older events are packed (storageCache.pack) and decoded again for a watch that starts in
// the past.
type event struct {
	rev raftstore.Revision
	// cur is the object after the change. For a deletion it is the last state, with the
	// resourceVersion of the deletion.
	cur     *moment
	prev    *moment // before the change; nil for a creation
	deleted bool
	at      time.Time // when the cache applied it

	left atomic.Pointer[entry]
}

// moment is one state of an object between two changes: its stored bytes, and for a time its
// decoded entry.
type moment struct {
	key   string
	value []byte
	rev   raftstore.Revision
	field string // value of the storage's indexed field

	live  atomic.Pointer[entry] // decoded entry; nil when packed
	taken int64                 // bytes accounted for live; under the lock of the storage
}

// event creates the event of a change from prev, which may be nil, to cur.
func (sc *storageCache) event(cur, prev *entry, deleted bool) *event {
	ev := &event{rev: cur.rev, cur: sc.moment(cur), deleted: deleted}
	if prev != nil {
		ev.prev = sc.moment(prev)
	}
	return ev
}

// moment returns the moment of an entry. The events before and after the state share it. Called by
// run.
func (sc *storageCache) moment(e *entry) *moment {
	if e.moment == nil {
		e.moment = &moment{key: e.key, value: e.value, rev: e.rev}
		if i := sc.storage.Index; i != nil {
			e.moment.field = i.Of(e.obj)
		}
	}
	e.moment.live.Store(e) // it may have been packed while the object was current
	return e.moment
}

// entryOf returns the entry of a moment, and decodes it if it is packed. The decoded entry is kept
// if there is memory, so that many watches that start in the past decode it once.
func (sc *storageCache) entryOf(m *moment) (*entry, error) {
	if e := m.live.Load(); e != nil {
		return e, nil
	}
	if e := sc.get(m.key); e != nil && e.rev == m.rev {
		return e, nil
	}
	e, err := sc.cache.decode(sc, m.key, raftstore.Item{Value: m.value, Modified: m.rev}, nil)
	if err != nil {
		return nil, fmt.Errorf("reading an earlier %s of the history: %w", m.key, err)
	}
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if other := m.live.Load(); other != nil {
		return other, nil
	}
	size := decodedSize(m.value)
	if !isClosed(sc.ended) && sc.cache.live.Load()+size <= sc.cache.limits.live() && sc.cache.kept.Load()+size <= sc.cache.limits.bytes {
		sc.account(func() { sc.history.thaw(m, e, size) })
		sc.recent[e.obj] = e
	}
	return e, nil
}

// leaving returns the object before the change, with the revision of the change. A watch gets it as
// deleted if its filter does not match the object any more. All such watches share it while the
// event is new.
func (ev *event) leaving(prev *entry) *entry {
	if shared := ev.left.Load(); shared != nil {
		return shared
	}
	out := prev.at(ev.rev)
	if prev == ev.prev.live.Load() && !ev.left.CompareAndSwap(nil, out) {
		if shared := ev.left.Load(); shared != nil {
			return shared
		}
	}
	return out
}

// An object takes more memory than its stored bytes: about decodedTimes for each byte, plus
// decodedBytes.
const (
	decodedTimes = 5
	decodedBytes = 1 << 10
	packedBytes  = 384 // of an event without decoded objects
)

// decodedSize estimates the memory of an object that is stored as value.
func decodedSize(value []byte) int64 { return decodedTimes*int64(len(value)) + decodedBytes }

// size estimates the memory of a packed event, without its decoded objects. It counts the value
// after the change, although the store usually has it too. The value before the change is counted
// by an earlier event, or was loaded with the cache.
func (ev *event) size() int64 { return packedBytes + int64(len(ev.cur.key)+len(ev.cur.value)) }

// history is the newest events of a storage, numbered without gaps. A watcher's position is such a
// number. The history is complete after revision floor.
type history struct {
	events []*event // queue; the oldest is events[0]
	first  uint64   // number of events[0]
	floor  raftstore.Revision
	packed uint64    // all events below this number were packed
	thawed []*moment // packed moments that were decoded again
	bytes  int64     // estimated memory
	live   int64     // the part of bytes that is decoded objects
}

// end returns the number of the next event.
func (h *history) end() uint64 { return h.first + uint64(len(h.events)) }

func (h *history) add(ev *event) {
	h.events = append(h.events, ev)
	h.bytes += ev.size()
	h.take(ev.cur, decodedSize(ev.cur.value))
}

// take sets the accounted bytes of a moment's decoded object.
func (h *history) take(m *moment, size int64) {
	h.bytes += size - m.taken
	h.live += size - m.taken
	m.taken = size
}

// thaw stores the decoded entry of a moment and accounts for it.
func (h *history) thaw(m *moment, e *entry, size int64) {
	m.live.Store(e)
	h.take(m, size)
	h.thawed = append(h.thawed, m)
}

// drop removes and returns the oldest event.
func (h *history) drop() *event {
	ev := h.events[0]
	h.bytes -= ev.size()
	h.take(ev.cur, 0)
	if ev.prev != nil {
		h.take(ev.prev, 0)
	}
	h.floor = ev.rev
	h.events[0] = nil
	h.events = h.events[1:]
	h.first++
	h.packed = max(h.packed, h.first)
	return ev
}

// after returns the number of the first event later than rev. ok is false if events after rev were
// dropped.
func (h *history) after(rev raftstore.Revision) (next uint64, ok bool) {
	if rev < h.floor {
		return 0, false
	}
	i := sort.Search(len(h.events), func(i int) bool { return h.events[i].rev > rev })
	return h.first + uint64(i), true
}

// from returns at most n events with the numbers from next on. ok is false if they were dropped.
// The slice aliases the queue: use it under the lock.
func (h *history) from(next uint64, n int) (events []*event, ok bool) {
	if next < h.first {
		return nil, false
	}
	events = h.events[next-h.first:]
	return events[:min(n, len(events))], true
}

// account runs do, which changes the history, and updates the totals of all storages. sc.mu is
// held, as in all functions below.
func (sc *storageCache) account(do func()) {
	bytes, live := sc.history.bytes, sc.history.live
	do()
	sc.cache.kept.Add(sc.history.bytes - bytes)
	sc.cache.live.Add(sc.history.live - live)
}

// trim drops the oldest events while tooMany returns true.
func (sc *storageCache) trim(tooMany func(*history) bool) {
	h := &sc.history
	was := h.first
	for len(h.events) > 0 && tooMany(h) {
		ev := h.drop()
		sc.forget(ev.cur)
		if ev.prev != nil {
			sc.forget(ev.prev)
		}
		if e, ok := sc.byKey.Get(ev.cur.key); ok && e.moment == ev.cur {
			e.moment = nil // no event refers to the current state any more
		}
	}
	if h.first != was {
		sc.leaveBehind()
	}
	if len(h.events) == 0 {
		// Replace the map, because a map never shrinks.
		h.events, h.thawed, sc.recent = nil, nil, make(map[api.Object]*entry)
	}
}

// forget removes the entry of a moment from the index by object.
func (sc *storageCache) forget(m *moment) {
	if e := m.live.Load(); e != nil {
		delete(sc.recent, e.obj)
	}
}

// pack drops the decoded object of a moment. The object of the current state is still in the
// snapshot.
func (sc *storageCache) pack(m *moment) {
	sc.forget(m)
	m.live.Store(nil)
	sc.history.take(m, 0)
}

// packWhile packs all thawed moments, then the oldest unpacked events while rule returns true.
func (sc *storageCache) packWhile(rule func(next *event) bool) {
	h := &sc.history
	for _, m := range h.thawed {
		sc.pack(m)
	}
	h.thawed = nil
	for h.packed < h.end() {
		ev := h.events[h.packed-h.first]
		if !rule(ev) {
			return
		}
		sc.pack(ev.cur)
		if ev.prev != nil {
			sc.pack(ev.prev)
		}
		ev.left.Store(nil)
		h.packed++
	}
}

// packSome packs the oldest events until it has freed the given number of bytes.
func (sc *storageCache) packSome(less int64) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	most := sc.history.live - less
	sc.account(func() { sc.packWhile(func(*event) bool { return sc.history.live > most }) })
}

// forgetSome drops the oldest events until it has freed the given number of bytes.
func (sc *storageCache) forgetSome(less int64) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	most := sc.history.bytes - less
	sc.account(func() { sc.trim(func(h *history) bool { return h.bytes > most }) })
}

// age drops events older than forget and packs events older than pack.
func (sc *storageCache) age(forget, pack time.Time) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.account(func() {
		sc.trim(func(h *history) bool { return h.events[0].at.Before(forget) })
		sc.packWhile(func(next *event) bool { return next.at.Before(pack) })
	})
}

// keepHistory keeps the history of all storages within its limits. It always shrinks the storage
// with the largest history. Called by run.
func (c *cache) keepHistory() {
	// Free slightly more than necessary, so that the next event does not exceed the limit again.
	for most := c.limits.live(); c.live.Load() > most; {
		c.largest(func(h *history) int64 { return h.live }).packSome(c.live.Load() - most + most/16)
	}
	for most := c.limits.bytes; c.kept.Load() > most; {
		c.largest(func(h *history) int64 { return h.bytes }).forgetSome(c.kept.Load() - most + most/16)
	}
}

// largest returns the storage with the largest value of a property of its history.
func (c *cache) largest(of func(*history) int64) (found *storageCache) {
	most := int64(math.MinInt64)
	for _, sc := range c.routes.Load().byStorage {
		sc.mu.RLock()
		n := of(&sc.history)
		sc.mu.RUnlock()
		if n > most {
			found, most = sc, n
		}
	}
	return found
}

// sweep drops events that are too old and packs events that are not new. Called by run.
func (c *cache) sweep() {
	now := c.now()
	for _, sc := range c.routes.Load().byStorage {
		sc.age(now.Add(-c.limits.age), now.Add(-c.limits.every()))
	}
	for _, sc := range c.late {
		sc.lose()
	}
	c.late, c.ending = c.ending, nil
}
