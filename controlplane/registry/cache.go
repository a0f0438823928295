package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

const (
	// maxBatch is the maximum number of queued revisions that are applied together.
	maxBatch = 256
	// replayRevisions is how many past revisions a starting cache replays, if the store still has
	// them.
	replayRevisions = 4096
)

// cache is the decoded content of the store on this replica. Only run writes it.
type cache struct {
	store  raftstore.Store
	log    *slog.Logger
	kinds  *api.Kinds
	routes atomic.Pointer[routes] // only run changes it
	limits historyLimits
	first  atomic.Pointer[first]

	progress  progress
	loaded    bool          // the cache has been loaded; used by run only
	ready     chan struct{} // closed when the cache has the store's state at the start of run
	done      chan struct{} // closed when run has returned
	encodings encodings
	wholes    encodings // full objects of entries that are cached in the light form
	shared    *fieldShare
	now       func() time.Time
	kept      atomic.Int64 // bytes of the history of all storages
	live      atomic.Int64 // the part of kept that is decoded objects

	ending  []*storageCache // storages that ended since the last sweep, with watches that have unread events
	late    []*storageCache // storages that ended before the last sweep
	loading sync.WaitGroup  // goroutines that load new storages
	begun   chan begun      // results of these goroutines for run

	// reserved maps "space/value" to the key of the holding object. reservations is the modifiable
	// copy that run uses.
	reserved     atomic.Pointer[btree.Map[string, string]]
	reservations *btree.Map[string, string]
}

func newCache(store raftstore.Store, kinds *api.Kinds) *cache {
	c := &cache{
		store:     store,
		kinds:     kinds,
		limits:    historyLimits{bytes: defaultHistory, age: 5 * time.Minute},
		now:       time.Now,
		shared:    newFieldShare(),
		encodings: encodings{most: maxEncodedBytes},
		wholes:    encodings{most: maxWholeBytes},
		ready:     make(chan struct{}),
		done:      make(chan struct{}),
		begun:     make(chan begun),
	}
	c.routes.Store(newRoutes(nil))
	c.adopt(context.Background(), kinds.Table())
	c.reservations = btree.NewMap[string, string](treeDegree)
	c.reserved.Store(c.reservations.Copy())
	return c
}

// waitFor waits until the cache has all revisions up to rev.
func (c *cache) waitFor(ctx context.Context, rev raftstore.Revision) error {
	select {
	case <-c.ready:
	case <-ctx.Done():
		return ctx.Err()
	}
	return c.progress.wait(ctx, rev)
}

