package registry

import (
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// treeDegree is small, because a change copies one node per level.
const treeDegree = 16

// storageCache is the cached objects of one storage, with their history and watchers.
type storageCache struct {
	cache   *cache
	storage *api.Storage
	codec   codec
	face    atomic.Pointer[api.Kind] // the kind to use for the storage if no request names one

	begun chan struct{} // closed when the storage is loaded
	ended chan struct{} // closed when no kind uses the storage any more

	snap atomic.Pointer[snapshot]

	// The following fields are used by cache.run only: the state being built.
	contents
	pending  []*event
	occupied bool               // api.Kinds was notified that objects exist
	touched  raftstore.Revision // newest change not published yet; 0 = none
	from     raftstore.Revision // revision of the load: earlier changes are included
	early    []raftstore.Event  // changes queued during the load

	mu      sync.RWMutex
	history history
	// epoch counts loads: a watcher of an older epoch has lost its history.
	epoch  uint64
	parked map[crowd]map[*Watcher]struct{} // watchers that have read all events
	awake  map[*Watcher]struct{}           // watchers with unread events that are not lost
	// recent maps the objects of the history to their entries.
	recent map[api.Object]*entry
}

// contents is a storage's objects and unreadable values.
type contents struct {
	objects
	unreadable unreadables
}

func newContents(s *api.Storage) *contents { return &contents{objects: newObjects(s)} }

func newStorageCache(c *cache, s *api.Storage) *storageCache {
	sc := &storageCache{
		cache: c, storage: s, codec: newCodec(s), begun: make(chan struct{}), ended: make(chan struct{}),
		contents: *newContents(s),
		parked:   make(map[crowd]map[*Watcher]struct{}),
		awake:    make(map[*Watcher]struct{}),
		recent:   make(map[api.Object]*entry),
	}
	sc.snap.Store(&snapshot{objects: sc.objects.copy()})
	return sc
}

// get returns the current entry of an object; nil if it does not exist.
func (sc *storageCache) get(key string) *entry {
	e, _ := sc.snap.Load().byKey.Get(key)
	return e
}

// find returns the current entry or the unreadable value of a key; both nil if there is neither.
func (sc *storageCache) find(key string) (*entry, *Unreadable) {
	s := sc.snap.Load()
	if e, ok := s.byKey.Get(key); ok {
		return e, nil
	}
	return nil, s.unreadable.get(key)
}

// state returns a snapshot and the revision of its state.
func (sc *storageCache) state() (*snapshot, raftstore.Revision) {
	// Keep this order: a snapshot loaded later includes everything up to the progress.
	rev := sc.cache.progress.at()
	s := sc.snap.Load()
	return s, max(rev, s.changed)
}

// occupy notifies api.Kinds of the storage's first object, before the object is visible.
func (sc *storageCache) occupy() {
	if !sc.occupied && sc.byKey.Len() > 0 {
		sc.occupied = true
		sc.cache.kinds.Occupy(sc.storage)
	}
}

// reset replaces the state by one that was loaded from the store. All watchers lose their history.
func (sc *storageCache) reset(found *contents, rev raftstore.Revision) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.contents, sc.pending, sc.touched, sc.from, sc.early = *found, nil, 0, rev, nil
	sc.occupy()
	sc.snap.Store(&snapshot{objects: sc.objects.copy(), unreadable: sc.unreadable, changed: rev})
	sc.account(func() { sc.history = history{floor: rev} })
	clear(sc.recent)
	sc.epoch++
	for w := range sc.awake {
		delete(sc.awake, w)
		w.lose()
	}
	for _, sleeping := range sc.parked {
		for w := range sleeping {
			sc.rouse(w, 0) // its epoch has ended
			w.wakeUp()
		}
	}
}

// open lets the readers continue that wait for the storage to be loaded.
func (sc *storageCache) open() {
	if !isClosed(sc.begun) {
		close(sc.begun)
	}
}

// end releases the accounted memory of a storage without kinds. Running readers keep their data.
func (sc *storageCache) end() {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.cache.kept.Add(-sc.history.bytes)
	sc.cache.live.Add(-sc.history.live)
	sc.pending, sc.early = nil, nil
	close(sc.ended)
	if len(sc.awake) > 0 {
		sc.cache.ending = append(sc.cache.ending, sc)
	}
}

// lose ends the watches of an ended storage that still have unread events after one sweep interval.
func (sc *storageCache) lose() {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	for w := range sc.awake {
		delete(sc.awake, w)
		w.lose()
	}
}

// remove removes an object, if it exists, and queues the event.
func (sc *storageCache) remove(key string, rev raftstore.Revision) {
	if prev := sc.objects.remove(key); prev != nil {
		sc.pending = append(sc.pending, sc.event(prev.at(rev), prev, true))
	}
}

// publish makes the state at revision touched and the pending events, if any, visible to readers
// and watchers. It never waits for a watcher.
func (sc *storageCache) publish() {
	sc.occupy()
	events := sc.pending
	s := &snapshot{objects: sc.objects.copy(), unreadable: sc.unreadable, changed: sc.touched}
	sc.pending, sc.touched = nil, 0
	sc.mu.Lock()
	defer sc.mu.Unlock()
	now, next := sc.cache.now(), sc.history.end()
	sc.account(func() {
		for _, ev := range events {
			ev.at = now
			sc.history.add(ev)
			e := ev.cur.live.Load()
			sc.recent[e.obj] = e
		}
		if most := sc.cache.limits.events; most > 0 {
			sc.trim(func(h *history) bool { return len(h.events) > most })
		}
	})
	sc.snap.Store(s)
	sc.alert(events, next)
}

// leaveBehind ends the watchers that have not read the dropped events. sc.mu is held.
func (sc *storageCache) leaveBehind() {
	for w := range sc.awake {
		if w.next < sc.history.first {
			delete(sc.awake, w)
			w.lose()
		}
	}
}
