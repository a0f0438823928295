package watchcache

import (
	"cmp"
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
	"keelson.dev/keelson/controlplane/registry/fieldowners"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

const (
	// maxBatch is the maximum number of queued store revisions that are applied and published
	// together.
	maxBatch = 256
	// replayRevisions is the maximum number of past revisions that a starting cache replays to
	// restore its history, if the store still has them.
	replayRevisions = 4096
)

// Options are the settings of a Cache.
type Options struct {
	Log *slog.Logger // nil: slog.Default
	// Now is the clock of the watch history, for the age of changes; nil: time.Now.
	Now func() time.Time
	// CallTimeout limits the duration of a read, or of a wait for the store, if its context has no
	// deadline; 0: 30 seconds.
	CallTimeout time.Duration
	// HistoryEvents is the maximum number of changes in the history of each storage; 0: limited by
	// memory only. HistoryBytes is the maximum memory of the changes of all storages, in bytes; 0:
	// 64 MiB. HistoryAge is the maximum age of changes; 0: 5 minutes, as in the store.
	HistoryEvents int
	HistoryBytes  int64
	HistoryAge    time.Duration
	// SweepInterval is the maximum interval between removals of changes that are too old; 0: 15
	// seconds. The interval is shorter if HistoryAge is short.
	SweepInterval time.Duration
}

func (o Options) withDefaults() Options {
	if o.Log == nil {
		o.Log = slog.Default()
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	o.CallTimeout = cmp.Or(o.CallTimeout, 30*time.Second)
	o.HistoryBytes = cmp.Or(o.HistoryBytes, DefaultHistoryBytes)
	o.HistoryAge = cmp.Or(o.HistoryAge, 5*time.Minute)
	return o
}

// Cache holds the decoded objects of the store on this replica, with their watch history. Only Run
// modifies the objects. All methods but Run and LoadFirst are safe for concurrent use.
type Cache struct {
	store   raftstore.Store
	kinds   *api.Kinds
	options Options
	routes  atomic.Pointer[routes] // only Run changes it
	// definitions is the kind that is loaded before all others (see LoadFirst); nil = no such kind.
	definitions atomic.Pointer[definitions]

	progress progress
	ready    chan struct{} // closed when the cache has the state that the store had at the start of Run
	done     chan struct{} // closed when Run has returned
	loading  loading

	history         historyBudget
	encodings       encodings
	completeObjects encodings // complete objects of entries that hold only the light form (see light.go)
	fieldSets       *fieldowners.SetShare
	reserved        reservationIndex
	requests        *storeRequests
}

// loading is the progress of loading objects from the store.
type loading struct {
	loaded   bool            // the cache has been loaded; used by Run only
	storages sync.WaitGroup  // goroutines that load new storages
	results  chan loadResult // results of these goroutines for Run
}

// New returns an empty Cache for the given store and kinds. It starts no goroutine. Run loads the
// objects.
func New(store raftstore.Store, kinds *api.Kinds, options Options) *Cache {
	options = options.withDefaults()
	c := &Cache{
		store:   store,
		kinds:   kinds,
		options: options,
		history: historyBudget{limits: historyLimits{events: options.HistoryEvents, bytes: options.HistoryBytes,
			age: options.HistoryAge, sweep: options.SweepInterval}},
		fieldSets:       fieldowners.NewSetShare(),
		requests:        newStoreRequests(),
		encodings:       encodings{maxBytes: maxEncodedBytes},
		completeObjects: encodings{maxBytes: maxCompleteBytes},
		ready:           make(chan struct{}),
		done:            make(chan struct{}),
		loading:         loading{results: make(chan loadResult)},
	}
	c.routes.Store(newRoutes(nil))
	c.adoptKinds(context.Background(), kinds.Table())
	c.reserved.replaceAll(btree.NewMap[string, string](treeDegree))
	return c
}

// Ready returns a channel that is closed when the cache has loaded the content of the store.
func (c *Cache) Ready() <-chan struct{} { return c.ready }

// Revision returns the store revision up to which the cache has applied all changes.
func (c *Cache) Revision() raftstore.Revision { return c.progress.currentRevision() }

// Refresh waits until the cache includes every write that any replica acknowledged before the call.
// It returns the revision that the store confirmed.
func (c *Cache) Refresh(ctx context.Context) (raftstore.Revision, error) {
	rev, err := c.store.Sync(ctx)
	if err != nil {
		return 0, err
	}
	return rev, c.WaitFor(ctx, rev)
}

// WithTimeout returns ctx with the timeout Options.CallTimeout. If ctx already has a deadline, it
// returns ctx unchanged.
func (c *Cache) WithTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, c.options.CallTimeout)
}

