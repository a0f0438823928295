package registry

import (
	"sort"
	"sync"
	"sync/atomic"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// treeDegree keeps nodes small: a change copies one node per level.
const treeDegree = 16

// historyLimits bound what a kind keeps for watches that resume.
type historyLimits struct {
	events int
	bytes  int64
}

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
	for i := range events {
		kc.history.add(&events[i])
		kc.recent[events[i].cur.obj] = events[i].cur
	}
	kc.history.trim(kc.cache.limits, func(e *event) { delete(kc.recent, e.cur.obj) })
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

// history is the newest events of a kind, numbered without gaps: a watcher is a
// number. Everything after revision floor is in it.
type history struct {
	events []*event // a queue: the first live one is events[0]
	first  uint64   // number of events[0]
	floor  raftstore.Revision
	bytes  int64
}

// end is the number that the next event will get.
func (h *history) end() uint64 { return h.first + uint64(len(h.events)) }

func (h *history) add(e *event) {
	h.events = append(h.events, e)
	h.bytes += e.size()
}

// trim drops the oldest events beyond the limits.
func (h *history) trim(l historyLimits, drop func(*event)) {
	n := 0
	for n < len(h.events) && (len(h.events)-n > l.events || h.bytes > l.bytes) {
		e := h.events[n]
		h.bytes -= e.size()
		h.floor = e.rev
		drop(e)
		h.events[n] = nil
		n++
	}
	h.events = h.events[n:]
	h.first += uint64(n)
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
