// Package registry puts objects on the store: codec, keys, preconditions, the
// watch cache, patch and apply, selectors and paging. It is the only package
// that knows both objects and raftstore.
package registry

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

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
	store raftstore.Store
	kinds *api.Kinds
}

// New returns a registry over the store. Nothing runs until Run.
func New(store raftstore.Store, kinds *api.Kinds) *Registry {
	return &Registry{store: store, kinds: kinds}
}

// Run feeds the watch cache from the store until ctx ends.
func (r *Registry) Run(ctx context.Context) error { panic("unwritten") }

// Ready is closed once the cache holds the store's contents.
func (r *Registry) Ready() <-chan struct{} { panic("unwritten") }

// Create, Update, Patch and Delete write; the request names kind, subresource, name and options
// (dry run, field manager, preconditions, propagation, grace period).
func (r *Registry) Create(ctx context.Context, req *api.Request, a Admission) (runtime.Object, error) {
	panic("unwritten")
}
func (r *Registry) Update(ctx context.Context, req *api.Request, a Admission) (runtime.Object, error) {
	panic("unwritten")
}

// Patch applies JSON, merge, strategic-merge and server-side apply patches. Apply creates what is absent; created says so.
func (r *Registry) Patch(ctx context.Context, req *api.Request, a Admission) (obj runtime.Object, created bool, err error) {
	panic("unwritten")
}

// Delete deletes, or marks for deletion when finalizers or a grace period ask for it.
// deleted says whether the object is gone.
func (r *Registry) Delete(ctx context.Context, req *api.Request, a Admission) (obj runtime.Object, deleted bool, err error) {
	panic("unwritten")
}

// DeleteCollection deletes everything that matches the request's list options.
func (r *Registry) DeleteCollection(ctx context.Context, req *api.Request, a Admission) (runtime.Object, error) {
	panic("unwritten")
}

// Modify is read-modify-write of one stored object, retried on conflict unless change returns an error:
// for subresources with rules of their own (binding, eviction, scale). change receives a copy of the stored object.
func (r *Registry) Modify(ctx context.Context, req *api.Request, a Admission, change func(obj api.Object) error) (api.Object, error) {
	panic("unwritten")
}

// Get and List honour resourceVersion semantics: unset is linearizable, "0" is whatever the cache holds.
// Objects in the results are shared: do not modify.
func (r *Registry) Get(ctx context.Context, req *api.Request) (api.Object, error) { panic("unwritten") }

// List returns the kind's list type with shared items.
func (r *Registry) List(ctx context.Context, req *api.Request) (runtime.Object, error) {
	panic("unwritten")
}

// Watch streams changes with bookmarks and, when asked, the initial events.
func (r *Registry) Watch(ctx context.Context, req *api.Request) (watch.Interface, error) {
	panic("unwritten")
}

// Encoded returns obj in the media type ("application/json", "application/vnd.kubernetes.protobuf"), encoding once
// for all callers when obj is a cached one.
func (r *Registry) Encoded(obj runtime.Object, mediaType string) ([]byte, error) { panic("unwritten") }
