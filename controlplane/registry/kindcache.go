package registry

import (
	"math"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// treeDegree keeps nodes small: a change copies one node per level.
const treeDegree = 16

// historyLimits bound what is kept for watches that resume.
type historyLimits struct {
	events int           // of a kind
	bytes  int64         // of memory, of all kinds together
	age    time.Duration // what is older goes, so that memory follows what is going on
}

// historySweep is how often at most history is looked through for what is too old.
const historySweep = 15 * time.Second

// kindCache is the objects of one kind, their recent history and their watchers.
type kindCache struct {
	cache  *cache
	kind   *api.Kind
	prefix string // of the kind's keys in the store
	codec  kindCodec

	snap atomic.Pointer[snapshot]

	// What follows belongs to cache.run: the state being built.
	contents
	pending []event
	touched raftstore.Revision // the newest change that publish has not shown; 0 = none

	mu      sync.RWMutex
	history history
	// epoch counts reloads: a watcher of an older epoch has lost its history.
	epoch  uint64
	parked map[*Watcher]struct{} // watchers that have seen everything and sleep
	// recent finds the entry of an object that is part of history.
	recent map[api.Object]*entry
}

// contents is what the store holds of a kind: the objects, and what cannot be read.
type contents struct {
	tree       *btree.Map[string, *entry]
	unreadable unreadables
}

func newContents() *contents {
	return &contents{tree: btree.NewMap[string, *entry](treeDegree)}
}

func newKindCache(c *cache, k *api.Kind, prefix string) *kindCache {
	kc := &kindCache{
		cache: c, kind: k, prefix: prefix, codec: newKindCodec(k),
		contents: *newContents(),
		parked:   make(map[*Watcher]struct{}),
		recent:   make(map[api.Object]*entry),
	}
	kc.snap.Store(&snapshot{objects: kc.tree.Copy()})
	return kc
}

// get returns the newest version of an object; nil when there is none.
func (kc *kindCache) get(key string) *entry {
	e, _ := kc.snap.Load().objects.Get(key)
	return e
}

// find returns an object, or what stands in its place and cannot be read; both nil when there is neither.
func (kc *kindCache) find(key string) (*entry, *Unreadable) {
	s := kc.snap.Load()
	if e, ok := s.objects.Get(key); ok {
		return e, nil
	}
	return nil, s.unreadable.get(key)
}

// state returns a snapshot and the revision that it is exact at.
func (kc *kindCache) state() (*snapshot, raftstore.Revision) {
	// In this order: everything up to the progress is in any snapshot loaded after it.
	rev := kc.cache.progress.at()
	s := kc.snap.Load()
	return s, max(rev, s.changed)
}

// reset replaces everything by a state loaded from the store.
func (kc *kindCache) reset(found *contents, rev raftstore.Revision) {
	kc.mu.Lock()
	defer kc.mu.Unlock()
	kc.contents, kc.pending, kc.touched = *found, nil, 0
	kc.snap.Store(&snapshot{objects: kc.tree.Copy(), unreadable: kc.unreadable, changed: rev})
	kc.cache.kept -= kc.history.bytes
	kc.history = history{floor: rev}
	clear(kc.recent)
	kc.epoch++
	for w := range kc.parked {
		delete(kc.parked, w)
		w.wakeUp()
	}
}

// remove takes an object out of what is shown, if it is there.
func (kc *kindCache) remove(key string, rev raftstore.Revision) {
	if prev, ok := kc.tree.Delete(key); ok {
		gone := &entry{key: key, obj: at(kc.kind, prev.obj, rev), rev: rev, value: prev.value}
		kc.pending = append(kc.pending, event{rev: rev, cur: gone, prev: prev, deleted: true})
	}
}

// publish shows the state of touched and the pending events, of which there may be
// none, to readers and watchers. It never waits for a watcher.
func (kc *kindCache) publish() {
	events := kc.pending
	s := &snapshot{objects: kc.tree.Copy(), unreadable: kc.unreadable, changed: kc.touched}
	kc.pending, kc.touched = nil, 0
	kc.mu.Lock()
	defer kc.mu.Unlock()
	now, before := kc.cache.now(), kc.history.bytes
	for i := range events {
		events[i].at = now
		kc.history.add(&events[i])
		kc.recent[events[i].cur.obj] = events[i].cur
	}
	kc.trim(func(h *history) bool { return len(h.events) > kc.cache.limits.events })
	kc.cache.kept += kc.history.bytes - before
	kc.snap.Store(s)
	for w := range kc.parked {
		if !w.concernedBy(events) {
			w.next = kc.history.end()
			continue
		}
		delete(kc.parked, w)
		w.wakeUp()
	}
}

// trim drops the oldest events for as long as they are too many. kc.mu is held.
func (kc *kindCache) trim(tooMany func(*history) bool) {
	for len(kc.history.events) > 0 && tooMany(&kc.history) {
		delete(kc.recent, kc.history.drop().cur.obj)
	}
	if len(kc.history.events) == 0 {
		// A map keeps the room of the most that was ever in it.
		kc.history.events, kc.recent = nil, make(map[api.Object]*entry)
	}
}

// forgetTo drops the oldest events until no more than so many bytes of them stay,
// and those from before a time.
func (kc *kindCache) forgetTo(bytes int64, before time.Time) {
	kc.mu.Lock()
	defer kc.mu.Unlock()
	was := kc.history.bytes
	kc.trim(func(h *history) bool { return h.bytes > bytes || h.events[0].at.Before(before) })
	kc.cache.kept += kc.history.bytes - was
}

// keepHistory brings the history of all kinds within its bound: whichever has the
// most of it gives way. Called by run.
func (c *cache) keepHistory() {
	for c.kept > c.limits.bytes {
		var largest *kindCache
		for _, kc := range c.byKind {
			if largest == nil || kc.history.bytes > largest.history.bytes {
				largest = kc
			}
		}
		// A little more than need be, so that it is not due at the next event.
		largest.forgetTo(largest.history.bytes-(c.kept-c.limits.bytes)-c.limits.bytes/16, time.Time{})
	}
}

// sweep drops what is too old. Called by run.
func (c *cache) sweep() {
	before := c.now().Add(-c.limits.age)
	for _, kc := range c.byKind {
		kc.forgetTo(math.MaxInt64, before)
	}
}

// history is the newest events of a kind, numbered without gaps: a watcher is a
// number. Everything after revision floor is in it.
type history struct {
	events []*event // a queue: the first live one is events[0]
	first  uint64   // number of events[0]
	floor  raftstore.Revision
	bytes  int64 // about what it takes
}

// end is the number that the next event will get.
func (h *history) end() uint64 { return h.first + uint64(len(h.events)) }

func (h *history) add(e *event) {
	h.events = append(h.events, e)
	h.bytes += e.size()
}

// drop removes the oldest event.
func (h *history) drop() *event {
	e := h.events[0]
	h.bytes -= e.size()
	h.floor = e.rev
	h.events[0] = nil
	h.events = h.events[1:]
	h.first++
	return e
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
