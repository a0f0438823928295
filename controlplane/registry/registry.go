// Package registry puts objects on the store: codec, keys, preconditions, the
// watch cache, patch and apply, selectors and paging. It is the only package
// that knows both objects and raftstore.
//
// One goroutine (cache.run) follows the store and is the only writer of the
// cache. Everybody else reads immutable snapshots, or waits until the cache has
// reached a revision. A write goes to the store and comes back through the
// same goroutine; nothing is put into the cache on the way in.
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

// Registry is the objects of all kinds on one store. All errors of its verbs are *apierrors.StatusError.
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
	callTimeout  time.Duration // of a store call whose context has no deadline
	shortFields  func() bool
}

// Option changes a default of New.
type Option func(*Registry)

// WithScheme shares a scheme built by api.Scheme.
func WithScheme(s *runtime.Scheme) Option { return func(r *Registry) { r.scheme = s } }

// WithLog sets the logger; the default is slog.Default.
func WithLog(l *slog.Logger) Option { return func(r *Registry) { r.log = l } }

// WithClock sets the clock of creation and deletion timestamps.
func WithClock(now func() time.Time) Option {
	return func(r *Registry) { r.now, r.cache.now = now, now }
}

// defaultHistory is the memory of what is kept for watches that resume, in bytes.
const defaultHistory = 64 << 20

// HistoryOf is how much of a replica's memory, in bytes, what is kept for watches that resume may take at most: an
// eighth, which only a busy cluster uses. 0 means WithHistory's default.
func HistoryOf(memory int64) int64 { return min(max(memory/8, defaultHistory), 1<<30) }

// WithHistory bounds what is kept for watches that resume: so many changes of each
// kind (0: as many as there is room for), and about so many bytes of memory for those of all kinds together
// (0: 64 MiB). Older ones answer 410.
func WithHistory(events int, bytes int64) Option {
	return func(r *Registry) {
		r.cache.limits.events, r.cache.limits.bytes = events, cmp.Or(bytes, defaultHistory)
	}
}

// WithHistoryAge bounds for how long changes are kept for watches that resume; the
// default, which 0 means, is the 5 minutes for which the store keeps them.
func WithHistoryAge(d time.Duration) Option {
	return func(r *Registry) {
		if d > 0 {
			r.cache.limits.age = d
		}
	}
}

// WithShortFields says whether managedFields may be written in short forms, which every replica of the cluster must be
// able to read then. It is asked at each write; the default is no.
func WithShortFields(now func() bool) Option { return func(r *Registry) { r.shortFields = now } }

// New returns a registry over the store. Nothing runs until Run.
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

// Run feeds the watch cache from the store until ctx ends.
func (r *Registry) Run(ctx context.Context) error { return r.cache.run(ctx) }

// Ready is closed once the cache holds the store's contents.
func (r *Registry) Ready() <-chan struct{} { return r.cache.ready }

// Revision is the store revision that the cache reflects.
func (r *Registry) Revision() raftstore.Revision { return r.cache.progress.at() }

// CaughtUp returns once what "0" reads is as new as what was acknowledged, by any replica, before the call.
func (r *Registry) CaughtUp(ctx context.Context) error {
	ctx, cancel := r.bounded(ctx)
	defer cancel()
	if _, err := r.fresh(ctx); err != nil {
		return fmt.Errorf("waiting for the newest state of the store: %w", err)
	}
	return nil
}

// fresh returns once the cache includes everything that was acknowledged by any
// replica before the call.
func (r *Registry) fresh(ctx context.Context) (raftstore.Revision, error) {
	rev, err := r.store.Sync(ctx)
	if err != nil {
		return 0, err
	}
	return rev, r.cache.waitFor(ctx, rev)
}

// bounded gives a call that brought no deadline the registry's own.
func (r *Registry) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, r.callTimeout)
}
