package registry

import (
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// treeDegree keeps nodes small: a change copies one node per level.
const treeDegree = 16

// storageCache is the objects of one storage, their recent history and their watchers.
type storageCache struct {
	cache   *cache
	storage *api.Storage
	codec   codec
	face    atomic.Pointer[api.Kind] // the kind that speaks for the storage where no request names one

	begun chan struct{} // closed when there is something to read
	ended chan struct{} // closed when no kind is served from it any more

	snap atomic.Pointer[snapshot]

	// What follows belongs to cache.run: the state being built.
	contents
	pending  []*event
	occupied bool               // the kinds have been told that there are objects
	touched  raftstore.Revision // the newest change that publish has not shown; 0 = none
	from     raftstore.Revision // changes up to here are in what was loaded
	early    []raftstore.Event  // changes that came while it was being loaded

	mu      sync.RWMutex
	history history
	// epoch counts reloads: a watcher of an older epoch has lost its history.
	epoch  uint64
	parked map[crowd]map[*Watcher]struct{} // watchers that have seen everything and sleep
	awake  map[*Watcher]struct{}           // those that have something to read, and have not lost it
	// recent finds the entry of an object that is part of history.
	recent map[api.Object]*entry
}

// contents is what the store holds of a storage: the objects, and what cannot be read.
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

// get returns the newest version of an object; nil when none exists.
func (sc *storageCache) get(key string) *entry {
	e, _ := sc.snap.Load().byKey.Get(key)
	return e
}

// find returns an object, or what stands in its place and cannot be read; both nil when there is neither.
func (sc *storageCache) find(key string) (*entry, *Unreadable) {
	s := sc.snap.Load()
	if e, ok := s.byKey.Get(key); ok {
		return e, nil
	}
	return nil, s.unreadable.get(key)
}

// state returns a snapshot and the revision that it is exact at.
func (sc *storageCache) state() (*snapshot, raftstore.Revision) {
	// In this order: everything up to the progress is in any snapshot loaded after it.
	rev := sc.cache.progress.at()
	s := sc.snap.Load()
	return s, max(rev, s.changed)
}

// occupy tells the kinds of the first object, before it is shown.
func (sc *storageCache) occupy() {
	if !sc.occupied && sc.byKey.Len() > 0 {
		sc.occupied = true
		sc.cache.kinds.Occupy(sc.storage)
	}
}

// reset replaces everything by a state loaded from the store.
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
			sc.rouse(w, 0) // its epoch is over
			w.wakeUp()
		}
	}
}

// open lets readers in who wait for the storage to be loaded.
func (sc *storageCache) open() {
	if !isClosed(sc.begun) {
		close(sc.begun)
	}
}

// end gives up what run accounts for. Who still reads keeps what it holds.
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

// lose gives up the watches of a storage that has ended, which have had the time of a sweep to read to the end.
func (sc *storageCache) lose() {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	for w := range sc.awake {
		delete(sc.awake, w)
		w.lose()
	}
}

// remove takes an object out of what is shown, if it is there.
func (sc *storageCache) remove(key string, rev raftstore.Revision) {
	if prev := sc.objects.remove(key); prev != nil {
		sc.pending = append(sc.pending, sc.event(prev.at(rev), prev, true))
	}
}

// publish shows the state of touched and the pending events, of which there may be
// none, to readers and watchers. It never waits for a watcher.
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

// leaveBehind tells the watchers that were too slow for what has been dropped. sc.mu is held.
func (sc *storageCache) leaveBehind() {
	for w := range sc.awake {
		if w.next < sc.history.first {
			delete(sc.awake, w)
			w.lose()
		}
	}
}
