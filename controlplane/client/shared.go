package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// sharedInformer is an informer that shares its objects with the registry's watch cache. It holds
// one snapshot of the kind's objects (api.View). The watch delivers each next snapshot together
// with its differences from the previous snapshot (api.Follower). Only the indexes and a queue for
// each handler belong to the informer. It implements the interface of client-go's informer: a
// change is in the store before handlers are called.
type sharedInformer struct {
	cache.SharedIndexInformer // nil: the methods that are not defined here are not supported

	client *Client
	kind   *api.Kind
	synced doneSignal

	mu        sync.RWMutex
	view      api.View // nil before the first snapshot
	indexes   map[string]*indexer
	listeners map[*listener]struct{}
	began     bool
	ended     bool
	running   sync.WaitGroup // the listeners' goroutines
}

var (
	_ cache.SharedIndexInformer = (*sharedInformer)(nil)
	_ cache.Indexer             = objectStore{}
)

// quietTries is the number of consecutive failures of the watch that are not logged.
const quietTries = 3

func newShared(c *Client, k *api.Kind) *sharedInformer {
	return &sharedInformer{client: c, kind: k, synced: newDone(k.GVK.String()), indexes: map[string]*indexer{},
		listeners: map[*listener]struct{}{}}
}

// RunWithContext implements cache.SharedInformer. It follows the objects of the kind until ctx
// ends, and restarts a failed watch after a backoff.
func (s *sharedInformer) RunWithContext(ctx context.Context) {
	s.mu.Lock()
	s.began = true
	for l := range s.listeners {
		s.running.Go(l.runHandler)
	}
	s.mu.Unlock()
	defer s.running.Wait()
	defer s.endWatch()
	pause := backoff.Backoff{Min: 10 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	for tries := 1; ; tries++ {
		err := s.followWatch(ctx, func() {
			tries = 0
			pause.Reset()
		})
		if ctx.Err() != nil {
			return
		}
		// Not logged if the kind is no longer served, because the informer is then about to be
		// stopped. The first failures are not logged either: the replica and its watch cache may be
		// stopping.
		if tries > quietTries && s.client.kinds.Table().Has(s.kind) {
			slog.Warn("an informer lost its watch and starts another", "kind", s.kind.GVK.String(), "error", err)
		}
		if wait.Delay(ctx, pause.Next()) != nil {
			return
		}
	}
}

func (s *sharedInformer) endWatch() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for l := range s.listeners {
		l.closeListener()
	}
	clear(s.listeners)
}

// followWatch starts a watch of the kind and applies the snapshots and changes that it delivers,
// until the watch fails. It calls onDelivery after each successful delivery.
func (s *sharedInformer) followWatch(ctx context.Context, onDelivery func()) error {
	w, err := s.client.backend.Watch(ctx, &api.Request{User: s.client.user, Verb: api.VerbWatch, Kind: s.kind,
		Internal: api.InternalOptions{Follow: true, Light: true},
		Client:   api.ClientInfo{UserAgent: s.client.user.Name}})
	if err != nil {
		return fmt.Errorf("watching %s: %w", s.kind.Resource, err)
	}
	defer w.Stop()
	f, ok := w.(api.Follower)
	if !ok {
		return fmt.Errorf("watching %s: a %T is not an api.Follower", s.kind.Resource, w)
	}
	for first := true; ; first = false {
		snapshot, changes, err := f.Follow(ctx)
		if err != nil {
			return fmt.Errorf("watching %s: %w", s.kind.Resource, err)
		}
		onDelivery()
		if before := s.view; first && before != nil { // only this goroutine writes it
			changes = diffObjects(before, snapshot)
		}
		s.applyEvents(snapshot, changes)
	}
}

// applyEvents makes the given snapshot the informer's snapshot, applies the changes to the indexes,
// and queues the changes for the handlers. The first snapshot is queued as a whole.
func (s *sharedInformer) applyEvents(snapshot api.View, changes []api.Delta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := s.view == nil
	s.view = snapshot
	for _, x := range s.indexes {
		if first {
			x.addAll(snapshot)
			continue
		}
		for i := range changes {
			x.updateObject(&changes[i])
		}
	}
	for l := range s.listeners {
		if first {
			l.pushEvent(queueEntry{initial: snapshot})
		} else if len(changes) > 0 {
			l.pushEvent(queueEntry{changes: changes})
		}
	}
	if first {
		s.synced.signalDone()
	}
}

