// Package registry stores objects: codec, keys, preconditions, the watch cache, patch and apply,
// selectors and paging. It is the only package that depends on both objects and raftstore.
//
// One goroutine (cache.run) follows the store and is the only writer of the cache. All readers use
// immutable snapshots, or wait until the cache has reached a revision. A write goes to the store
// and reaches the cache through the same goroutine. It never writes to the cache directly.
package registry

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// Registry stores the objects of all kinds in one store. All errors of its operations are
// *apierrors.StatusError.
type Registry struct {
	store      raftstore.Store
	kinds      *api.Kinds
	scheme     *runtime.Scheme
	cache      *cache
	fields     *fieldTracker
	turns      turns
	companions map[*api.Kind]Companions
	log        *slog.Logger

	now          func() time.Time
	newUID       func() types.UID
	randomSuffix func(n int) string
	randomN      func(n uint64) uint64
	callTimeout  time.Duration // timeout of a store call if the context has no deadline
	shortFields  func() bool
}

// Option changes a default of New.
type Option func(*Registry)

// WithScheme sets a scheme that was built by api.Scheme, to share it.
func WithScheme(s *runtime.Scheme) Option { return func(r *Registry) { r.scheme = s } }

// WithLog sets the logger; the default is slog.Default.
func WithLog(l *slog.Logger) Option { return func(r *Registry) { r.log = l } }

// WithClock sets the clock of creation and deletion timestamps.
func WithClock(now func() time.Time) Option {
	return func(r *Registry) { r.now, r.cache.now = now, now }
}

// defaultHistory is the default memory limit of the watch history, in bytes.
const defaultHistory = 64 << 20

// HistoryOf returns the memory limit of the watch history for a replica with this memory, in bytes:
// an eighth, within bounds. Only a busy cluster uses all of it. memory 0 gives WithHistory's
// default.
func HistoryOf(memory int64) int64 { return min(max(memory/8, defaultHistory), 1<<30) }

// WithHistory bounds the watch history. events is the number of changes of each kind (0: limited by
// memory only). bytes is the memory of all kinds together (0: 64 MiB). A watch of an older revision
// gets a 410.
func WithHistory(events int, bytes int64) Option {
	return func(r *Registry) {
		r.cache.limits.events, r.cache.limits.bytes = events, cmp.Or(bytes, defaultHistory)
	}
}

// WithHistoryAge bounds the age of changes in the watch history. The default (0) is 5 minutes, as
// long as the store keeps them.
func WithHistoryAge(d time.Duration) Option {
	return func(r *Registry) {
		if d > 0 {
			r.cache.limits.age = d
		}
	}
}

// WithShortFields sets a function that reports whether managedFields may be written in short forms.
// Every replica of the cluster must then be able to read them. It is called at each write; the
// default returns false.
func WithShortFields(now func() bool) Option { return func(r *Registry) { r.shortFields = now } }

// New returns a Registry over the store. It starts nothing: Run does.
func New(store raftstore.Store, kinds *api.Kinds, opts ...Option) *Registry {
	r := &Registry{
		store: store, kinds: kinds, log: slog.Default(),
		now:          time.Now,
		newUID:       uuid.NewUUID,
		randomSuffix: nameSuffix,
		randomN:      rand.Uint64N,
		callTimeout:  30 * time.Second,
		shortFields:  func() bool { return false },
		cache:        newCache(store, kinds),
	}
	for _, o := range opts {
		o(r)
	}
	if r.scheme == nil {
		r.scheme = api.Scheme()
	}
	r.cache.log = r.log
	r.fields = newFieldTracker(r.scheme, kinds)
	return r
}

// Run updates the watch cache from the store until ctx ends.
func (r *Registry) Run(ctx context.Context) error { return r.cache.run(ctx) }

// Ready returns a channel that is closed when the cache has the store's content.
func (r *Registry) Ready() <-chan struct{} { return r.cache.ready }

// Revision returns the store revision of the cache.
func (r *Registry) Revision() raftstore.Revision { return r.cache.progress.at() }

// CaughtUp waits until reads with resourceVersion "0" include everything that any replica
// acknowledged before the call.
func (r *Registry) CaughtUp(ctx context.Context) error {
	ctx, cancel := r.bounded(ctx)
	defer cancel()
	if _, err := r.fresh(ctx); err != nil {
		return fmt.Errorf("waiting for the newest state of the store: %w", err)
	}
	return nil
}

// fresh waits until the cache includes everything that any replica acknowledged before the call.
func (r *Registry) fresh(ctx context.Context) (raftstore.Revision, error) {
	rev, err := r.store.Sync(ctx)
	if err != nil {
		return 0, err
	}
	return rev, r.cache.waitFor(ctx, rev)
}

// bounded adds the registry's default timeout to a context without a deadline.
func (r *Registry) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, r.callTimeout)
}