// run follows the store until ctx ends or the store is closed.
func (c *cache) run(ctx context.Context) error {
	defer c.loading.Wait()
	defer close(c.done)
	told := ctx // check the original ctx: the store may return before the derived one is done
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pause := backoff.Backoff{Min: 10 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	for {
		before := c.progress.at()
		err := c.follow(ctx)
		if told.Err() != nil {
			return nil
		}
		if errors.Is(err, raftstore.ErrClosed) {
			return fmt.Errorf("following the store: %w", err)
		}
		if c.progress.at() > before {
			pause.Reset()
		}
		c.log.Warn("the watch cache lost its watch of the store and resumes", "revision", uint64(c.progress.at()), "error", err)
		if wait.Delay(ctx, pause.Next()) != nil {
			return nil
		}
	}
}

// follow loads the store if it cannot resume. Then it applies every revision and every change of
// the table of kinds, until the watch ends.
func (c *cache) follow(ctx context.Context) error {
	c.keepUp(ctx)
	w, err := c.resume(ctx)
	if err != nil {
		return err
	}
	defer w.Stop()
	// Become ready only at this revision: a restarted replica must not show an older state.
	target := c.store.Applied()
	c.readyAt(target)
	sweep := time.NewTicker(c.limits.every())
	defer sweep.Stop()
	changed := c.routes.Load().table.Changed()
	var due raftstore.Revision
	for {
		if changed == nil && c.progress.at() >= due {
			c.keepUp(ctx)
			changed = c.routes.Load().table.Changed()
		}
		select {
		case <-changed:
			// Watches of a dropped kind first get the writes that preceded the drop.
			changed, due = nil, c.store.Applied()
		case b := <-c.begun:
			c.join(b)
		case first, ok := <-w.C():
			if !ok {
				return w.Err()
			}
			c.apply(queued(first, w.C()))
			c.readyAt(target)
		case <-sweep.C:
			c.sweep()
		}
	}
}

// keepUp adopts the current table of kinds.
func (c *cache) keepUp(ctx context.Context) {
	if t := c.kinds.Table(); t != c.routes.Load().table {
		c.adopt(ctx, t)
	}
}

func (c *cache) readyAt(target raftstore.Revision) {
	if c.progress.at() >= target && !isClosed(c.ready) {
		close(c.ready)
	}
}

// resume watches the store from the cache's revision, or loads the cache first.
//
// It watches every key of the store, so that every revision arrives at once. A linearizable read
// waits for the cache to reach a revision.
func (c *cache) resume(ctx context.Context) (raftstore.Watcher, error) {
	if c.loaded && c.progress.at() > 0 { // a watch cannot resume from revision 0
		w, err := c.store.Watch(ctx, "", c.progress.at())
		if err == nil || !errors.Is(err, raftstore.ErrCompacted) {
			return w, watchError(err)
		}
	}
	// Load a recent past state and replay the later revisions. This restores the history, so that
	// watches from before a restart can resume.
	if now := c.store.Applied(); !c.loaded && now > 1 {
		if c.load(ctx, c.replayFrom(ctx, now)) == nil {
			if w, err := c.store.Watch(ctx, "", c.progress.at()); err == nil {
				return w, nil
			}
		}
	}
	// Start the watch before the list, so that no revision is missed.
	w, err := c.store.Watch(ctx, "", 0)
	if err != nil {
		return nil, watchError(err)
	}
	if err := c.load(ctx, 0); err != nil {
		w.Stop()
		return nil, err
	}
	return w, nil
}

// replayFrom returns the revision at which a starting cache loads: the oldest available one, at
// most replayRevisions back.
func (c *cache) replayFrom(ctx context.Context, now raftstore.Revision) raftstore.Revision {
	from := raftstore.Revision(1)
	if now > replayRevisions {
		from = now - replayRevisions
	}
	gone := func(at raftstore.Revision) bool {
		one := raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: true}, At: at, Limit: 1}
		_, err := c.store.List(ctx, root, one)
		return errors.Is(err, raftstore.ErrCompacted)
	}
	if !gone(from) {
		return from
	}
	for to := now; ; { // invariant: from is compacted, to is not
		if from+1 >= to {
			return to
		}
		if middle := from + (to-from)/2; gone(middle) {
			from = middle
		} else {
			to = middle
		}
	}
}

func watchError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("watching the store: %w", err)
}

// queued returns first and the revisions queued after it, at most maxBatch.
func queued(first raftstore.Events, more <-chan raftstore.Events) []raftstore.Events {
	batch := []raftstore.Events{first}
	for len(batch) < maxBatch {
		select {
		case e, ok := <-more:
			if !ok {
				return batch
			}
			batch = append(batch, e)
		default:
			return batch
		}
	}
	return batch
}

// load replaces the cache by the store's state at a revision; 0 means the current one. Running
// watchers lose their history and get an error, so that their clients list again.
func (c *cache) load(ctx context.Context, at raftstore.Revision) error {
	list, err := c.store.List(ctx, root, raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: true}, At: at})
	if err != nil {
		return fmt.Errorf("listing the store: %w", err)
	}
	trees := c.loadFirst(ctx, list.Items)
	rt := c.routes.Load()
	for _, sc := range rt.byStorage {
		if trees[sc] == nil {
			trees[sc] = newContents(sc.storage)
		}
	}
	reservations := btree.NewMap[string, string](treeDegree)
	for _, it := range list.Items {
		if res, ok := strings.CutPrefix(it.Key, reservationsRoot); ok {
			reservations.Set(res, string(it.Value))
			continue
		}
		sc, key := c.route(it.Key)
		if sc == nil || c.isFirst(sc) {
			continue
		}
		c.sort(trees[sc], sc, key, it)
	}
	c.reservations = reservations
	c.reserved.Store(reservations.Copy())
	for sc, found := range trees {
		sc.reset(found, list.Revision)
		sc.open()
	}
	c.progress.advance(list.Revision)
	c.loaded = true
	return nil
}

// first is the kind that defines other kinds (CustomResourceDefinition).
type first struct {
	kind *api.Kind
	tell func(all []api.Object)
}

// LoadFirst makes each load of the cache call tell with all objects of a kind, before the other
// kinds are loaded. The kinds that tell registers are then loaded with all others, including their
// history. It must be called before Run.
func (r *Registry) LoadFirst(kind *api.Kind, tell func(all []api.Object)) {
	r.cache.first.Store(&first{kind, tell})
}

// isFirst reports whether a storage contains the kind of LoadFirst.
func (c *cache) isFirst(sc *storageCache) bool {
	f := c.first.Load()
	return f != nil && f.kind.Storage == sc.storage
}

