package registry

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// routes maps kinds to the storages that serve them. It is immutable: cache.run replaces it when
// the table of kinds changes.
type routes struct {
	table     *api.Table // the table that it is built from
	byKind    map[*api.Kind]*served
	byGVK     map[schema.GroupVersionKind]*served
	byPrefix  map[string]*storageCache
	byStorage map[*api.Storage]*storageCache
	newer     chan struct{} // closed when it has been replaced
}

func newRoutes(t *api.Table) *routes {
	return &routes{
		table:     t,
		byKind:    make(map[*api.Kind]*served),
		byGVK:     make(map[schema.GroupVersionKind]*served),
		byPrefix:  make(map[string]*storageCache),
		byStorage: make(map[*api.Storage]*storageCache),
		newer:     make(chan struct{}),
	}
}

// served is a kind with its storage. State per kind is stored here, and is dropped with the kind.
type served struct {
	*storageCache
	kind *api.Kind
	// own is the kind's version in the storage; nil if all objects must be converted.
	own     *api.Version
	gone    chan struct{} // closed when the kind has been dropped
	tracked tracked
}

func newServed(k *api.Kind, sc *storageCache) *served {
	return &served{storageCache: sc, kind: k, own: sc.codec.version(k.GVK), gone: make(chan struct{})}
}

// adopt applies a table of kinds. It starts caches of new storages, ends caches without a kind, and
// ends the watches of dropped kinds. It is called by run, and once before run.
func (c *cache) adopt(ctx context.Context, t *api.Table) {
	was, next := c.routes.Load(), newRoutes(t)
	var begun []*storageCache
	for _, k := range t.All() {
		if k.Virtual {
			continue
		}
		sc := next.byStorage[k.Storage]
		if sc == nil {
			if sc = was.byStorage[k.Storage]; sc == nil {
				sc = newStorageCache(c, k.Storage)
				begun = append(begun, sc)
			}
			next.byStorage[k.Storage], next.byPrefix[k.Storage.Prefix] = sc, sc
		}
		s := was.byKind[k]
		if s == nil {
			s = newServed(k, sc)
		}
		next.byKind[k], next.byGVK[k.GVK] = s, s
	}
	for _, k := range t.Stored() {
		next.byStorage[k.Storage].face.Store(k)
	}
	c.routes.Store(next)
	close(was.newer)
	for k, s := range was.byKind {
		if next.byKind[k] == nil {
			close(s.gone)
		}
	}
	for storage, sc := range was.byStorage {
		if next.byStorage[storage] == nil {
			sc.end()
		}
	}
	if !c.loaded {
		return // the first load includes them
	}
	for _, sc := range begun {
		c.loading.Go(func() { c.begin(ctx, sc) })
	}
}

// begun is the state of a storage at a revision, as loaded.
type begun struct {
	sc       *storageCache
	found    *contents
	revision raftstore.Revision
}

// begin loads a new storage concurrently to run, which queues the storage's changes meanwhile.
func (c *cache) begin(ctx context.Context, sc *storageCache) {
	pause := backoff.Backoff{Min: 10 * time.Millisecond, Max: time.Second, Jitter: 0.5}
	for {
		// The list is at least as new as the cache when run started to queue changes, so none is
		// missed.
		local := raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Local: true}}
		list, err := c.store.List(ctx, sc.storage.Prefix, local)
		if err == nil {
			found := newContents(sc.storage)
			for _, it := range list.Items {
				c.sort(found, sc, it.Key[len(sc.storage.Prefix):], it)
			}
			select {
			case c.begun <- begun{sc, found, list.Revision}:
			case <-sc.ended:
			case <-ctx.Done():
			}
			return
		}
		c.log.Warn("a storage could not be loaded and is tried again", "prefix", sc.storage.Prefix, "error", err)
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

// join adds a loaded storage, with its queued changes, to the cache.
func (c *cache) join(b begun) {
	if isClosed(b.sc.ended) || isClosed(b.sc.begun) {
		return // it ended, or a reload included it meanwhile
	}
	kept := b.sc.early
	b.sc.reset(b.found, b.revision)
	for i := range kept {
		if kept[i].Item.Modified > b.revision {
			key := kept[i].Item.Key[len(b.sc.storage.Prefix):]
			c.applyObject(b.sc, key, &kept[i])
			b.sc.touched = kept[i].Item.Modified
		}
	}
	if b.sc.touched > 0 {
		b.sc.publish()
	}
	b.sc.open()
}

// served returns the request's kind. It waits if the kind's storage is still being loaded.
func (r *Registry) served(ctx context.Context, req *api.Request) (*served, error) {
	k := req.Kind
	if k == nil {
		return nil, apierrors.NewBadRequest("the request names no kind")
	}
	if k.Virtual {
		return nil, apierrors.NewMethodNotSupported(k.GroupResource(), string(req.Verb))
	}
	if s := r.cache.routes.Load().byKind[k]; s != nil && isClosed(s.begun) {
		return s, nil
	}
	ctx, cancel := r.bounded(ctx)
	defer cancel()
	for {
		rt := r.cache.routes.Load()
		s := rt.byKind[k]
		var until, gone <-chan struct{}
		switch {
		case s != nil && isClosed(s.begun):
			return s, nil
		case s != nil:
			until, gone = s.begun, s.gone
		case r.kinds.Table().Has(k):
			until = rt.newer // it was registered a moment ago
		default:
			return nil, r.notServed(k)
		}
		select {
		case <-until:
		case <-gone:
		case <-ctx.Done():
			return nil, statusError(fmt.Errorf("waiting for the objects of a new kind: %w", ctx.Err()), describe(req))
		}
	}
}

// direct reports whether an entry's object is in the kind's version and in full form.
func (s *served) direct(e *entry) bool { return s.shows(e, false) }

// show returns the objects of entries in the kind's version. Conversions are cached within the
// memory limit.
func (s *served) show(ctx context.Context, entries ...*entry) ([]api.Object, error) {
	out := make([]api.Object, len(entries))
	var from []api.Object
	var at []int
	for i, e := range entries {
		if s.direct(e) {
			out[i] = e.obj
		} else if f := e.form(s.kind); f != nil {
			out[i] = f.obj
		} else {
			obj, err := s.whole(e)
			if err != nil {
				return nil, err
			}
			if e.version == s.own {
				out[i] = obj
				s.cache.keepWhole(s.kind, e, obj)
				continue
			}
			from, at = append(from, obj), append(at, i)
		}
	}
	if len(at) == 0 {
		return out, nil
	}
	if s.kind.Conversion == nil || s.kind.Conversion.From == nil {
		return nil, fmt.Errorf("%s cannot be read from %s", s.kind.GVK, entries[at[0]].version.GVK)
	}
	converted, err := s.kind.Conversion.From(ctx, from)
	if err == nil && len(converted) != len(from) {
		err = fmt.Errorf("%d objects came back of %d", len(converted), len(from))
	}
	if err != nil {
		return nil, fmt.Errorf("converting from %s to %s: %w", entries[at[0]].version.GVK, s.kind.GVK, err)
	}
	for j, i := range at {
		obj := converted[j]
		s.kind.SetTypeMeta(obj)
		obj.SetResourceVersion(formatRevision(entries[i].rev))
		out[i] = s.cache.encodings.keepForm(s, entries[i], obj)
	}
	return out, nil
}

// one returns the object of an entry in the kind's version.
func (s *served) one(ctx context.Context, e *entry) (api.Object, error) {
	if s.direct(e) {
		return e.obj, nil
	}
	out, err := s.show(ctx, e)
	if err != nil {
		return nil, err
	}
	return out[0], nil
}
