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
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// Admission is stages 3 to 5 of the pipeline. The registry calls it between
// reading the stored object and committing the new one, again on every retry.
// It may change obj in its mutating stage; old is nil on create, obj is nil on
// delete. An error is a *apierrors.StatusError and ends the request.
type Admission interface {
	Admit(ctx context.Context, r *api.Request, obj, old api.Object) error
}

// AdmissionFunc is a function as an Admission.
type AdmissionFunc func(ctx context.Context, r *api.Request, obj, old api.Object) error

// Admit calls f.
func (f AdmissionFunc) Admit(ctx context.Context, r *api.Request, obj, old api.Object) error {
	return f(ctx, r, obj, old)
}

// Registry is the objects of all kinds on one store. All errors of its verbs are *apierrors.StatusError.
type Registry struct {
	store  raftstore.Store
	kinds  *api.Kinds
	scheme *runtime.Scheme
	cache  *cache
	fields *fieldTracker
	// namespaces is where a namespace is looked up that something is created in; nil where they are not served.
	namespaces *kindCache
	log        *slog.Logger

	now          func() time.Time
	newUID       func() types.UID
	randomSuffix func(n int) string
	randomN      func(n uint64) uint64
	callTimeout  time.Duration // of a store call whose context has no deadline
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

// WithHistory bounds what is kept for watches that resume: so many changes of each
// kind, and about so many bytes of memory for those of all kinds together. Older ones
// answer 410. The defaults are 16,384 changes and 64 MiB.
func WithHistory(events int, bytes int64) Option {
	return func(r *Registry) { r.cache.limits.events, r.cache.limits.bytes = events, bytes }
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

// New returns a registry over the store. Nothing runs until Run.
func New(store raftstore.Store, kinds *api.Kinds, opts ...Option) *Registry {
	r := &Registry{
		store: store, kinds: kinds, log: slog.Default(),
		now:          time.Now,
		newUID:       uuid.NewUUID,
		randomSuffix: nameSuffix,
		randomN:      rand.Uint64N,
		callTimeout:  30 * time.Second,
		cache:        newCache(store, kinds),
	}
	for _, o := range opts {
		o(r)
	}
	if r.scheme == nil {
		r.scheme = api.Scheme()
	}
	r.cache.log, r.namespaces = r.log, r.cache.namespaces()
	r.fields = newFieldTracker(r.scheme)
	return r
}

// Run feeds the watch cache from the store until ctx ends.
func (r *Registry) Run(ctx context.Context) error { return r.cache.run(ctx) }

// Ready is closed once the cache holds the store's contents.
func (r *Registry) Ready() <-chan struct{} { return r.cache.ready }

// Revision is the store revision that the cache reflects.
func (r *Registry) Revision() raftstore.Revision { return r.cache.progress.at() }

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
