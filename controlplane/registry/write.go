package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// write is the state of one request that changes one object.
type write struct {
	*served
	r   *Registry
	req *api.Request
	a   Admission
	key string // relative to the storage's prefix

	dryRun  bool
	manager string // field manager of this write
	applied bool   // server-side apply has already set the managers
	// attempt is the input of admission; reset for each try.
	attempt api.Attempt
	// lost counts the tries that failed because other objects than the written one changed.
	lost int
	// absent is set if the object did not exist at the last step.
	absent bool
	// broken is the unreadable value found in the object's place; nil if it could be read.
	broken *Unreadable
}

func (r *Registry) newWrite(ctx context.Context, req *api.Request, a Admission, dryRun []string, manager string) (*write, error) {
	s, err := r.served(ctx, req)
	if err != nil {
		return nil, err
	}
	dry, err := wantsDryRun(dryRun)
	if err != nil {
		return nil, err
	}
	return &write{served: s, r: r, req: req, a: a, dryRun: dry, manager: managerName(manager, req.UserAgent),
		key: objectKey(req.Kind, req.Namespace, req.Name)}, nil
}

func wantsDryRun(options []string) (bool, error) {
	for _, o := range options {
		if o != metav1.DryRunAll {
			err := field.NotSupported(field.NewPath("dryRun"), o, []string{metav1.DryRunAll})
			return false, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "DryRun"}, "", field.ErrorList{err})
		}
	}
	return len(options) > 0, nil
}

// fullKey returns the key of the object in the store.
func (w *write) fullKey() string { return w.storage.Prefix + w.key }

// outcome is the decision of a step about the stored object.
type outcome struct {
	obj     api.Object // new state; nil = leave the object as it is
	differs bool       // known to differ from the stored object by more than times
	remove  bool       // delete the object; obj, if set, is the last state
	value   []byte     // stored form of obj
}

// current is the stored object in the version of the write's kind.
type current struct {
	*entry
	obj api.Object
}

// step computes a new state from the stored one. cur is shared: copy it before changing it.
type step func(ctx context.Context, cur current) (outcome, error)

// change reads, modifies and writes an existing object. It starts from the cached state. It reads
// the newest state and repeats the step only if the step fails or changes nothing, or if the commit
// conflicts. It returns the stored object.
func (w *write) change(ctx context.Context, next step) (obj api.Object, removed bool, err error) {
	ctx, cancel := w.r.bounded(ctx)
	defer cancel()
	if err := w.r.cache.waitFor(ctx, 0); err != nil {
		return nil, false, statusError(err, describe(w.req))
	}
	stored, newest := w.look(), false
	for {
		cur, out, err := w.decide(ctx, stored, next)
		if err != nil || (out.obj == nil && !out.remove) {
			// The result holds for the cached state: check that this is the newest state.
			if again, e := w.outdated(ctx, &stored, &newest); e != nil {
				return nil, false, statusError(e, describe(w.req))
			} else if again {
				continue
			}
			if err != nil {
				return nil, false, statusError(err, describe(w.req))
			}
			return cur.obj, false, nil
		}
		obj, err := w.perform(ctx, cur, out)
		var conflict *raftstore.ConflictError
		if !errors.As(err, &conflict) {
			return obj, out.remove && err == nil, statusError(err, describe(w.req))
		}
		if err := w.retry(ctx, conflict); err != nil {
			return nil, false, statusError(err, describe(w.req))
		}
		stored, newest = w.look(), false
	}
}

// look reads the object from the cache.
func (w *write) look() *entry {
	e, bad := w.find(w.key)
	w.broken = bad
	return e
}

// outdated reads the newest state, unless it was read before, and reports whether it differs from
// cur. It updates cur.
func (w *write) outdated(ctx context.Context, cur **entry, newest *bool) (bool, error) {
	if *newest {
		return false, nil
	}
	if _, err := w.r.fresh(ctx); err != nil {
		return false, err
	}
	*newest = true
	before := w.broken
	e := w.look()
	changed := e != *cur || w.broken != before
	*cur = e
	return changed, nil
}

// decide runs one step on the stored object. If the result would store the same bytes, the outcome
// is empty.
func (w *write) decide(ctx context.Context, stored *entry, next step) (cur current, out outcome, err error) {
	if w.broken != nil {
		return cur, out, w.broken.error()
	}
	if w.absent = stored == nil; w.absent {
		return cur, out, apierrors.NewNotFound(w.req.Kind.GroupResource(), w.req.Name)
	}
	cur.entry = stored
	if cur.obj, err = w.one(ctx, stored); err != nil {
		return cur, out, err
	}
	if out, err = next(ctx, cur); err != nil || out.obj == nil || out.remove {
		return cur, out, err
	}
	if out.value, err = w.encode(ctx, out.obj, stored); err != nil {
		return cur, outcome{}, err
	}
	if !out.differs && (bytes.Equal(out.value, cur.value) || sameButTimes(w.kind, out.obj, cur.obj)) {
		return cur, outcome{}, nil
	}
	return cur, out, nil
}

