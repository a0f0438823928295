package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/objectmeta"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/raftstore"
)

// write is the state of one request that creates, changes or deletes one object.
type write struct {
	registry  *Registry
	served    *watchcache.Served
	req       *api.Request
	admission Admission
	key       string // relative to the storage's prefix

	dryRun  bool
	manager string // field manager name of this write
	applied bool   // server-side apply has already set the managedFields
	// attempt is the input of admission. It is reset for each attempt to commit.
	attempt api.Attempt
	// dependencyConflicts counts the attempts that failed because objects other than the written
	// object changed.
	dependencyConflicts int
	// absent is set if the last read found no object.
	absent bool
	// unreadable is the stored value of the object if it cannot be decoded; otherwise nil.
	unreadable *watchcache.Unreadable
}

func (r *Registry) newWrite(ctx context.Context, req *api.Request, a Admission, dryRun []string, manager string) (
	*write, error,
) {
	s, err := r.cache.Served(ctx, req)
	if err != nil {
		return nil, err
	}
	dry, err := parseDryRun(dryRun)
	if err != nil {
		return nil, err
	}
	return &write{registry: r, served: s, req: req, admission: a, dryRun: dry,
		manager: objectmeta.FieldManagerName(manager, req.Client.UserAgent),
		key:     storedform.ObjectKey(req.Kind, req.Namespace, req.Name)}, nil
}

func parseDryRun(options []string) (bool, error) {
	for _, o := range options {
		if o != metav1.DryRunAll {
			err := field.NotSupported(field.NewPath("dryRun"), o, []string{metav1.DryRunAll})
			return false, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "DryRun"}, "",
				field.ErrorList{err})
		}
	}
	return len(options) > 0, nil
}

// fullKey returns the key of the object in the store.
func (w *write) fullKey() string { return w.served.Storage().Prefix + w.key }

// outcome is what a write decides to do with the stored object: replace it, delete it or leave it
// as it is.
type outcome struct {
	obj     api.Object // new state; nil = leave the object as it is
	changed bool       // the object differs from the stored object in more than the times in managedFields
	remove  bool       // delete the object; obj, if set, is the state that the client gets
	value   []byte     // encoded obj, as stored
}

// current is the stored object that a write starts from: converted to the version of the write's
// kind, and its cache entry.
type current struct {
	entry *watchcache.Entry // nil = the object does not exist
	obj   api.Object
}

// changeFunc returns the outcome of a write, given the stored object: its new state, its deletion,
// or no change. cur is shared: copy it before modifying it.
type changeFunc func(ctx context.Context, cur current) (outcome, error)

// changeObject calls change with the stored object and commits the outcome. It returns the stored
// result, and whether the object was removed. It starts from the cached state. It calls change
// again with the newest state if change fails or modifies nothing, or if the commit conflicts.
func (w *write) changeObject(ctx context.Context, change changeFunc) (obj api.Object, removed bool, err error) {
	ctx, cancel := w.registry.cache.WithTimeout(ctx)
	defer cancel()
	if err := w.registry.cache.WaitFor(ctx, 0); err != nil {
		return nil, false, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
	}
	stored, newest := w.readCached(), false
	for {
		cur, out, err := w.computeOutcome(ctx, stored, change)
		if err != nil || (out.obj == nil && !out.remove) {
			// The result is valid for the cached state: check whether it is the newest state.
			if again, e := w.refreshAndCompare(ctx, &stored, &newest); e != nil {
				return nil, false, storeerrors.ToStatus(e, storeerrors.DescribeRequest(w.req))
			} else if again {
				continue
			}
			if err != nil {
				return nil, false, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
			}
			return cur.obj, false, nil
		}
		obj, err := w.commitOutcome(ctx, cur, out)
		var conflict *raftstore.ConflictError
		if !errors.As(err, &conflict) {
			return obj, out.remove && err == nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
		}
		if err := w.waitForConflict(ctx, conflict); err != nil {
			return nil, false, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
		}
		stored, newest = w.readCached(), false
	}
}

