package watchcache

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/fieldowners"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// routes maps kinds and store keys to the cached storages. It is immutable: Cache.Run replaces it
// when the table of kinds changes.
type routes struct {
	table     *api.Table // the table of kinds that the routes are built from
	byKind    map[*api.Kind]*Served
	byGVK     map[schema.GroupVersionKind]*Served
	byPrefix  map[string]*storageCache
	byStorage map[*api.Storage]*storageCache
	replaced  chan struct{} // closed when these routes have been replaced with newer ones
}

func newRoutes(t *api.Table) *routes {
	return &routes{
		table:     t,
		byKind:    make(map[*api.Kind]*Served),
		byGVK:     make(map[schema.GroupVersionKind]*Served),
		byPrefix:  make(map[string]*storageCache),
		byStorage: make(map[*api.Storage]*storageCache),
		replaced:  make(chan struct{}),
	}
}

// Served is a served kind with the cache of its storage. All cached state of a kind is stored here,
// and is dropped when the kind is no longer served.
type Served struct {
	Kind *api.Kind
	// Gone is closed when the kind is no longer served.
	Gone chan struct{}
	// Fields caches the field managers of the kind.
	Fields fieldowners.KindState

	storage *storageCache
	// version is the entry of the kind's version in its storage; nil if all objects must be
	// converted to the version.
	version *api.Version
}

func newServed(k *api.Kind, sc *storageCache) *Served {
	return &Served{Kind: k, storage: sc, version: sc.codec.Version(k.GVK), Gone: make(chan struct{})}
}

// Storage returns the storage of the kind.
func (s *Served) Storage() *api.Storage { return s.storage.spec }

// Codec returns the codec of the kind's storage.
func (s *Served) Codec() storedform.Codec { return s.storage.codec }

// Key returns the key of an object relative to the storage's prefix.
func (s *Served) Key(namespace, name string) string {
	return storedform.ObjectKey(s.Kind, namespace, name)
}

// Current returns the current entry of an object, or nil if the object does not exist or is
// unreadable. key is relative to the storage's prefix.
func (s *Served) Current(key string) *Entry { return s.storage.currentEntry(key) }

// Lookup returns the current entry of an object, or its stored value if that is unreadable. It
// returns nil for both if the object does not exist. key is relative to the storage's prefix.
func (s *Served) Lookup(key string) (*Entry, *Unreadable) { return s.storage.lookupKey(key) }

// CompleteObject returns the object of an entry with all fields decoded, in the version in which
// the entry is cached. The object is shared: do not modify it.
func (s *Served) CompleteObject(e *Entry) (api.Object, error) { return s.storage.completeObject(e) }

// adoptKinds makes the cache serve the kinds of a table. It creates caches for new storages and
// releases those of storages without a kind. It ends the watches of kinds that are not in the
// table. Run calls it, and New before Run.
func (c *Cache) adoptKinds(ctx context.Context, table *api.Table) {
	old, next := c.routes.Load(), newRoutes(table)
	var added []*storageCache
	for _, k := range table.All() {
		if k.Serving.Virtual {
			continue
		}
		sc := next.byStorage[k.Storage]
		if sc == nil {
			if sc = old.byStorage[k.Storage]; sc == nil {
				sc = newStorageCache(c, k.Storage)
				added = append(added, sc)
			}
			next.byStorage[k.Storage], next.byPrefix[k.Storage.Prefix] = sc, sc
		}
		s := old.byKind[k]
		if s == nil {
			s = newServed(k, sc)
		}
		next.byKind[k], next.byGVK[k.GVK] = s, s
	}
	for _, k := range table.Stored() {
		next.byStorage[k.Storage].defaultKind.Store(k)
	}
	c.routes.Store(next)
	close(old.replaced)
	for k, s := range old.byKind {
		if next.byKind[k] == nil {
			close(s.Gone)
		}
	}
	for storage, sc := range old.byStorage {
		if next.byStorage[storage] == nil {
			sc.releaseHistory()
		}
	}
	if !c.loading.loaded {
		return // the first load includes them
	}
	for _, sc := range added {
		c.loading.storages.Go(func() { c.loadStorage(ctx, sc) })
	}
}

// loadResult is the result of loadStorage: the content of a storage, and the revision at which it
// was loaded.
type loadResult struct {
	storage  *storageCache
	found    *contents
	revision raftstore.Revision
}

// loadStorage loads the objects of a new storage from the store, while Run continues. It sends the
// result to Run, which queues the storage's changes until then.
func (c *Cache) loadStorage(ctx context.Context, sc *storageCache) {
	pause := backoff.Backoff{Min: 10 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	for {
		// The list is at least as new as the cache when Run started to queue changes, so no change
		// is missed.
		local := raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: true}}
		list, err := c.store.List(ctx, sc.spec.Prefix, local)
		if err == nil {
			found := newContents(sc.spec)
			for _, item := range list.Items {
				c.addStored(found, sc, item.Key[len(sc.spec.Prefix):], item)
			}
			select {
			case c.loading.results <- loadResult{sc, found, list.Revision}:
			case <-sc.ended:
			case <-ctx.Done():
			}
			return
		}
		c.options.Log.Warn("loading a storage failed; retrying", "prefix", sc.spec.Prefix, "error", err)
		select {
		case <-sc.ended:
			return
		default:
		}
		if wait.Delay(ctx, pause.Next()) != nil {
			return
		}
	}
}

