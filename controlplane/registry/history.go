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

// historyLimits bound what is kept for watches that resume.
type historyLimits struct {
	events int           // of a kind; 0 = as many as there is room for
	bytes  int64         // of memory, of all kinds together
	age    time.Duration // what is older goes, so that memory follows what is going on
	sweep  time.Duration // how often at most it is looked through; 0 is historySweep
}

const (
	historySweep = 15 * time.Second
	// maxLive bounds the objects that events keep decoded, beside a quarter of the limit.
	maxLive = 64 << 20
)

// every is how often history is looked through for what is too old.
func (l historyLimits) every() time.Duration {
	return min(cmp.Or(l.sweep, historySweep), max(l.age/4, 10*time.Millisecond))
}

// live is how much of the limit decoded objects may take.
func (l historyLimits) live() int64 { return min(l.bytes/4, maxLive) }

// event is one change of one object. What is new is read by many, and its objects are there; those of older events are
// packed (storageCache.pack), and made again for a watch that begins in the past.
type event struct {
	rev raftstore.Revision
	// cur is the object after the change. For a deletion it is the last state
	// with the resourceVersion of the deletion.
	cur     *moment
	prev    *moment // before the change; nil when it was created
	deleted bool
	at      time.Time // when the cache took it in

	left atomic.Pointer[entry]
}

// moment is an object between two of its changes: as the store keeps it, and for a time decoded.
type moment struct {
	key   string
	value []byte
	rev   raftstore.Revision
	field string // the value of the field that the storage has an index of

	live  atomic.Pointer[entry] // nil when packed
	taken int64                 // bytes that live counts for; under the lock of the storage
}

// event makes one of an entry and the one before it, which may be nil.
func (sc *storageCache) event(cur, prev *entry, deleted bool) *event {
	ev := &event{rev: cur.rev, cur: sc.moment(cur), deleted: deleted}
	if prev != nil {
		ev.prev = sc.moment(prev)
	}
	return ev
}

// moment is that of an entry, which the events before and after it share. Called by run.
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

// entryOf returns the entry of a moment, which it decodes when need be. It is kept then, as long as there is room: a
// thousand watches that begin in the past have it decoded once.
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

// leaving is the object before the change, at the revision of the change: what a watch is told whose filter the object
// does not match any more. All such watches share it while the event is new.
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

// An object takes several times of memory what it takes in the store: so much about
// for each of its bytes, and so much besides.
const (
	decodedTimes = 5
	decodedBytes = 1 << 10
	packedBytes  = 384 // of an event without objects
)

// decodedSize is about what an object takes that is stored as value.
func decodedSize(value []byte) int64 { return decodedTimes*int64(len(value)) + decodedBytes }

// size is about what a packed event takes, beside what is live of it. The value is counted, although the store keeps it
// too for most of the time. That before the change is an earlier event's, or was loaded with the cache.
func (ev *event) size() int64 { return packedBytes + int64(len(ev.cur.key)+len(ev.cur.value)) }

// history is the newest events of a storage, numbered without gaps: a watcher is a
// number. Everything after revision floor is in it.
type history struct {
	events []*event // a queue: the first of them is events[0]
	first  uint64   // number of events[0]
	floor  raftstore.Revision
	packed uint64    // all events below this number have been packed
	thawed []*moment // that are live again
	bytes  int64     // about what it takes
	live   int64     // of this, decoded objects
}

// end is the number that the next event will get.
func (h *history) end() uint64 { return h.first + uint64(len(h.events)) }

func (h *history) add(ev *event) {
	h.events = append(h.events, ev)
	h.bytes += ev.size()
	h.take(ev.cur, decodedSize(ev.cur.value))
}

// take counts the decoded object of a moment.
func (h *history) take(m *moment, size int64) {
	h.bytes += size - m.taken
	h.live += size - m.taken
	m.taken = size
}

// thaw keeps what a moment was decoded to.
func (h *history) thaw(m *moment, e *entry, size int64) {
	m.live.Store(e)
	h.take(m, size)
	h.thawed = append(h.thawed, m)
}

// drop removes the oldest event.
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

// after returns the number of the first event later than rev; ok is false when
// events after rev have been dropped.
func (h *history) after(rev raftstore.Revision) (next uint64, ok bool) {
	if rev < h.floor {
		return 0, false
	}
	i := sort.Search(len(h.events), func(i int) bool { return h.events[i].rev > rev })
	return h.first + uint64(i), true
}

// from returns the events numbered next and later, at most n; ok is false when
// they have been dropped. The slice aliases the queue: use it under the lock.
func (h *history) from(next uint64, n int) (events []*event, ok bool) {
	if next < h.first {
		return nil, false
	}
	events = h.events[next-h.first:]
	return events[:min(n, len(events))], true
}

// account keeps the totals of all storages while do changes the history. sc.mu is held, as by all that follow.
func (sc *storageCache) account(do func()) {
	bytes, live := sc.history.bytes, sc.history.live
	do()
	sc.cache.kept.Add(sc.history.bytes - bytes)
	sc.cache.live.Add(sc.history.live - live)
}

// trim drops the oldest events for as long as they are too many.
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
			e.moment = nil // no event is about the object as it is any more
		}
	}
	if h.first != was {
		sc.leaveBehind()
	}
	if len(h.events) == 0 {
		// A map keeps the room of the most that was ever in it.
		h.events, h.thawed, sc.recent = nil, nil, make(map[api.Object]*entry)
	}
}

// forget takes the entry of a moment from those that are found by their object.
func (sc *storageCache) forget(m *moment) {
	if e := m.live.Load(); e != nil {
		delete(sc.recent, e.obj)
	}
}

// pack lets the decoded object of a moment go. One that is current stays where it is, and is found there.
func (sc *storageCache) pack(m *moment) {
	sc.forget(m)
	m.live.Store(nil)
	sc.history.take(m, 0)
}

// packWhile packs the oldest events that are not, as long as the rule says so, and before them what is live again.
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

// packSome packs until decoded objects take so many bytes less.
func (sc *storageCache) packSome(less int64) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	most := sc.history.live - less
	sc.account(func() { sc.packWhile(func(*event) bool { return sc.history.live > most }) })
}

// forgetSome drops the oldest events until they take so many bytes less.
func (sc *storageCache) forgetSome(less int64) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	most := sc.history.bytes - less
	sc.account(func() { sc.trim(func(h *history) bool { return h.bytes > most }) })
}

// age drops the events from before a time, and packs those from before a later one.
func (sc *storageCache) age(forget, pack time.Time) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.account(func() {
		sc.trim(func(h *history) bool { return h.events[0].at.Before(forget) })
		sc.packWhile(func(next *event) bool { return next.at.Before(pack) })
	})
}

// keepHistory brings the history of all storages within its bounds: whichever has the
// most of it gives way. Called by run.
func (c *cache) keepHistory() {
	// Each time a little more than need be, so that it is not due at the next event.
	for most := c.limits.live(); c.live.Load() > most; {
		c.largest(func(h *history) int64 { return h.live }).packSome(c.live.Load() - most + most/16)
	}
	for most := c.limits.bytes; c.kept.Load() > most; {
		c.largest(func(h *history) int64 { return h.bytes }).forgetSome(c.kept.Load() - most + most/16)
	}
}

// largest is the storage with the most of something in its history.
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

// sweep drops what is too old, and packs what is no longer new. Called by run.
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