// WaitFor waits until the cache has applied all revisions up to rev. For 0, it waits until the
// cache is ready.
func (c *Cache) WaitFor(ctx context.Context, rev raftstore.Revision) error {
	select {
	case <-c.ready:
	case <-ctx.Done():
		return ctx.Err()
	}
	return c.progress.waitFor(ctx, rev)
}

// Run loads the cache and applies the changes of the store until ctx ends (nil) or the store is
// closed (an error).
func (c *Cache) Run(ctx context.Context) error {
	defer c.loading.storages.Wait()
	defer close(c.done)
	parent := ctx // check the parent: the store may return before the derived context is done
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pause := backoff.Backoff{Min: 10 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	for {
		before := c.progress.currentRevision()
		err := c.followStore(ctx)
		if parent.Err() != nil {
			return nil
		}
		if errors.Is(err, raftstore.ErrClosed) {
			return fmt.Errorf("following the store: %w", err)
		}
		if c.progress.currentRevision() > before {
			pause.Reset()
		}
		c.options.Log.Warn("the watch cache lost its watch of the store; resuming", "revision",
			uint64(c.progress.currentRevision()), "error", err)
		if wait.Delay(ctx, pause.Next()) != nil {
			return nil
		}
	}
}

// followStore starts a watch of the store and loads the cache, if the cache cannot continue from
// its revision. Then it applies every revision of the store and every change of the table of kinds,
// until the watch ends.
func (c *Cache) followStore(ctx context.Context) error {
	c.adoptTable(ctx)
	w, err := c.resumeWatch(ctx)
	if err != nil {
		return err
	}
	defer w.Stop()
	// Become ready only at this revision: a restarted replica must not show an older state.
	target := c.store.Applied()
	c.signalReady(target)
	sweep := time.NewTicker(c.history.limits.sweepInterval())
	defer sweep.Stop()
	changed := c.routes.Load().table.Changed()
	var due raftstore.Revision
	for {
		if changed == nil && c.progress.currentRevision() >= due {
			c.adoptTable(ctx)
			changed = c.routes.Load().table.Changed()
		}
		select {
		case <-changed:
			// Watches of a dropped kind first get the writes that preceded the drop.
			changed, due = nil, c.store.Applied()
		case result := <-c.loading.results:
			c.addLoaded(result)
		case events, ok := <-w.C():
			if !ok {
				return w.Err()
			}
			c.applyRevisions(drainQueued(events, w.C()))
			c.signalReady(target)
		case <-sweep.C:
			c.sweepHistory()
		}
	}
}

// adoptTable applies the current table of kinds (api.Kinds.Table) to the cache, if it has changed.
func (c *Cache) adoptTable(ctx context.Context) {
	if t := c.kinds.Table(); t != c.routes.Load().table {
		c.adoptKinds(ctx, t)
	}
}

// signalReady closes c.ready if the cache has reached the target revision.
func (c *Cache) signalReady(target raftstore.Revision) {
	if c.progress.currentRevision() >= target && !isClosed(c.ready) {
		close(c.ready)
	}
}

// resumeWatch starts a watch of the store at the cache's revision. If the store no longer has the
// changes after that revision, or the cache is not loaded, it loads the cache first.
//
// It watches every key of the store, so that every revision is received immediately: linearizable
// reads wait for the cache to reach a revision.
func (c *Cache) resumeWatch(ctx context.Context) (raftstore.Watcher, error) {
	if c.loading.loaded && c.progress.currentRevision() > 0 { // a watch cannot resume from revision 0
		w, err := c.store.Watch(ctx, "", c.progress.currentRevision())
		if err == nil || !errors.Is(err, raftstore.ErrCompacted) {
			return w, wrapWatchError(err)
		}
	}
	// Load an earlier state and replay the later revisions. This restores the history, so that
	// watches from before a restart can resume.
	if applied := c.store.Applied(); !c.loading.loaded && applied > 1 {
		if c.loadStore(ctx, c.replayFrom(ctx, applied)) == nil {
			if w, err := c.store.Watch(ctx, "", c.progress.currentRevision()); err == nil {
				return w, nil
			}
		}
	}
	// Start the watch before the list, so that no revision is missed.
	w, err := c.store.Watch(ctx, "", 0)
	if err != nil {
		return nil, wrapWatchError(err)
	}
	if err := c.loadStore(ctx, 0); err != nil {
		w.Stop()
		return nil, err
	}
	return w, nil
}

// replayFrom returns the revision from which a starting cache replays changes: the oldest revision
// that the store still has, but at most replayRevisions before applied.
func (c *Cache) replayFrom(ctx context.Context, applied raftstore.Revision) raftstore.Revision {
	from := raftstore.Revision(1)
	if applied > replayRevisions {
		from = applied - replayRevisions
	}
	isCompacted := func(at raftstore.Revision) bool {
		options := raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: true}, At: at, Limit: 1}
		_, err := c.store.List(ctx, storedform.Root, options)
		return errors.Is(err, raftstore.ErrCompacted)
	}
	if !isCompacted(from) {
		return from
	}
	for to := applied; ; { // invariant: from is compacted, to is not
		if from+1 >= to {
			return to
		}
		if middle := from + (to-from)/2; isCompacted(middle) {
			from = middle
		} else {
			to = middle
		}
	}
}