// diffObjects returns the changes between two snapshots. A deleted object is reported with its last
// known state.
func diffObjects(previous, next api.View) (changes []api.Delta) {
	previous.Scan("", func(key string, old api.Object) bool {
		if now := next.Get(key); now == nil {
			changes = append(changes, api.Delta{Key: key, Old: old, New: old, Gone: true, Guessed: true})
		} else if now.GetResourceVersion() != old.GetResourceVersion() {
			changes = append(changes, api.Delta{Key: key, Old: old, New: now})
		}
		return true
	})
	next.Scan("", func(key string, now api.Object) bool {
		if previous.Get(key) == nil {
			changes = append(changes, api.Delta{Key: key, New: now})
		}
		return true
	})
	return changes
}

// AddEventHandler implements cache.SharedInformer.
func (s *sharedInformer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return nil, fmt.Errorf("handler %v was not added to the informer of %s because the informer has stopped", h,
			s.kind.Resource)
	}
	l := newListener(h, s.kind)
	if s.view != nil {
		l.pushEvent(queueEntry{initial: s.view})
	}
	s.listeners[l] = struct{}{}
	if s.began {
		s.running.Go(l.runHandler)
	}
	return l, nil
}

// RemoveEventHandler implements cache.SharedInformer.
func (s *sharedInformer) RemoveEventHandler(r cache.ResourceEventHandlerRegistration) error {
	l, ok := r.(*listener)
	if !ok {
		return fmt.Errorf("a %T is not a registration of this informer", r)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.listeners, l)
	l.closeListener()
	return nil
}

// HasSynced implements cache.SharedInformer.
func (s *sharedInformer) HasSynced() bool { return s.synced.isDone() }

// HasSyncedChecker implements cache.SharedInformer.
func (s *sharedInformer) HasSyncedChecker() cache.DoneChecker { return s.synced }

// LastSyncResourceVersion implements cache.SharedInformer.
func (s *sharedInformer) LastSyncResourceVersion() string {
	return s.GetIndexer().LastStoreSyncResourceVersion()
}

// IsStopped implements cache.SharedInformer.
func (s *sharedInformer) IsStopped() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.ended
}

// GetStore implements cache.SharedInformer.
func (s *sharedInformer) GetStore() cache.Store { return objectStore{s} }

// GetIndexer implements cache.SharedIndexInformer.
func (s *sharedInformer) GetIndexer() cache.Indexer { return objectStore{s} }

// AddIndexers implements cache.SharedIndexInformer.
func (s *sharedInformer) AddIndexers(more cache.Indexers) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range more {
		if s.indexes[name] != nil || name == cache.NamespaceIndex {
			return fmt.Errorf("the informer of %s already has an index %s", s.kind.Resource, name)
		}
	}
	for name, of := range more {
		x := &indexer{of: of, keys: map[string]map[string]struct{}{}}
		if s.view != nil {
			x.addAll(s.view)
		}
		s.indexes[name] = x
	}
	return nil
}

// indexer is one index of an informer: it maps each value of an index function to the keys of
// objects with that value.
type indexer struct {
	of   cache.IndexFunc
	keys map[string]map[string]struct{} // by value
}

func (x *indexer) addAll(v api.View) {
	v.Scan("", func(key string, obj api.Object) bool {
		x.updateObject(&api.Delta{Key: key, New: obj})
		return true
	})
}

// updateObject applies the change of one object to the index.
func (x *indexer) updateObject(change *api.Delta) {
	was, is := x.indexValues(change.Old), x.indexValues(change.New)
	if change.Gone {
		is = nil
	}
	for _, v := range was {
		if !slices.Contains(is, v) {
			if delete(x.keys[v], change.Key); len(x.keys[v]) == 0 {
				delete(x.keys, v)
			}
		}
	}
	for _, v := range is {
		if x.keys[v] == nil {
			x.keys[v] = map[string]struct{}{}
		}
		x.keys[v][change.Key] = struct{}{}
	}
}

// indexValues returns the values of the index function for an object. An object for which the
// function fails has no values.
func (x *indexer) indexValues(obj api.Object) []string {
	if obj == nil {
		return nil
	}
	v, err := x.of(obj)
	if err != nil {
		return nil
	}
	return v
}

// objectStore is the read-only view of an informer's objects as a cache.Indexer.
type objectStore struct{ *sharedInformer }

// withSnapshot calls f with the current snapshot, which is nil before the first list. The
// informer's lock is held during the call, so the indexes match the snapshot.
func (s objectStore) withSnapshot(f func(now api.View)) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	f(s.view)
}

// currentObjects returns the current snapshot of the informer's objects, or nil before the first
// list.
func (s objectStore) currentObjects() (v api.View) {
	s.withSnapshot(func(now api.View) { v = now })
	return v
}

