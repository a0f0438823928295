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

// write is one call that changes one object.
type write struct {
	r   *Registry
	kc  *kindCache
	req *api.Request
	a   Admission
	key string // below the kind's prefix

	dryRun  bool
	manager string // field manager of this write
	applied bool   // server-side apply has recorded the managers itself
	// autos are the reservations that admission took by AllocateClusterIP and
	// AllocateNodePort in this attempt.
	autos *autoReservations
	// home is the namespace as it was when admission let an object into it; nil when there is none to look at.
	home *entry
	// broken is what was found in the object's place by the attempt that failed; nil when it could be read.
	broken *Unreadable
}

func (r *Registry) newWrite(req *api.Request, a Admission, dryRun []string, manager string) (*write, error) {
	kc, err := r.kindOf(req)
	if err != nil {
		return nil, err
	}
	dry, err := wantsDryRun(dryRun)
	if err != nil {
		return nil, err
	}
	return &write{r: r, kc: kc, req: req, a: a, dryRun: dry, manager: managerName(manager, req.UserAgent),
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

// admit runs the caller's stages 3 to 5 and collects what they allocate.
func (w *write) admit(ctx context.Context, obj, old api.Object) error {
	w.autos = nil
	if w.a == nil {
		return nil
	}
	if w.req.Kind.Reservations != nil {
		w.autos = &autoReservations{}
		ctx = context.WithValue(ctx, autosKey{}, w.autos)
	}
	return w.a.Admit(ctx, w.req, obj, old)
}

// outcome is what a step decided about the stored object.
type outcome struct {
	obj    api.Object // the new state; nil = leave the object as it is
	remove bool       // delete it; obj, when set, is the state that was to be written
	value  []byte     // obj as it will be stored
}

// step computes a new state from the stored one. cur is shared: copy it before changing anything.
type step func(ctx context.Context, cur *entry) (outcome, error)

// change is read-modify-write of an existing object. It starts from the cache as
// it is, without asking the store; only when that leads to a refusal or to
// nothing to do, or when the commit conflicts, is the newest state read and the
// step taken again. It returns the object as it is stored now.
func (w *write) change(ctx context.Context, next step) (obj api.Object, removed bool, err error) {
	ctx, cancel := w.r.bounded(ctx)
	defer cancel()
	if err := w.r.cache.waitFor(ctx, 0); err != nil {
		return nil, false, statusError(err, describe(w.req))
	}
	cur, newest := w.find(), false
	for {
		out, err := w.decide(ctx, cur, next)
		if err != nil || (out.obj == nil && !out.remove) {
			// True of cur; is cur the newest state?
			if again, e := w.outdated(ctx, &cur, &newest); e != nil {
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
		// The state that made it fail will be in the cache without asking the leader.
		if err := w.r.cache.waitFor(ctx, conflict.At); err != nil {
			return nil, false, statusError(err, describe(w.req))
		}
		cur, newest = w.find(), false
	}
}

// find reads the object from the cache.
func (w *write) find() *entry {
	e, bad := w.kc.find(w.key)
	w.broken = bad
	return e
}

// outdated reads the newest state, once, and says whether cur was an older one.
func (w *write) outdated(ctx context.Context, cur **entry, newest *bool) (bool, error) {
	if *newest {
		return false, nil
	}
	if _, err := w.r.fresh(ctx); err != nil {
		return false, err
	}
	*newest = true
	before := w.broken
	e := w.find()
	changed := e != *cur || w.broken != before
	*cur = e
	return changed, nil
}

// decide takes one step from cur. An outcome that would store the same bytes again is none.
func (w *write) decide(ctx context.Context, cur *entry, next step) (outcome, error) {
	if w.broken != nil {
		return outcome{}, w.broken.error()
	}
	if cur == nil {
		return outcome{}, apierrors.NewNotFound(w.req.Kind.GroupResource(), w.req.Name)
	}
	out, err := next(ctx, cur)
	if err != nil || out.obj == nil || out.remove {
		return out, err
	}
	if out.value, err = w.encode(out.obj); err != nil {
		return outcome{}, err
	}
	if bytes.Equal(out.value, cur.value) || sameButTimes(out.obj, cur.obj) {
		return outcome{}, nil
	}
	return out, nil
}

func (w *write) perform(ctx context.Context, cur *entry, out outcome) (api.Object, error) {
	if out.remove {
		return w.commitDelete(ctx, cur, out.obj)
	}
	return w.commitPut(ctx, out.obj, out.value, cur)
}

// encode returns the stored form: everything but the resourceVersion.
func (w *write) encode(obj api.Object) ([]byte, error) {
	obj.SetResourceVersion("")
	value, err := w.kc.codec.encode(obj)
	if err != nil {
		return nil, err
	}
	if len(value) > raftstore.MaxValueBytes {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("%s: the object takes %d bytes, at most %d can be stored",
			describe(w.req), len(value), raftstore.MaxValueBytes))
	}
	return value, nil
}

// commitPut stores obj over cur, or as a new object when cur is nil, together
// with the reservations that change. The precondition is the state that was read.
func (w *write) commitPut(ctx context.Context, obj api.Object, value []byte, cur *entry) (api.Object, error) {
	full := w.kc.prefix + w.key
	op := raftstore.Create(full, value)
	var old api.Object
	if cur != nil {
		op = raftstore.Update(full, value, cur.rev)
		old = cur.obj
	}
	op.TTL = w.req.Kind.TTL
	if w.dryRun {
		return w.dryPut(obj, old)
	}
	ops := append([]raftstore.Op{op}, w.reservationOps(obj, old)...)
	if cur == nil && w.home != nil {
		ops = append(ops, w.homeCheck())
	}
	rev, err := w.commit(ctx, ops, obj)
	if err != nil {
		return nil, err
	}
	return w.stored(obj, rev), nil
}

// stored returns obj as it is at rev: the cached one, so that its encodings are
// shared, when the cache is there already.
func (w *write) stored(obj api.Object, rev raftstore.Revision) api.Object {
	if e := w.kc.get(w.key); e != nil && e.rev == rev {
		return e.obj
	}
	return at(w.req.Kind, obj, rev)
}

// commitDelete removes cur and releases what it reserved. The result is the last
// state at the revision of the deletion.
func (w *write) commitDelete(ctx context.Context, cur *entry, last api.Object) (api.Object, error) {
	if last == nil {
		last = cur.obj
	}
	if w.dryRun {
		return last, nil
	}
	ops := append([]raftstore.Op{raftstore.DeleteAt(w.kc.prefix+w.key, cur.rev)}, w.reservationOps(nil, cur.obj)...)
	rev, err := w.commit(ctx, ops, cur.obj)
	if err != nil {
		return nil, err
	}
	return at(w.req.Kind, last, rev), nil
}

// commit proposes the ops. A conflict on a reservation is a refusal that names
// the field, unless admission had picked the value.
func (w *write) commit(ctx context.Context, ops []raftstore.Op, obj api.Object) (raftstore.Revision, error) {
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

// dryPut is the answer of a write that is not made.
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