// readCached returns the cache entry of the written object; nil if the object does not exist. It
// sets w.unreadable.
func (w *write) readCached() *watchcache.Entry {
	e, bad := w.served.Lookup(w.key)
	w.unreadable = bad
	return e
}

// refreshAndCompare refreshes the cache and replaces *entry with the newest entry of the object. It
// returns whether the object differs from the previous *entry. It sets *refreshed; if *refreshed is
// already set, it does nothing and returns false.
func (w *write) refreshAndCompare(ctx context.Context, entry **watchcache.Entry, refreshed *bool) (bool, error) {
	if *refreshed {
		return false, nil
	}
	if _, err := w.registry.cache.Refresh(ctx); err != nil {
		return false, err
	}
	*refreshed = true
	before := w.unreadable
	e := w.readCached()
	changed := e != *entry || w.unreadable != before
	*entry = e
	return changed, nil
}

// computeOutcome calls change with the stored object and returns the outcome. If the result would
// store the same bytes, or differs only in the times of managedFields, the returned outcome is
// empty.
func (w *write) computeOutcome(ctx context.Context, stored *watchcache.Entry, change changeFunc) (
	cur current, out outcome, err error,
) {
	if w.unreadable != nil {
		return cur, out, w.unreadable.StatusError()
	}
	if w.absent = stored == nil; w.absent {
		return cur, out, apierrors.NewNotFound(w.req.Kind.GroupResource(), w.req.Name)
	}
	cur.entry = stored
	if cur.obj, err = w.served.Object(ctx, stored); err != nil {
		return cur, out, err
	}
	if out, err = change(ctx, cur); err != nil || out.obj == nil || out.remove {
		return cur, out, err
	}
	if out.value, err = w.encodeStored(ctx, out.obj, stored); err != nil {
		return cur, outcome{}, err
	}
	if !out.changed &&
		(bytes.Equal(out.value, cur.entry.Value) || objectmeta.IsSameButTimes(w.served.Kind, out.obj, cur.obj)) {
		return cur, outcome{}, nil
	}
	return cur, out, nil
}

// commitOutcome commits the replacement or deletion of the stored object cur, and returns the
// object for the response.
func (w *write) commitOutcome(ctx context.Context, cur current, out outcome) (api.Object, error) {
	if out.remove {
		return w.commitDelete(ctx, cur, out.obj)
	}
	return w.commitPut(ctx, out.obj, out.value, cur)
}

// encodeStored returns the bytes to store for obj, in the hub version. It clears the
// resourceVersion of obj. stored is the replaced entry, or nil.
func (w *write) encodeStored(ctx context.Context, obj api.Object, stored *watchcache.Entry) ([]byte, error) {
	obj.SetResourceVersion("")
	if w.served.Kind.GVK != w.served.Storage().Hub.GVK {
		var err error
		if obj, err = w.served.Kind.Conversion.To(ctx, obj); err != nil {
			return nil, fmt.Errorf("converting from %s to %s: %w", w.served.Kind.GVK, w.served.Storage().Hub.GVK, err)
		}
		obj.SetResourceVersion("")
	}
	value, err := w.fieldOwners().encodeObject(obj, stored)
	if err != nil {
		return nil, err
	}
	if len(value) > raftstore.MaxValueBytes {
		return nil,
			apierrors.NewRequestEntityTooLargeError(
				fmt.Sprintf("%s: the object takes %d bytes, at most %d can be stored",
					storeerrors.DescribeRequest(w.req), len(value), raftstore.MaxValueBytes))
	}
	return value, nil
}

