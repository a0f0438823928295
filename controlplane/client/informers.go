package client

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wait"
)

// syncPoll is the interval at which WaitForSync and WaitForChanges check whether an informer has
// reached the required revision.
const syncPoll = 2 * time.Millisecond

// Informers holds one shared informer per kind; Run starts them. The informers' objects belong to
// the watch cache and must not be modified. They have the version in which they are stored. For
// some kinds, large objects are cached in the light form (api.Light), which takes less memory and
// in which some fields are empty; api.Kind.UnpackObject returns the complete object. The informer
// of a kind that is no longer served stops.
type Informers struct {
	client *Client
	guard  *guard // nil unless mutations are detected

	mu     sync.Mutex
	byKind map[*api.Kind]*informer
	every  []*EveryKind
	start  func(*informer) // nil until Run
}

// informer is a shared informer and the function that stops it. The function is nil if the informer
// does not run.
type informer struct {
	cache.SharedIndexInformer
	end context.CancelFunc
}

// InformersOption configures Informers.
type InformersOption func(*Informers)

// DetectMutations makes the informers keep a copy of every object, and call fail with a description
// of each shared object that was modified. It costs memory and time and is meant for tests.
func DetectMutations(fail func(string)) InformersOption {
	return func(i *Informers) { i.guard = &guard{fail: fail} }
}

// NewInformers returns informers that list and watch with the identity of the client c.
func NewInformers(c *Client, opts ...InformersOption) *Informers {
	i := &Informers{client: c, byKind: make(map[*api.Kind]*informer)}
	for _, o := range opts {
		o(i)
	}
	return i
}

// Informer returns the shared informer of T's kind, with an index by namespace
// (cache.NamespaceIndex). It creates the informer if necessary, but panics if that is after Run. It
// also panics if T is not a kind of the API, or not the version in which the kind is stored.
func Informer[T api.Object](informers *Informers) cache.SharedIndexInformer {
	var zero T
	k := informers.client.kinds.ByType(zero)
	if k == nil {
		panic(fmt.Sprintf("client: %T is not a kind of this API", zero))
	}
	if k.GVK != k.Storage.Hub.GVK {
		panic(fmt.Sprintf("client: informers return objects in their storage version, and a %T is stored as %s", zero,
			k.Storage.Hub.GVK))
	}
	return InformerOf(informers, k)
}

// InformerOf is like Informer, for a kind that is known only at run time.
func InformerOf(informers *Informers, kind *api.Kind) cache.SharedIndexInformer {
	informers.mu.Lock()
	defer informers.mu.Unlock()
	if inf := informers.byKind[kind]; inf != nil {
		return inf.SharedIndexInformer
	}
	if informers.start != nil {
		panic(fmt.Sprintf("client: informer of %s was requested after Run", kind.Resource))
	}
	return informers.newInformer(kind).SharedIndexInformer
}

// newInformer creates and returns the informer of a kind, and adds it to i. The caller holds i.mu.
func (i *Informers) newInformer(kind *api.Kind) *informer {
	inf := newShared(i.client, kind)
	if i.guard != nil {
		// AddEventHandler fails only after the informer has stopped.
		_, _ = inf.AddEventHandler(i.guard)
	}
	out := &informer{SharedIndexInformer: inf}
	i.byKind[kind] = out
	return out
}

// Cached returns an object from the informer of T. It returns false if the informer does not have
// the object. The object is shared: copy it before modifying it.
func Cached[T api.Object](informers *Informers, namespace, name string) (T, bool) {
	var zero T
	key := name
	if namespace != "" {
		key = namespace + "/" + name
	}
	obj, ok, err := Informer[T](informers).GetIndexer().GetByKey(key)
	if err != nil || !ok {
		return zero, false
	}
	return obj.(T), true
}

// CachedList returns the matching objects of T's informer, in no order. An empty namespace means
// all namespaces, a nil selector means all objects. The objects are shared: copy them before
// modifying them.
func CachedList[T api.Object](informers *Informers, namespace string, selector labels.Selector) []T {
	indexer := Informer[T](informers).GetIndexer()
	var found []any
	if namespace == "" {
		found = indexer.List()
	} else {
		// Every informer of this package has the index.
		found, _ = indexer.ByIndex(cache.NamespaceIndex, namespace)
	}
	out := make([]T, 0, len(found))
	for _, o := range found {
		obj := o.(T)
		if selector == nil || selector.Matches(labels.Set(obj.GetLabels())) {
			out = append(out, obj)
		}
	}
	return out
}

