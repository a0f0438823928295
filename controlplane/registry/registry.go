// Package registry stores API objects. It implements writes with admission, patch and server-side
// apply, and serves reads and watches from its watch cache. A write goes to the store and reaches
// the cache through the goroutine of the cache (watchcache.Cache.Run). It never writes to the cache
// directly.
package registry

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/uuid"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/fieldowners"
	"keelson.dev/keelson/controlplane/registry/objectmeta"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/raftstore"
)

// Registry stores the objects of all kinds in one store. All errors of its operations are
// *apierrors.StatusError. It is safe for concurrent use.
type Registry struct {
	watchcache.Reader

	store      raftstore.Store
	kinds      *api.Kinds
	scheme     *runtime.Scheme
	cache      *watchcache.Cache
	options    watchcache.Options // of the cache
	fields     *fieldowners.Tracker
	locks      objectLocks
	companions map[*api.Kind]Companions

	newUID               func() types.UID
	randomSuffix         func(n int) string
	randomN              func(n uint64) uint64
	compactFieldsAllowed func() bool
}

// Option configures a Registry.
type Option func(*Registry)

// WithScheme sets the scheme, which must be a result of api.Scheme, so that several users share one
// scheme. By default, New calls api.Scheme.
func WithScheme(s *runtime.Scheme) Option { return func(r *Registry) { r.scheme = s } }

// WithLog sets the logger. The default is slog.Default.
func WithLog(l *slog.Logger) Option { return func(r *Registry) { r.options.Log = l } }

// WithClock sets the clock for creation and deletion timestamps and for the age of the watch
// history. The default is time.Now.
func WithClock(clock func() time.Time) Option {
	return func(r *Registry) { r.options.Now = clock }
}

// WithHistory limits the watch history. events is the maximum number of changes of each storage (0:
// limited by memory only). bytes is the maximum memory of all storages together (0: 64 MiB). A
// watch that starts at a revision before the history gets a 410.
func WithHistory(events int, bytes int64) Option {
	return func(r *Registry) {
		r.options.HistoryEvents, r.options.HistoryBytes = events, bytes
	}
}

// WithHistoryAge limits the age of changes in the watch history. The default (0) is 5 minutes, as
// in the store.
func WithHistoryAge(maxAge time.Duration) Option {
	return func(r *Registry) {
		r.options.HistoryAge = max(maxAge, 0)
	}
}

// WithShortFields sets a function that reports whether managedFields may be written in the compact
// encoding (see package fieldowners). It may return true only if every replica of the cluster can
// read the encoding. It is called at each write. The default function returns false.
func WithShortFields(allowed func() bool) Option {
	return func(r *Registry) { r.compactFieldsAllowed = allowed }
}

// New returns a Registry that keeps its objects in the given store. It starts no goroutine. Reads
// and writes wait until Run has loaded the watch cache.
func New(store raftstore.Store, kinds *api.Kinds, opts ...Option) *Registry {
	r := &Registry{
		store: store, kinds: kinds,
		options:              watchcache.Options{Log: slog.Default(), Now: time.Now},
		newUID:               uuid.NewUUID,
		randomSuffix:         objectmeta.RandomSuffix,
		randomN:              rand.Uint64N,
		compactFieldsAllowed: func() bool { return false },
	}
	for _, o := range opts {
		o(r)
	}
	if r.scheme == nil {
		r.scheme = api.Scheme()
	}
	r.cache = watchcache.New(store, kinds, r.options)
	r.Reader = watchcache.NewReader(r.cache)
	r.fields = fieldowners.NewTracker(r.scheme, kinds)
	return r
}

// Run updates the watch cache from the store until ctx ends.
func (r *Registry) Run(ctx context.Context) error { return r.cache.Run(ctx) }

// Ready returns a channel that is closed when the watch cache has loaded the content of the store.
func (r *Registry) Ready() <-chan struct{} { return r.cache.Ready() }

// Collector returns the metrics of the registry's requests to the store and of its watch cache. The
// caller registers the collector.
func (r *Registry) Collector() prometheus.Collector { return r.cache.StoreMetrics() }

// Revision returns the store revision up to which the watch cache has applied all changes.
func (r *Registry) Revision() raftstore.Revision { return r.cache.Revision() }

// LoadFirst makes the watch cache call register whenever it is loaded, with all objects of the
// given kind (CustomResourceDefinition). The call precedes the load of all other kinds: see
// watchcache.Cache.LoadFirst. LoadFirst must be called before Run.
func (r *Registry) LoadFirst(kind *api.Kind, register func(all []api.Object)) {
	r.cache.LoadFirst(kind, register)
}

// Types returns the type converter of a kind: the schema of its objects, by which server-side apply
// merges.
func (r *Registry) Types(k *api.Kind) managedfields.TypeConverter { return r.fields.Types(k) }

// CaughtUp waits until the watch cache includes every write that any replica acknowledged before
// the call. Reads with resourceVersion "0" then return these writes.
func (r *Registry) CaughtUp(ctx context.Context) error {
	ctx, cancel := r.cache.WithTimeout(ctx)
	defer cancel()
	if _, err := r.cache.Refresh(ctx); err != nil {
		return fmt.Errorf("waiting for the newest state of the store: %w", err)
	}
	return nil
}

// currentTime returns the current time of the registry's clock.
func (r *Registry) currentTime() time.Time { return r.options.Now() }