func (s objectStore) objectsInNamespace(prefix string) []any {
	v := s.currentObjects()
	if v == nil {
		return nil
	}
	n := 0
	if prefix == "" {
		n = v.Len()
	}
	out := make([]any, 0, n)
	v.Scan(prefix, func(_ string, obj api.Object) bool {
		out = append(out, obj)
		return true
	})
	return out
}

// List implements cache.Store.
func (s objectStore) List() []any { return s.objectsInNamespace("") }

// ListKeys implements cache.Store.
func (s objectStore) ListKeys() (out []string) {
	if v := s.currentObjects(); v != nil {
		v.Scan("", func(key string, _ api.Object) bool {
			out = append(out, key)
			return true
		})
	}
	return out
}

// Get implements cache.Store.
func (s objectStore) Get(obj any) (any, bool, error) {
	key, err := cache.MetaNamespaceKeyFunc(obj)
	if err != nil {
		return nil, false, cache.KeyError{Obj: obj, Err: err}
	}
	return s.GetByKey(key)
}

// GetByKey implements cache.Store.
func (s objectStore) GetByKey(key string) (any, bool, error) {
	if v := s.currentObjects(); v != nil {
		if obj := v.Get(key); obj != nil {
			return obj, true, nil
		}
	}
	return nil, false, nil
}

// LastStoreSyncResourceVersion implements cache.Store.
func (s objectStore) LastStoreSyncResourceVersion() string {
	if v := s.currentObjects(); v != nil {
		return v.Revision()
	}
	return ""
}

// Index implements cache.Indexer.
func (s objectStore) Index(name string, obj any) ([]any, error) {
	of := s.GetIndexers()[name]
	if of == nil {
		return nil, noIndex(name)
	}
	values, err := of(obj)
	if err != nil {
		return nil, err
	}
	var out []any
	seen := map[string]bool{}
	for _, value := range values {
		keys, err := s.IndexKeys(name, value)
		if err != nil {
			return nil, err
		}
		for _, key := range keys {
			if o, ok, _ := s.GetByKey(key); ok && !seen[key] {
				seen[key] = true
				out = append(out, o)
			}
		}
	}
	return out, nil
}

// ByIndex implements cache.Indexer.
func (s objectStore) ByIndex(name, value string) (out []any, err error) {
	if name == cache.NamespaceIndex {
		if !s.kind.Namespaced {
			return nil, nil
		}
		return s.objectsInNamespace(value + "/"), nil
	}
	s.withSnapshot(func(now api.View) {
		x := s.indexes[name]
		if x == nil {
			err = noIndex(name)
			return
		}
		out = make([]any, 0, len(x.keys[value]))
		for key := range x.keys[value] {
			if obj := now.Get(key); obj != nil {
				out = append(out, obj)
			}
		}
	})
	return out, err
}

// IndexKeys implements cache.Indexer.
func (s objectStore) IndexKeys(name, value string) (keys []string, err error) {
	if name == cache.NamespaceIndex {
		for _, key := range s.ListKeys() {
			if strings.HasPrefix(key, value+"/") {
				keys = append(keys, key)
			}
		}
		return keys, nil
	}
	s.withSnapshot(func(api.View) {
		if x := s.indexes[name]; x != nil {
			keys = slices.Collect(maps.Keys(x.keys[value]))
		} else {
			err = noIndex(name)
		}
	})
	return keys, err
}

// ListIndexFuncValues implements cache.Indexer.
func (s objectStore) ListIndexFuncValues(name string) (values []string) {
	s.withSnapshot(func(api.View) {
		if x := s.indexes[name]; x != nil {
			values = slices.Collect(maps.Keys(x.keys))
		}
	})
	return values
}

// GetIndexers implements cache.Indexer.
func (s objectStore) GetIndexers() cache.Indexers {
	all := cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}
	s.withSnapshot(func(api.View) {
		for name, x := range s.indexes {
			all[name] = x.of
		}
	})
	return all
}

func noIndex(name string) error { return fmt.Errorf("index with name %s does not exist", name) }

var errReadOnly = errors.New("the objects of an informer belong to the registry: change them through the API")

// Add implements cache.Store.
func (s objectStore) Add(any) error { return errReadOnly }

// Update implements cache.Store.
func (s objectStore) Update(any) error { return errReadOnly }

// Delete implements cache.Store.
func (s objectStore) Delete(any) error { return errReadOnly }

// Replace implements cache.Store.
func (s objectStore) Replace([]any, string) error { return errReadOnly }

// Resync implements cache.Store.
func (s objectStore) Resync() error { return nil }

// Bookmark implements cache.Store.
func (s objectStore) Bookmark(string) {}