// addLoaded sets the content of a storage to the result of loadStorage. Then it applies the changes
// that Run queued during the load.
func (c *Cache) addLoaded(result loadResult) {
	sc := result.storage
	if isClosed(sc.ended) || isClosed(sc.loaded) {
		return // the storage ended, or a reload of the store has included it
	}
	early := sc.next.queuedChanges
	sc.resetContents(result.found, result.revision)
	for i := range early {
		if early[i].Item.Modified > result.revision {
			key := early[i].Item.Key[len(sc.spec.Prefix):]
			c.applyObject(sc, key, &early[i])
			sc.next.unpublishedRevision = early[i].Item.Modified
		}
	}
	if sc.next.unpublishedRevision > 0 {
		sc.publishChanges()
	}
	sc.markLoaded()
}

// ByKind returns the Served of a kind, or nil if the kind is not served. The objects of the kind's
// storage may still be loading.
func (c *Cache) ByKind(kind *api.Kind) *Served { return c.routes.Load().byKind[kind] }

// Served returns the Served of the request's kind. It waits until the objects of the kind's storage
// are loaded.
func (c *Cache) Served(ctx context.Context, req *api.Request) (*Served, error) {
	k := req.Kind
	if k == nil {
		return nil, apierrors.NewBadRequest("the request has no kind")
	}
	if k.Serving.Virtual {
		return nil, apierrors.NewMethodNotSupported(k.GroupResource(), string(req.Verb))
	}
	if s := c.ByKind(k); s != nil && isClosed(s.storage.loaded) {
		return s, nil
	}
	ctx, cancel := c.WithTimeout(ctx)
	defer cancel()
	for {
		rt := c.routes.Load()
		s := rt.byKind[k]
		var changed, gone <-chan struct{}
		switch {
		case s != nil && isClosed(s.storage.loaded):
			return s, nil
		case s != nil:
			changed, gone = s.storage.loaded, s.Gone
		case c.kinds.Table().Has(k):
			changed = rt.replaced // the kind was registered very recently
		default:
			return nil, c.NotServed(k)
		}
		select {
		case <-changed:
		case <-gone:
		case <-ctx.Done():
			return nil, storeerrors.ToStatus(fmt.Errorf("waiting for the objects of a new kind: %w", ctx.Err()),
				storeerrors.DescribeRequest(req))
		}
	}
}

// NotServed returns the error for a kind that is no longer served. If its definition changed and
// another kind with the same name is served, the error says so, and a retry of the request
// succeeds.
func (c *Cache) NotServed(kind *api.Kind) error {
	if served := c.kinds.ByGVK(kind.GVK); served == nil || served == kind {
		return storeerrors.NewNotServed()
	}
	return storeerrors.NewKindReplaced(kind)
}

// IsServed reports whether the cache still serves the kind and kinds still contains it.
func (s *Served) IsServed(kinds *api.Kinds) bool {
	return !isClosed(s.Gone) && kinds.Table().Has(s.Kind)
}

// IsServable reports whether an entry's object is complete and in the kind's version, so that it
// can be returned to a client unchanged.
func (s *Served) IsServable(e *Entry) bool { return s.isServable(e, false) }

// convertEntries returns the complete objects of entries in the kind's version. It caches the
// conversions within the memory limit. The objects are shared.
func (s *Served) convertEntries(ctx context.Context, entries ...*Entry) ([]api.Object, error) {
	out := make([]api.Object, len(entries))
	var sources []api.Object
	var indexes []int
	for i, e := range entries {
		if s.IsServable(e) {
			out[i] = e.Object
		} else if f := e.convertedObjectOf(s.Kind); f != nil {
			out[i] = f.obj
		} else {
			obj, err := s.storage.completeObject(e)
			if err != nil {
				return nil, err
			}
			if e.version == s.version {
				out[i] = obj
				s.storage.cache.cacheCompleteObject(s.Kind, e, obj)
				continue
			}
			sources, indexes = append(sources, obj), append(indexes, i)
		}
	}
	if len(indexes) == 0 {
		return out, nil
	}
	if s.Kind.Conversion == nil || s.Kind.Conversion.From == nil {
		return nil, fmt.Errorf("%s has no conversion from %s", s.Kind.GVK, entries[indexes[0]].version.GVK)
	}
	converted, err := s.Kind.Conversion.From(ctx, sources)
	if err == nil && len(converted) != len(sources) {
		err = fmt.Errorf("the conversion returned %d objects, want %d", len(converted), len(sources))
	}
	if err != nil {
		return nil, fmt.Errorf("converting from %s to %s: %w", entries[indexes[0]].version.GVK, s.Kind.GVK, err)
	}
	for j, i := range indexes {
		obj := converted[j]
		s.Kind.SetTypeMeta(obj)
		obj.SetResourceVersion(storedform.FormatRevision(entries[i].Revision))
		out[i] = s.storage.cache.encodings.cacheConverted(s, entries[i], obj)
	}
	return out, nil
}

// Object returns the complete object of an entry in the kind's version. The object is shared.
func (s *Served) Object(ctx context.Context, e *Entry) (api.Object, error) {
	if s.IsServable(e) {
		return e.Object, nil
	}
	out, err := s.convertEntries(ctx, e)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}
