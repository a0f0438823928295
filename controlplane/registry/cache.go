package registry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"sync/atomic"
	"time"

	"github.com/tidwall/btree"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

const (
	// maxBatch is how many revisions are taken into the cache at once when they queue up.
	maxBatch = 256
	// replayRevisions is how far back a starting cache begins, when the store still has it.
	replayRevisions = 4096
)

// cache is the decoded contents of the store on this replica. run is its only writer.
type cache struct {
	store    raftstore.Store
	log      *slog.Logger
	byKind   map[*api.Kind]*kindCache
	byType   map[reflect.Type]*kindCache
	byPrefix map[string]*kindCache
	limits   historyLimits

	progress  progress
	loaded    bool          // the cache holds a state; run's own
	ready     chan struct{} // closed when the cache shows what was there when run began
	done      chan struct{} // closed when run has returned
	encodings encodings
	now       func() time.Time
	kept      int64 // bytes of history of all kinds; run's own

	// reserved maps "space/value" to its holder; reservations is run's own copy.
	reserved     atomic.Pointer[btree.Map[string, string]]
	reservations *btree.Map[string, string]
}

func newCache(store raftstore.Store, kinds *api.Kinds) *cache {
	c := &cache{
		store:    store,
		byKind:   make(map[*api.Kind]*kindCache),
		byType:   make(map[reflect.Type]*kindCache),
		byPrefix: make(map[string]*kindCache),
		limits:   historyLimits{events: 16384, bytes: 64 << 20, age: 5 * time.Minute},
		now:      time.Now,
		ready:    make(chan struct{}),
		done:     make(chan struct{}),
	}
	for k, prefix := range kindPrefixes(kinds) {
		kc := newKindCache(c, k, prefix)
		c.byKind[k] = kc
		c.byPrefix[prefix] = kc
		c.byType[reflect.TypeOf(k.New())] = kc
	}
	c.reservations = btree.NewMap[string, string](treeDegree)
	c.reserved.Store(c.reservations.Copy())
	return c
}