// commitPut stores obj and reserves its unique values, such as cluster IPs. It replaces the given
// stored object, which must not have changed. If stored is empty, it creates a new object.
func (w *write) commitPut(ctx context.Context, obj api.Object, value []byte, stored current) (api.Object, error) {
	full := w.fullKey()
	op := raftstore.Create(full, value)
	var old api.Object
	if stored.entry != nil {
		op = raftstore.Update(full, value, stored.entry.Revision)
		old = stored.obj
	}
	op.TTL = w.req.Kind.Commit.TTL
	p := plan{w: w}
	defer p.releaseLocks()
	p.addOp(op)
	p.addOp(w.newReserver().reservationOps(obj, old)...)
	if stored.entry == nil {
		p.addCompanions(obj, true)
	}
	if err := p.addDependencies(ctx); err != nil {
		return nil, err
	}
	if w.dryRun {
		return w.dryRunResult(obj, old)
	}
	rev, err := p.commitPlan(ctx, obj)
	if err != nil {
		return nil, err
	}
	return w.storedObject(obj, rev), nil
}

// storedObject returns obj with the resourceVersion of the revision rev, at which it was stored. If
// the cache already has that revision, it returns the cached object, because its encodings are
// shared with other responses.
func (w *write) storedObject(obj api.Object, rev raftstore.Revision) api.Object {
	if e := w.served.Current(w.key); e != nil && e.Revision == rev && w.served.IsServable(e) {
		return e.Object
	}
	return watchcache.WithRevision(w.req.Kind, obj, rev)
}

// commitDelete removes the stored object and the reservations of its unique values. It returns
// last, or the stored object if last is nil, with the revision of the deletion.
func (w *write) commitDelete(ctx context.Context, stored current, last api.Object) (api.Object, error) {
	if last == nil {
		last = stored.obj
	}
	p := plan{w: w}
	defer p.releaseLocks()
	p.addOp(raftstore.DeleteAt(w.fullKey(), stored.entry.Revision))
	p.addOp(w.newReserver().reservationOps(nil, stored.obj)...)
	p.addCompanions(stored.obj, false)
	if err := p.addDependencies(ctx); err != nil {
		return nil, err
	}
	if w.dryRun {
		return last, nil
	}
	rev, err := p.commitPlan(ctx, stored.obj)
	if err != nil {
		return nil, err
	}
	return watchcache.WithRevision(w.req.Kind, last, rev), nil
}

// operationOf returns the operation of a write whose first op writes or removes the object.
func operationOf(first raftstore.Op) watchcache.Operation {
	switch {
	case first.Kind == raftstore.OpDelete:
		return watchcache.OpDelete
	case first.If.Absent:
		return watchcache.OpCreate
	}
	return watchcache.OpUpdate
}

// commitOps commits the operations of a write of obj, the first of which writes or removes it. If
// another object has reserved a unique value of obj, such as a cluster IP, it returns an error that
// names the field. If admission picked that value, it returns the conflict instead, so that the
// write is retried.
func (w *write) commitOps(ctx context.Context, ops []raftstore.Op, obj api.Object) (raftstore.Revision, error) {
	if !w.served.IsServed(w.registry.kinds) {
		return 0, w.registry.cache.NotServed(w.served.Kind)
	}
	started := time.Now()
	rev, err := w.registry.store.Commit(ctx, raftstore.Commit{Ops: ops, Fence: raftstore.Fence(w.req.Internal.Fence)})
	w.served.ObserveRequest(operationOf(ops[0]), started, err)
	if err == nil {
		w.req.Client.Stages.EndStage("committed", fmt.Sprintf("revision %d", rev), w.registry.currentTime())
		return rev, nil
	}
	var conflict *raftstore.ConflictError
	if errors.As(err, &conflict) && strings.HasPrefix(conflict.Key, storedform.ReservationsRoot) {
		return 0, w.newReserver().conflictError(conflict, obj)
	}
	return 0, err
}

// dryRunResult returns the object that a dry-run write returns. It returns an error if another
// object has reserved a unique value of obj.
func (w *write) dryRunResult(obj, old api.Object) (api.Object, error) {
	if err := w.newReserver().checkReservations(obj, old); err != nil {
		return nil, err
	}
	w.req.Kind.SetTypeMeta(obj)
	if old != nil {
		obj.SetResourceVersion(old.GetResourceVersion())
	}
	return obj, nil
}