func wrapWatchError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("watching the store: %w", err)
}

// drainQueued returns first and the events of the revisions that are already in the queue, at most
// maxBatch revisions.
func drainQueued(first raftstore.Events, queue <-chan raftstore.Events) []raftstore.Events {
	batch := []raftstore.Events{first}
	for len(batch) < maxBatch {
		select {
		case e, ok := <-queue:
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

// loadStore replaces the cache's content with the store's state at a revision; 0 means the current
// revision. Running watches end with an error (410), so that their clients list again.
func (c *Cache) loadStore(ctx context.Context, revision raftstore.Revision) error {
	list, err := c.store.List(ctx, storedform.Root,
		raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: true}, At: revision})
	if err != nil {
		return fmt.Errorf("listing the store: %w", err)
	}
	trees := c.loadDefinitions(ctx, list.Items)
	rt := c.routes.Load()
	for _, sc := range rt.byStorage {
		if trees[sc] == nil {
			trees[sc] = newContents(sc.spec)
		}
	}
	reservations := btree.NewMap[string, string](treeDegree)
	for _, item := range list.Items {
		if res, ok := strings.CutPrefix(item.Key, storedform.ReservationsRoot); ok {
			reservations.Set(res, string(item.Value))
			continue
		}
		sc, key := c.routeKey(item.Key)
		if sc == nil || c.isDefinitions(sc) {
			continue
		}
		c.addStored(trees[sc], sc, key, item)
	}
	c.reserved.replaceAll(reservations)
	for sc, found := range trees {
		sc.resetContents(found, list.Revision)
		sc.markLoaded()
	}
	c.progress.advanceTo(list.Revision)
	c.loading.loaded = true
	return nil
}

// definitions is the kind of the objects that define other kinds (CustomResourceDefinition), and
// the function that registers the kinds that they define.
type definitions struct {
	kind     *api.Kind
	register func(all []api.Object)
}

// LoadFirst makes the cache call register whenever it is loaded from the store, with all objects of
// the given kind (CustomResourceDefinition). The kinds that register adds are then loaded together
// with all other kinds, including their history. It must be called before Run.
func (c *Cache) LoadFirst(kind *api.Kind, register func(all []api.Object)) {
	c.definitions.Store(&definitions{kind, register})
}

// isDefinitions reports whether a storage contains the objects of the kind that LoadFirst has set.
func (c *Cache) isDefinitions(sc *storageCache) bool {
	d := c.definitions.Load()
	return d != nil && d.kind.Storage == sc.spec
}

// loadDefinitions decodes the objects of the kind that LoadFirst has set, and registers the kinds
// that they define. It returns the decoded objects by storage. items are all items of the store.
func (c *Cache) loadDefinitions(ctx context.Context, items []raftstore.Item) map[*storageCache]*contents {
	trees := map[*storageCache]*contents{}
	d := c.definitions.Load()
	if d == nil {
		return trees
	}
	sc := c.routes.Load().byStorage[d.kind.Storage]
	if sc == nil {
		return trees
	}
	found := newContents(sc.spec)
	for _, item := range items {
		if key, ok := strings.CutPrefix(item.Key, d.kind.Storage.Prefix); ok {
			c.addStored(found, sc, key, item)
		}
	}
	trees[sc] = found
	var all []api.Object
	found.byKey.Scan(func(_ string, e *Entry) bool {
		all = append(all, e.Object)
		return true
	})
	d.register(all)
	c.adoptTable(ctx)
	return trees
}

// addStored decodes a stored item and adds it to the readable or the unreadable objects of its
// storage.
func (c *Cache) addStored(loaded *contents, sc *storageCache, key string, item raftstore.Item) {
	if e, err := c.decodeEntry(sc, key, item, nil); err != nil {
		loaded.unreadable = loaded.unreadable.withValue(c.newUnreadable(sc, key, item, err))
	} else {
		loaded.setEntry(e)
	}
}

// routeKey returns the storage to which a key of the store belongs, and the rest of the key after
// the storage's prefix. The storage is nil if no served kind has objects below such a prefix.
func (c *Cache) routeKey(key string) (*storageCache, string) {
	if !strings.HasPrefix(key, storedform.Root) {
		return nil, ""
	}
	byPrefix := c.routes.Load().byPrefix
	end := len(storedform.Root)
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

// applyRevisions applies the changes of the given store revisions to the cache, in order, and
// publishes the result to readers and watchers.
func (c *Cache) applyRevisions(batch []raftstore.Events) {
	var touched []*storageCache
	reserved := false
	for _, r := range batch {
		if r.Revision <= c.progress.currentRevision() {
			continue
		}
		for i := range r.Events {
			ev := &r.Events[i]
			if res, ok := strings.CutPrefix(ev.Item.Key, storedform.ReservationsRoot); ok {
				c.reserved.applyEvent(ev, res)
				reserved = true
				continue
			}
			sc, key := c.routeKey(ev.Item.Key)
			if sc == nil || r.Revision <= sc.next.loadRevision {
				continue
			}
			sc.counts.received.Add(1)
			if !isClosed(sc.loaded) {
				sc.next.queuedChanges = append(sc.next.queuedChanges, *ev)
				continue
			}
			c.applyObject(sc, key, ev)
			if sc.next.unpublishedRevision == 0 {
				touched = append(touched, sc)
			}
			sc.next.unpublishedRevision = r.Revision
		}
	}
	if reserved {
		c.reserved.publishCopy()
	}
	for _, sc := range touched {
		sc.publishChanges()
	}
	c.shrinkHistory()
	c.progress.advanceTo(batch[len(batch)-1].Revision)
}

// applyObject applies the change of one object to the unpublished state of its storage. An object
// that becomes unreadable is removed from lists and watches, and added again when it becomes
// readable.
func (c *Cache) applyObject(sc *storageCache, key string, ev *raftstore.Event) {
	sc.next.unreadable = sc.next.unreadable.withoutKey(key)
	if ev.Kind == raftstore.EventDelete {
		sc.removeObject(key, ev.Item.Modified)
		return
	}
	before, _ := sc.next.byKey.Get(key)
	e, err := c.decodeEntry(sc, key, ev.Item, before)
	if err != nil {
		sc.next.unreadable = sc.next.unreadable.withValue(c.newUnreadable(sc, key, ev.Item, err))
		sc.removeObject(key, ev.Item.Modified)
		return
	}
	prev := sc.next.setEntry(e)
	sc.next.pending = append(sc.next.pending, sc.newEvent(e, prev, false))
}

// decodeEntry returns the entry of a stored item. earlier is an earlier entry of the same object,
// or nil; the new entry may share memory with it. decodeEntry always decodes the stored bytes. It
// does not use the object that a client of this replica wrote: that object may have nanoseconds or
// an empty map that the stored bytes lack. Replicas would then return different objects.
func (c *Cache) decodeEntry(sc *storageCache, key string, item raftstore.Item, earlier *Entry) (*Entry, error) {
	obj, version, err := sc.codec.DecodeNamed(key, item.Value)
	if err != nil {
		return nil, err
	}
	obj.SetResourceVersion(storedform.FormatRevision(item.Modified))
	e := &Entry{key: key, Object: obj, version: version, Revision: item.Modified, Value: item.Value}
	if unknown := c.fieldSets.ShareFields(obj); unknown != nil {
		e.Unknown = &unknown
	}
	return e, c.replaceWithLightForm(sc, e, earlier)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Stats contains the numbers of objects and watchers of a Cache, and the size of its history.
type Stats struct {
	Kinds    int
	Storages int
	Watchers int
	// HistoryBytes is the estimated memory of the watch history, summed over the storages.
	// AccountedBytes is the total that is compared with the memory limit; both are equal unless
	// accounting is wrong.
	HistoryBytes, AccountedBytes int64
}

// Stats returns the current numbers of objects and watchers, and the size of the history.
func (c *Cache) Stats() Stats {
	rt := c.routes.Load()
	stats := Stats{Kinds: len(rt.byKind), Storages: len(rt.byStorage), AccountedBytes: c.history.bytes.Load()}
	for _, sc := range rt.byStorage {
		sc.mu.RLock()
		stats.HistoryBytes += sc.history.bytes
		stats.Watchers += len(sc.watchers.awake)
		for _, group := range sc.watchers.waiting {
			stats.Watchers += len(group)
		}
		sc.mu.RUnlock()
	}
	return stats
}
