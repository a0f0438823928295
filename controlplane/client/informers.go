package client

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/wait"
)

// syncPoll is how often WaitForSync looks at informers that are behind.
const syncPoll = 2 * time.Millisecond

// Informers is one shared informer per kind, started by Run. Objects are the watch cache's own: never modify them.
type Informers struct {
	client *Client
	guard  *guard // nil unless mutations are detected

	mu      sync.Mutex
	byKind  map[*api.Kind]cache.SharedIndexInformer
	started bool
}

// InformersOption changes how informers are made.
type InformersOption func(*Informers)

// DetectMutations makes the informers keep a copy of every object and call fail
// with a description when a shared object was changed by somebody. It costs
// memory and time: for tests.
func DetectMutations(fail func(string)) InformersOption {
	return func(i *Informers) { i.guard = &guard{fail: fail} }
}

// NewInformers returns informers that list and watch as c's identity.
func NewInformers(c *Client, opts ...InformersOption) *Informers {
	i := &Informers{client: c, byKind: make(map[*api.Kind]cache.SharedIndexInformer)}
	for _, o := range opts {
		o(i)
	}
	return i
}

// Informer returns the shared informer of T, creating it, with an index by
// namespace (cache.NamespaceIndex). Call before Run. A T that is no kind of the
// API is a programming error and panics.
func Informer[T api.Object](i *Informers) cache.SharedIndexInformer {
	var zero T
	k := i.client.kinds.ByType(zero)
	if k == nil {
		panic(fmt.Sprintf("client: %T is not a kind of this API", zero))
	}
	return InformerOf(i, k)
}

// InformerOf is Informer for a kind that is known only at run time.
func InformerOf(i *Informers, k *api.Kind) cache.SharedIndexInformer {
	i.mu.Lock()
	defer i.mu.Unlock()
	if inf := i.byKind[k]; inf != nil {
		return inf
	}
	if i.started {
		panic(fmt.Sprintf("client: informer of %s asked for after Run", k.Resource))
	}
	inf := cache.NewSharedIndexInformerWithOptions(&listerWatcher{client: i.client, kind: k}, k.New(), cache.SharedIndexInformerOptions{
		Indexers:          cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc},
		ObjectDescription: k.GVK.String(),
	})
	if i.guard != nil {
		// Only Add can refuse, and only once the informer has stopped.
		_, _ = inf.AddEventHandler(i.guard)
	}
	i.byKind[k] = inf
	return inf
}

// Cached returns the object from T's informer, shared: copy before modifying.
func Cached[T api.Object](i *Informers, namespace, name string) (T, bool) {
	var zero T
	key := name
	if namespace != "" {
		key = namespace + "/" + name
	}
	obj, ok, err := Informer[T](i).GetIndexer().GetByKey(key)
	if err != nil || !ok {
		return zero, false
	}
	return obj.(T), true
}

// CachedList returns the objects of T's informer that match (an empty namespace
// means all, a nil selector everything), shared and in no order.
func CachedList[T api.Object](i *Informers, namespace string, selector labels.Selector) []T {
	indexer := Informer[T](i).GetIndexer()
	var found []any
	if namespace == "" {
		found = indexer.List()
	} else {
		// The index exists in every informer made here.
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

// Run runs every informer until ctx ends.
func (i *Informers) Run(ctx context.Context) error {
	i.mu.Lock()
	i.started = true
	running := i.all()
	i.mu.Unlock()
	var wg sync.WaitGroup
	for _, inf := range running {
		wg.Go(func() { inf.RunWithContext(ctx) })
	}
	if i.guard != nil {
		wg.Go(func() { i.guard.run(ctx) })
	}
	<-ctx.Done()
	wg.Wait()
	return nil
}

// all is a copy of the table; call it under mu.
func (i *Informers) all() map[*api.Kind]cache.SharedIndexInformer {
	out := make(map[*api.Kind]cache.SharedIndexInformer, len(i.byKind))
	for k, inf := range i.byKind {
		out[k] = inf
	}
	return out
}

// WaitForSync blocks until every informer holds its initial list and has reached the
// revision that the store had when WaitForSync was called. It may be called again
// and again: after a leadership barrier it says that the informers have caught up.
func (i *Informers) WaitForSync(ctx context.Context) error {
	i.mu.Lock()
	waiting := i.all()
	i.mu.Unlock()
	for k, inf := range waiting {
		target, err := i.newest(ctx, k)
		if err != nil {
			return fmt.Errorf("reading the newest revision of %s: %w", k.Resource, err)
		}
		err = wait.For(ctx, syncPoll, func() error {
			if have := revision(reached(inf)); !inf.HasSynced() || have < target {
				return fmt.Errorf("the informer of %s is at revision %d, not yet at %d", k.Resource, have, target)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// reached is the resourceVersion of the informer's index: the reflector's own
// would be ahead of what a lister shows.
func reached(inf cache.SharedIndexInformer) string {
	if rv := inf.GetIndexer().LastStoreSyncResourceVersion(); rv != "" {
		return rv
	}
	return inf.LastSyncResourceVersion() // the gate AtomicFIFO of client-go is off
}

// newest is the revision of the last change to any object of the kind, of
// everything acknowledged so far.
func (i *Informers) newest(ctx context.Context, k *api.Kind) (uint64, error) {
	out, err := i.client.backend.Do(ctx, &api.Request{User: i.client.user, Verb: api.VerbList, Kind: k,
		Pointers: true, List: metav1.ListOptions{Limit: 1}})
	if err != nil {
		return 0, err
	}
	list, ok := out.(*api.ObjectList)
	if !ok {
		return 0, fmt.Errorf("list answered a %T", out)
	}
	return revision(list.Changed), nil
}

// revision reads a resourceVersion; what is none is 0.
func revision(s string) uint64 {
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// listerWatcher adapts a Backend to client-go's reflectors.
type listerWatcher struct {
	client *Client
	kind   *api.Kind
}

var (
	_ cache.ListerWatcher            = (*listerWatcher)(nil)
	_ cache.ListerWatcherWithContext = (*listerWatcher)(nil)
)

func (l *listerWatcher) request(verb api.Verb, o metav1.ListOptions) *api.Request {
	return &api.Request{User: l.client.user, Verb: verb, Kind: l.kind, Pointers: true, List: o, UserAgent: l.client.user.Name}
}

// ListWithContext lists the cache's own objects.
func (l *listerWatcher) ListWithContext(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
	// Pages would only copy: a list of pointers costs nothing.
	o.Limit, o.Continue = 0, ""
	return l.client.backend.Do(ctx, l.request(api.VerbList, o))
}

// WatchWithContext watches from the list's revision.
func (l *listerWatcher) WatchWithContext(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.TimeoutSeconds = nil // nothing between us can hang unnoticed
	return l.client.backend.Watch(ctx, l.request(api.VerbWatch, o))
}

// List implements cache.Lister.
func (l *listerWatcher) List(o metav1.ListOptions) (runtime.Object, error) {
	return l.ListWithContext(context.Background(), o)
}

// Watch implements cache.Watcher.
func (l *listerWatcher) Watch(o metav1.ListOptions) (watch.Interface, error) {
	return l.WatchWithContext(context.Background(), o)
}

// IsWatchListSemanticsUnSupported keeps reflectors to one list and one watch.
func (l *listerWatcher) IsWatchListSemanticsUnSupported() bool { return true }
