package watchcache

import (
	"sync"
	"sync/atomic"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

// treeDegree is the degree of the B-trees. It is small, because a change copies one node per level.
const treeDegree = 16

// storageCache holds the cached objects of one storage (the place of one or more kinds in the
// store), with their history and watchers.
type storageCache struct {
	cache *Cache
	spec  *api.Storage
	codec storedform.Codec
	// defaultKind is the kind that represents the storage where no request specifies a kind.
	defaultKind atomic.Pointer[api.Kind]

	loaded chan struct{} // closed when the objects of the storage are loaded
	ended  chan struct{} // closed when no kind uses the storage

	snap atomic.Pointer[snapshot]
	next nextState // used by Cache.Run only

	mu      sync.RWMutex
	history history
	// epoch is the number of times that the storage was loaded. A watch that started in an earlier
	// epoch ends with an error (410).
	epoch    uint64
	watchers watcherSet
	// historyEntries maps the decoded objects of the history to their entries, to find their cached
	// encodings.
	historyEntries map[api.Object]*Entry

	counts storageCounts
}

// nextState is the newest state of a storage. It includes changes that are not visible to readers
// yet.
type nextState struct {
	contents
	pending             []*event           // changes that are not published yet
	occupied            bool               // api.Kinds was notified that the storage has objects
	unpublishedRevision raftstore.Revision // revision of the newest unpublished change; 0 = none
	loadRevision        raftstore.Revision // revision at which the storage was loaded; changes up to it are ignored
	queuedChanges       []raftstore.Event  // changes that were received during the load
}

// watcherSet contains the watchers of a storage. The storage's lock guards it.
type watcherSet struct {
	waiting map[watchGroup]map[*Watcher]struct{} // watchers that have read all events
	awake   map[*Watcher]struct{}                // watchers with unread events that the history still has
}

// contents contains the readable objects and the unreadable values of a storage.
type contents struct {
	objects
	unreadable unreadables
}

func newContents(s *api.Storage) *contents { return &contents{objects: newObjects(s)} }

func newStorageCache(c *Cache, s *api.Storage) *storageCache {
	sc := &storageCache{
		cache: c, spec: s, codec: storedform.NewCodec(s), loaded: make(chan struct{}), ended: make(chan struct{}),
		next: nextState{contents: *newContents(s)},
		watchers: watcherSet{
			waiting: make(map[watchGroup]map[*Watcher]struct{}), awake: make(map[*Watcher]struct{}),
		},
		historyEntries: make(map[api.Object]*Entry),
	}
	sc.snap.Store(&snapshot{objects: sc.next.copyTrees()})
	return sc
}

// currentEntry returns the current entry of the object with the key, or nil if the object does not
// exist or is unreadable.
func (sc *storageCache) currentEntry(key string) *Entry {
	e, _ := sc.snap.Load().byKey.Get(key)
	return e
}

// lookupKey returns the current entry of the object with the key, or its stored value if that is
// unreadable. It returns nil for both if the object does not exist.
func (sc *storageCache) lookupKey(key string) (*Entry, *Unreadable) {
	s := sc.snap.Load()
	if e, ok := s.byKey.Get(key); ok {
		return e, nil
	}
	return nil, s.unreadable.byShortKey(key)
}

// latestSnapshot returns the newest snapshot of the storage, and a revision at which the storage
// has this state.
func (sc *storageCache) latestSnapshot() (*snapshot, raftstore.Revision) {
	// Keep this order: a snapshot loaded later includes every change up to the revision.
	rev := sc.cache.progress.currentRevision()
	s := sc.snap.Load()
	return s, max(rev, s.changed)
}

// markOccupied notifies api.Kinds that the storage has its first object, before readers can see
// that object.
func (sc *storageCache) markOccupied() {
	if !sc.next.occupied && sc.next.byKey.Len() > 0 {
		sc.next.occupied = true
		sc.cache.kinds.MarkOccupied(sc.spec)
	}
}

// resetContents replaces the content of the storage with the content that was loaded from the store
// at rev. It discards the history, so all running watches end with an error (410).
func (sc *storageCache) resetContents(loaded *contents, rev raftstore.Revision) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.next = nextState{contents: *loaded, loadRevision: rev, occupied: sc.next.occupied}
	sc.markOccupied()
	sc.snap.Store(&snapshot{objects: sc.next.copyTrees(), unreadable: sc.next.unreadable, changed: rev})
	sc.accountFor(func() { sc.history = history{completeAfter: rev} })
	clear(sc.historyEntries)
	sc.epoch++
	for w := range sc.watchers.awake {
		delete(sc.watchers.awake, w)
		w.markExpired()
	}
	for _, sleeping := range sc.watchers.waiting {
		for w := range sleeping {
			sc.markAwake(w, 0) // the watcher detects the new epoch and ends
			w.wakeUp()
		}
	}
}

// markLoaded wakes the readers that wait until the storage is loaded.
func (sc *storageCache) markLoaded() {
	if !isClosed(sc.loaded) {
		close(sc.loaded)
	}
}

// releaseHistory closes sc.ended and subtracts the history from the accounted memory, because no
// kind uses the storage any more. Running readers keep their data.
func (sc *storageCache) releaseHistory() {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.cache.history.bytes.Add(-sc.history.bytes)
	sc.cache.history.decoded.Add(-sc.history.decoded)
	sc.next.pending, sc.next.queuedChanges = nil, nil
	close(sc.ended)
	if len(sc.watchers.awake) > 0 {
		sc.cache.history.ending = append(sc.cache.history.ending, sc)
	}
}

// expireWatchers ends the watches with unread events of a storage that no kind uses any more, with
// an error (410). It is called at least one sweep interval after the last kind was dropped.
func (sc *storageCache) expireWatchers() {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	for w := range sc.watchers.awake {
		delete(sc.watchers.awake, w)
		w.markExpired()
	}
}

// removeObject removes an object, if it exists, and queues the event of its deletion at rev.
func (sc *storageCache) removeObject(key string, rev raftstore.Revision) {
	if prev := sc.next.removeEntry(key); prev != nil {
		sc.next.pending = append(sc.next.pending, sc.newEvent(prev.atRevision(rev), prev, true))
	}
}

// publishChanges makes the changes that were applied since its last call (sc.next) visible to
// readers and watchers. It never waits for a watcher.
func (sc *storageCache) publishChanges() {
	sc.markOccupied()
	events := sc.next.pending
	s := &snapshot{objects: sc.next.copyTrees(), unreadable: sc.next.unreadable, changed: sc.next.unpublishedRevision}
	sc.next.pending, sc.next.unpublishedRevision = nil, 0
	sc.mu.Lock()
	defer sc.mu.Unlock()
	now, next := sc.cache.options.Now(), sc.history.nextNumber()
	sc.accountFor(func() {
		for _, ev := range events {
			ev.at = now
			sc.history.addEvent(ev)
			e := ev.cur.entry.Load()
			sc.historyEntries[e.Object] = e
		}
		if limit := sc.cache.history.limits.events; limit > 0 {
			sc.dropWhile(func(h *history) bool { return len(h.events) > limit })
		}
	})
	sc.snap.Store(s)
	sc.wakeWatchers(events, next)
}

// expireSlowWatchers ends the watches that have not read events which the history has dropped, with
// an error (410). The caller holds sc.mu.
func (sc *storageCache) expireSlowWatchers() {
	for w := range sc.watchers.awake {
		if w.cursor.next < sc.history.first {
			delete(sc.watchers.awake, w)
			w.markExpired()
		}
	}
}