// Run runs every informer until ctx ends, and starts informers of kinds that are registered later
// (see EveryKind).
func (i *Informers) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	i.mu.Lock()
	i.start = func(inf *informer) {
		var until context.Context
		until, inf.end = context.WithCancel(ctx)
		wg.Go(func() { inf.RunWithContext(until) })
	}
	for _, inf := range i.byKind {
		i.start(inf)
	}
	i.mu.Unlock()
	if i.guard != nil {
		wg.Go(func() { i.guard.checkPeriodically(ctx) })
	}
	for ctx.Err() == nil {
		// read before applyTable reads them, so that a later change is noticed
		t, occupied := i.client.kinds.Table(), i.client.kinds.Occupied()
		i.applyTable(t)
		select {
		case <-t.Changed():
		case <-occupied.Changed():
		case <-ctx.Done():
		}
	}
	i.mu.Lock()
	i.start = func(*informer) {} // no more informers can start
	i.mu.Unlock()
	wg.Wait()
	return nil
}

// WaitForSync blocks until every informer has received its initial list and all changes that were
// acknowledged before the call. It may be called repeatedly. A new leader calls it before it starts
// work.
func (i *Informers) WaitForSync(ctx context.Context) error {
	done := map[*api.Kind]bool{}
	for {
		i.mu.Lock()
		waiting := maps.Clone(i.byKind)
		i.mu.Unlock()
		maps.DeleteFunc(waiting, func(k *api.Kind, _ *informer) bool { return done[k] })
		if len(waiting) == 0 {
			return nil
		}
		if err := i.waitForAll(ctx, waiting); err != nil {
			return err
		}
		for k := range waiting {
			done[k] = true
		}
		// The existing objects have been observed. Kinds that had none before get informers too.
		i.applyTable(i.client.kinds.Table())
	}
}

// waitsAtOnce is the number of informers for which WaitForSync waits in parallel. A new leader does
// no work before all informers are up to date, and each informer needs a request.
const waitsAtOnce = 16

// waitForAll waits until each of the waiting informers has every change that was acknowledged
// before the call.
func (i *Informers) waitForAll(ctx context.Context, waiting map[*api.Kind]*informer) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(waitsAtOnce)
	for k, inf := range waiting {
		group.Go(func() error { return i.waitFor(ctx, k, inf) })
	}
	return group.Wait()
}

// waitFor waits until the informer of the kind k has every change that was acknowledged before the
// call. It returns nil immediately if the kind is no longer served, and an error if ctx ends.
func (i *Informers) waitFor(ctx context.Context, k *api.Kind, inf *informer) error {
	target, err := i.newestRevision(ctx, k)
	if err != nil && !i.client.kinds.Table().Has(k) {
		return nil // the kind was removed meanwhile
	}
	if err != nil {
		return fmt.Errorf("reading the newest revision of %s: %w", k.Resource, err)
	}
	return wait.For(ctx, syncPoll, func() error {
		if !i.client.kinds.Table().Has(k) {
			return nil
		}
		if have := revisionOf(inf.LastSyncResourceVersion()); !inf.HasSynced() || have < target {
			return fmt.Errorf("the informer of %s is at revision %d, not yet at %d", k.Resource, have, target)
		}
		return nil
	})
}

// WaitForChanges blocks until the informer of T has every change that was acknowledged before the
// call.
func WaitForChanges[T api.Object](ctx context.Context, informers *Informers) error {
	var zero T
	k := informers.client.kinds.ByType(zero)
	informers.mu.Lock()
	inf := informers.byKind[k]
	informers.mu.Unlock()
	if inf == nil {
		return fmt.Errorf("no informer of %T exists", zero)
	}
	return informers.waitFor(ctx, k, inf)
}

// newestRevision returns the revision of the newest acknowledged change to any object of the kind.
func (i *Informers) newestRevision(ctx context.Context, kind *api.Kind) (uint64, error) {
	out, err := i.client.backend.Do(ctx, &api.Request{User: i.client.user, Verb: api.VerbList, Kind: kind,
		Internal: api.InternalOptions{Pointers: true}, List: metav1.ListOptions{Limit: 1}})
	if err != nil {
		return 0, err
	}
	list, ok := out.(*api.ObjectList)
	if !ok {
		return 0, fmt.Errorf("list answered a %T", out)
	}
	return revisionOf(list.Changed), nil
}

// revisionOf parses a resourceVersion. It returns 0 if the resourceVersion is invalid.
func revisionOf(resourceVersion string) uint64 {
	n, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err != nil {
		return 0
	}
	return n
}