func (w *write) perform(ctx context.Context, cur current, out outcome) (api.Object, error) {
	if out.remove {
		return w.commitDelete(ctx, cur, out.obj)
	}
	return w.commitPut(ctx, out.obj, out.value, cur)
}

// encode returns the stored form of obj, without its resourceVersion. stored is the replaced entry,
// or nil.
func (w *write) encode(ctx context.Context, obj api.Object, stored *entry) ([]byte, error) {
	obj.SetResourceVersion("")
	if w.kind.GVK != w.storage.Hub.GVK {
		var err error
		if obj, err = w.kind.Conversion.To(ctx, obj); err != nil {
			return nil, fmt.Errorf("converting from %s to %s: %w", w.kind.GVK, w.storage.Hub.GVK, err)
		}
		obj.SetResourceVersion("")
	}
	value, err := w.encodeFields(obj, stored)
	if err != nil {
		return nil, err
	}
	if len(value) > raftstore.MaxValueBytes {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("%s: the object takes %d bytes, at most %d can be stored",
			describe(w.req), len(value), raftstore.MaxValueBytes))
	}
	return value, nil
}

// commitPut stores obj and updates its reservations. It replaces cur, which must still be the
// stored state, or creates a new object if cur is empty.
func (w *write) commitPut(ctx context.Context, obj api.Object, value []byte, cur current) (api.Object, error) {
	full := w.fullKey()
	op := raftstore.Create(full, value)
	var old api.Object
	if cur.entry != nil {
		op = raftstore.Update(full, value, cur.rev)
		old = cur.obj
	}
	op.TTL = w.req.Kind.TTL
	p := plan{w: w}
	defer p.release()
	p.own(op)
	p.add(w.reservationOps(obj, old)...)
	if cur.entry == nil {
		p.companions(obj, true)
	}
	if err := p.complete(ctx); err != nil {
		return nil, err
	}
	if w.dryRun {
		return w.dryPut(obj, old)
	}
	rev, err := p.commit(ctx, obj)
	if err != nil {
		return nil, err
	}
	return w.stored(obj, rev), nil
}

// stored returns obj as stored at revision rev. It returns the cached object if the cache already
// has it, to share its encodings.
func (w *write) stored(obj api.Object, rev raftstore.Revision) api.Object {
	if e := w.get(w.key); e != nil && e.rev == rev && w.direct(e) {
		return e.obj
	}
	return at(w.req.Kind, obj, rev)
}

// commitDelete removes cur and its reservations. It returns the last state, with the revision of
// the deletion.
func (w *write) commitDelete(ctx context.Context, cur current, last api.Object) (api.Object, error) {
	if last == nil {
		last = cur.obj
	}
	p := plan{w: w}
	defer p.release()
	p.own(raftstore.DeleteAt(w.fullKey(), cur.rev))
	p.add(w.reservationOps(nil, cur.obj)...)
	p.companions(cur.obj, false)
	if err := p.complete(ctx); err != nil {
		return nil, err
	}
	if w.dryRun {
		return last, nil
	}
	rev, err := p.commit(ctx, cur.obj)
	if err != nil {
		return nil, err
	}
	return at(w.req.Kind, last, rev), nil
}

// commit commits the operations. A conflict on a reservation becomes an error that names the field,
// unless admission had picked the value.
func (w *write) commit(ctx context.Context, ops []raftstore.Op, obj api.Object) (raftstore.Revision, error) {
	if isClosed(w.gone) || !w.r.kinds.Table().Has(w.kind) {
		return 0, w.r.notServed(w.kind)
	}
	rev, err := w.r.store.Commit(ctx, raftstore.Commit{Ops: ops, Fence: raftstore.Fence(w.req.Fence)})
	if err == nil {
		w.req.Stages.Mark("committed", fmt.Sprintf("revision %d", rev), w.r.now())
		return rev, nil
	}
	var conflict *raftstore.ConflictError
	if errors.As(err, &conflict) && strings.HasPrefix(conflict.Key, reservationsRoot) {
		return 0, w.reservationTaken(conflict, obj)
	}
	return 0, err
}

// dryPut returns the result of a dry-run write.
func (w *write) dryPut(obj, old api.Object) (api.Object, error) {
	if err := w.checkReservations(obj, old); err != nil {
		return nil, err
	}
	w.req.Kind.SetTypeMeta(obj)
	if old != nil {
		obj.SetResourceVersion(old.GetResourceVersion())
	}
	return obj, nil
}