// waitFor returns once the cache holds everything up to rev.
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
	defer close(c.done)
	pause := backoff.Backoff{Min: 10 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	for {
		before := c.progress.at()
		err := c.follow(ctx)
		if ctx.Err() != nil {
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

// follow loads the store when there is nothing to resume from, then takes in
// every revision until the watch ends.
func (c *cache) follow(ctx context.Context) error {
	w, err := c.resume(ctx)
	if err != nil {
		return err
	}
	defer w.Stop()
	// Not ready before what was applied when we began: a restarted replica must not show an older state.
	target := c.store.Applied()
	c.readyAt(target)
	sweep := time.NewTicker(min(historySweep, max(c.limits.age/4, 10*time.Millisecond)))
	defer sweep.Stop()
	for {
		select {
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

func (c *cache) readyAt(target raftstore.Revision) {
	if c.progress.at() >= target && !isClosed(c.ready) {
		close(c.ready)
	}
}

// resume watches the store from where the cache is, or from a new load.
//
// Every key of the store is watched, so that every revision is heard of at once:
// a linearizable read waits for the cache to reach one.
func (c *cache) resume(ctx context.Context) (raftstore.Watcher, error) {
	if c.loaded && c.progress.at() > 0 { // revision 0 is no place to go on from
		w, err := c.store.Watch(ctx, "", c.progress.at())
		if err == nil || !errors.Is(err, raftstore.ErrCompacted) {
			return w, watchError(err)
		}
	}
	// Loading a state of the recent past and replaying what followed gives
	// watchers that were connected before a restart their history back.
	if now := c.store.Applied(); !c.loaded && now > replayRevisions {
		if c.load(ctx, now-replayRevisions) == nil {
			if w, err := c.store.Watch(ctx, "", c.progress.at()); err == nil {
				return w, nil
			}
		}
	}
	// The watch comes first, so that nothing falls between it and the list.
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

func watchError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("watching the store: %w", err)
}

// queued returns first and whatever waits behind it, at most maxBatch.
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

// load replaces the cache by the store's state at a revision; 0 is now. Watchers
// that were running have lost their history and are told to list again.
func (c *cache) load(ctx context.Context, at raftstore.Revision) error {
	list, err := c.store.List(ctx, root, raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: true}, At: at})
	if err != nil {
		return fmt.Errorf("listing the store: %w", err)
	}
	trees := make(map[*kindCache]*contents, len(c.byKind))
	for _, kc := range c.byKind {
		trees[kc] = newContents()
	}
	reservations := btree.NewMap[string, string](treeDegree)
	for _, it := range list.Items {
		if res, ok := strings.CutPrefix(it.Key, reservationsRoot); ok {
			reservations.Set(res, string(it.Value))
			continue
		}
		kc, key := c.route(it.Key)
		if kc == nil {
			continue
		}
		if e, err := c.decode(kc, key, it); err != nil {
			trees[kc].unreadable = trees[kc].unreadable.with(c.unreadable(kc, key, it, err))
		} else {
			trees[kc].tree.Set(key, e)
		}
	}
	c.reservations = reservations
	c.reserved.Store(reservations.Copy())
	for kc, found := range trees {
		kc.reset(found, list.Revision)
	}
	c.progress.advance(list.Revision)
	c.loaded = true
	return nil
}

// route finds the kind that a key belongs to; nil when it is no object's.
func (c *cache) route(key string) (*kindCache, string) {
	if !strings.HasPrefix(key, root) {
		return nil, ""
	}
	end := len(root)
	for range 2 { // /registry/{resource}/ or /registry/{group}/{resource}/
		i := strings.IndexByte(key[end:], '/')
		if i < 0 {
			return nil, ""
		}
		end += i + 1
		if kc := c.byPrefix[key[:end]]; kc != nil {
			return kc, key[end:]
		}
	}
	return nil, ""
}

// apply takes revisions into the cache, in order.
func (c *cache) apply(batch []raftstore.Events) {
	var touched []*kindCache
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
			kc, key := c.route(ev.Item.Key)
			if kc == nil {
				continue
			}
			c.applyObject(kc, key, ev)
			if kc.touched == 0 {
				touched = append(touched, kc)
			}
			kc.touched = r.Revision
		}
	}
	if reserved {
		c.reserved.Store(c.reservations.Copy())
	}
	for _, kc := range touched {
		kc.publish()
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

// applyObject takes one change in. What cannot be read leaves what is shown: lists
// and watches tell the same, and what reads again is added again.
func (c *cache) applyObject(kc *kindCache, key string, ev *raftstore.Event) {
	kc.unreadable = kc.unreadable.without(key)
	if ev.Kind == raftstore.EventDelete {
		kc.remove(key, ev.Item.Modified)
		return
	}
	e, err := c.decode(kc, key, ev.Item)
	if err != nil {
		kc.unreadable = kc.unreadable.with(c.unreadable(kc, key, ev.Item, err))
		kc.remove(key, ev.Item.Modified)
		return
	}
	prev, _ := kc.tree.Set(key, e)
	kc.pending = append(kc.pending, event{rev: e.rev, cur: e, prev: prev})
}

// decode makes the entry of a stored item. The object
// of a writer on this replica is not taken instead: a time with nanoseconds, or an empty map
// where the stored form has none, would make this replica's copy differ from
// the others' and from what the next reader compares it with.
func (c *cache) decode(kc *kindCache, key string, it raftstore.Item) (*entry, error) {
	obj, err := kc.codec.decodeNamed(key, it.Value)
	if err != nil {
		return nil, err
	}
	kc.kind.SetTypeMeta(obj)
	obj.SetResourceVersion(formatRevision(it.Modified))
	return &entry{key: key, obj: obj, rev: it.Modified, value: it.Value}, nil
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