// loadFirst decodes the objects of the kind of LoadFirst, calls its function and adopts the new
// kinds.
func (c *cache) loadFirst(ctx context.Context, items []raftstore.Item) map[*storageCache]*contents {
	trees := map[*storageCache]*contents{}
	f := c.first.Load()
	if f == nil {
		return trees
	}
	sc := c.routes.Load().byStorage[f.kind.Storage]
	if sc == nil {
		return trees
	}
	found := newContents(sc.storage)
	for _, it := range items {
		if key, ok := strings.CutPrefix(it.Key, f.kind.Storage.Prefix); ok {
			c.sort(found, sc, key, it)
		}
	}
	trees[sc] = found
	var all []api.Object
	found.byKey.Scan(func(_ string, e *entry) bool {
		all = append(all, e.obj)
		return true
	})
	f.tell(all)
	c.keepUp(ctx)
	return trees
}

// sort decodes a stored item and adds it to the readable or the unreadable objects of its storage.
func (c *cache) sort(into *contents, sc *storageCache, key string, it raftstore.Item) {
	if e, err := c.decode(sc, key, it, nil); err != nil {
		into.unreadable = into.unreadable.with(c.unreadable(sc, key, it, err))
	} else {
		into.set(e)
	}
}

// route returns the storage of a key and the rest of the key; nil if the key belongs to no object.
func (c *cache) route(key string) (*storageCache, string) {
	if !strings.HasPrefix(key, root) {
		return nil, ""
	}
	byPrefix := c.routes.Load().byPrefix
	end := len(root)
	for range 2 { // /registry/{resource}/ or /registry/{group}/{resource}/
		i := strings.IndexByte(key[end:], '/')
		if i < 0 {
			return nil, ""
		}
		end += i + 1
		if sc := byPrefix[key[:end]]; sc != nil {
			return sc, key[end:]
		}
	}
	return nil, ""
}

// apply applies revisions to the cache, in order.
func (c *cache) apply(batch []raftstore.Events) {
	var touched []*storageCache
	reserved := false
	for _, r := range batch {
		if r.Revision <= c.progress.at() {
			continue
		}
		for i := range r.Events {
			ev := &r.Events[i]
			if res, ok := strings.CutPrefix(ev.Item.Key, reservationsRoot); ok {
				c.reserve(ev, res)
				reserved = true
				continue
			}
			sc, key := c.route(ev.Item.Key)
			if sc == nil || r.Revision <= sc.from {
				continue
			}
			if !isClosed(sc.begun) {
				sc.early = append(sc.early, *ev)
				continue
			}
			c.applyObject(sc, key, ev)
			if sc.touched == 0 {
				touched = append(touched, sc)
			}
			sc.touched = r.Revision
		}
	}
	if reserved {
		c.reserved.Store(c.reservations.Copy())
	}
	for _, sc := range touched {
		sc.publish()
	}
	c.keepHistory()
	c.progress.advance(batch[len(batch)-1].Revision)
}

func (c *cache) reserve(ev *raftstore.Event, res string) {
	if ev.Kind == raftstore.EventDelete {
		c.reservations.Delete(res)
	} else {
		c.reservations.Set(res, string(ev.Item.Value))
	}
}

// applyObject applies the change of one object. An object that becomes unreadable is removed from
// lists and watches alike, and added again when it becomes readable.
func (c *cache) applyObject(sc *storageCache, key string, ev *raftstore.Event) {
	sc.unreadable = sc.unreadable.without(key)
	if ev.Kind == raftstore.EventDelete {
		sc.remove(key, ev.Item.Modified)
		return
	}
	before, _ := sc.byKey.Get(key)
	e, err := c.decode(sc, key, ev.Item, before)
	if err != nil {
		sc.unreadable = sc.unreadable.with(c.unreadable(sc, key, ev.Item, err))
		sc.remove(key, ev.Item.Modified)
		return
	}
	prev := sc.set(e)
	sc.pending = append(sc.pending, sc.event(e, prev, false))
}

// decode returns the entry of a stored item. before is an earlier entry of the object, or nil. The
// object of a local writer is not used instead: it may have nanoseconds or an empty map that the
// stored form does not have. Then this replica would differ from the others and from the stored
// form.
func (c *cache) decode(sc *storageCache, key string, it raftstore.Item, before *entry) (*entry, error) {
	obj, version, err := sc.codec.decodeNamed(key, it.Value)
	if err != nil {
		return nil, err
	}
	obj.SetResourceVersion(formatRevision(it.Modified))
	e := &entry{key: key, obj: obj, version: version, rev: it.Modified, value: it.Value}
	if unknown := c.shared.shareFields(obj); unknown != nil {
		e.unknown = &unknown
	}
	return e, c.lighten(sc, e, before)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
