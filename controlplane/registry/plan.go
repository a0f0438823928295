package registry

import (
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// plan is the content of one commit. It contains the operation on the object, its reservations and
// companions, and the checks and changes of admission. It also requires that the kind still exists.
// It is applied completely or not at all.
type plan struct {
	w       *write
	ops     []raftstore.Op
	changes []api.Change
	held    *turn
	assured bool // the cache has the newest state
}

func (p *plan) own(op raftstore.Op)     { p.ops = append(p.ops, op) }
func (p *plan) add(ops ...raftstore.Op) { p.ops = append(p.ops, ops...) }
func (p *plan) release()                { p.w.r.turns.leave(p.held) }
func (p *plan) has(key string) (i int) {
	return slices.IndexFunc(p.ops, func(o raftstore.Op) bool { return o.Key == key })
}
func (p *plan) failed(err error) error {
	return fmt.Errorf("changing another object with %s: %w", describe(p.w.req), err)
}
func keyOf(sc *served, r api.Ref) string { return objectKey(sc.kind, r.Namespace, r.Name) }

// companions adds the changes that accompany the creation or removal of an object.
func (p *plan) companions(obj api.Object, made bool) {
	of := p.w.r.companions[p.w.req.Kind]
	if of == nil {
		return
	}
	for _, c := range of(obj, made, p.w.r.now()) {
		ref := api.Ref{Kind: p.w.r.kinds.ByType(c.Object), Namespace: c.Object.GetNamespace(), Name: c.Object.GetName()}
		p.changes = append(p.changes, api.Change{Ref: ref, Next: func(stored api.Object) (api.Object, error) { return c.Next(stored), nil }})
	}
}

// complete adds the operations for all checks and changes, based on the cache. If one of them
// fails, it retries once with the newest state before it returns the error.
func (p *plan) complete(ctx context.Context) error {
	a := &p.w.attempt
	p.changes = append(p.changes, a.Changes()...)
	if len(p.changes) > 0 {
		held, err := p.w.r.turns.enter(ctx, p.changes)
		if err != nil {
			return err
		}
		p.held = held
	}
	own := len(p.ops)
	for {
		err := p.gather(a)
		if err == nil || p.assured {
			return err
		}
		if _, err := p.w.r.fresh(ctx); err != nil {
			return err
		}
		p.ops, p.assured = p.ops[:own], true
	}
}

func (p *plan) gather(a *api.Attempt) error {
	if err := p.presence(); err != nil {
		return err
	}
	for _, c := range a.Checks() {
		if err := p.check(c); err != nil {
			return err
		}
	}
	var made map[string]api.Object
	for i := range p.changes {
		if i == 0 {
			made = make(map[string]api.Object, len(p.changes))
		}
		if err := p.change(p.changes[i], made); err != nil {
			return err
		}
	}
	return nil
}

// presence adds the condition that the definition of the kind still exists.
func (p *plan) presence() error {
	if p.w.kind.Presence == nil {
		return nil
	}
	ref, uid := p.w.kind.Presence()
	sc := p.w.r.cache.routes.Load().byKind[ref.Kind]
	if sc == nil {
		return notServed()
	}
	e := sc.get(keyOf(sc, ref))
	if e == nil || uid != "" && e.obj.GetUID() != uid {
		return notServed()
	}
	return p.require(sc.storage.Prefix+e.key, raftstore.Precondition{Revision: e.rev})
}

// check adds the condition that an object is still as admission has seen it.
func (p *plan) check(c api.Check) error {
	sc := p.w.r.cache.routes.Load().byKind[c.Kind]
	if sc == nil {
		return p.failed(fmt.Errorf("its kind is not served"))
	}
	want := raftstore.Precondition{Absent: c.Seen == nil}
	if c.Seen != nil {
		rev, err := parseRevision(c.Seen.GetResourceVersion())
		if err != nil || rev == 0 {
			return p.failed(fmt.Errorf("%q is no revision that was seen", c.Seen.GetResourceVersion()))
		}
		want.Revision = rev
	}
	return p.require(sc.storage.Prefix+keyOf(sc, c.Ref), want)
}

// require adds a precondition. A commit has one operation per key, so two different preconditions
// on a key are a conflict.
func (p *plan) require(key string, want raftstore.Precondition) error {
	i := p.has(key)
	if i < 0 {
		p.add(raftstore.Op{Kind: raftstore.OpCheck, Key: key, If: want})
		return nil
	}
	if p.ops[i].If == (raftstore.Precondition{}) {
		p.ops[i].If = want
	}
	if p.ops[i].If != want {
		// One of the two is based on an older state. The next attempt uses the newest one.
		return &raftstore.ConflictError{Key: key, Want: want, At: p.w.r.Revision()}
	}
	return nil
}

// change adds a write of another object. made holds the results of earlier changes of the attempt,
// by key.
func (p *plan) change(c api.Change, made map[string]api.Object) error {
	r := p.w.r
	sc := r.cache.routes.Load().byKind[c.Kind]
	if sc == nil {
		return p.failed(fmt.Errorf("its kind is not served"))
	}
	key := keyOf(sc, c.Ref)
	full := sc.storage.Prefix + key
	if full == p.w.fullKey() {
		return p.failed(errors.New("it is the object that is written itself"))
	}
	var stored api.Object
	var at raftstore.Precondition
	cur, bad := sc.find(key)
	switch {
	case cur != nil:
		whole, err := sc.whole(cur)
		if err != nil {
			return p.failed(err)
		}
		stored, at.Revision = whole, cur.rev
	case bad != nil:
		at.Revision = bad.Revision
	default:
		at.Absent = true
	}
	given := stored
	if before, again := made[full]; again {
		given = before
	}
	next, err := c.Next(given)
	if err != nil {
		var status apierrors.APIStatus
		if errors.As(err, &status) {
			return err
		}
		return p.failed(err)
	}
	if next == given && (next != nil || bad == nil) {
		return p.keep(full, at, made)
	}
	made[full] = next
	op := raftstore.Op{Kind: raftstore.OpDelete, Key: full, If: at}
	switch {
	case next == nil && at.Absent:
		op.Kind = raftstore.OpCheck
	case next != nil:
		op.Kind, op.TTL = raftstore.OpPut, sc.kind.TTL
		sc.kind.SetTypeMeta(next)
		if stored == nil {
			r.initMeta(next)
		} else {
			keepMeta(next, stored)
		}
		next.SetResourceVersion("")
		if op.Value, err = sc.codec.encode(next); err != nil {
			return p.failed(err)
		}
	}
	return p.put(op)
}

// keep handles a change that leaves the object as it is. The decision depends on the object's
// state, so that must not change.
func (p *plan) keep(key string, at raftstore.Precondition, made map[string]api.Object) error {
	if _, changed := made[key]; changed {
		return nil
	}
	return p.require(key, at)
}

// put adds a write. It replaces a check or an earlier write of the same key.
func (p *plan) put(op raftstore.Op) error {
	i := p.has(op.Key)
	if i < 0 {
		p.add(op)
		return nil
	}
	if p.ops[i].If != op.If {
		return &raftstore.ConflictError{Key: op.Key, Want: op.If, At: p.w.r.Revision()}
	}
	p.ops[i] = op
	return nil
}

// commit commits the plan.
func (p *plan) commit(ctx context.Context, obj api.Object) (raftstore.Revision, error) {
	rev, err := p.w.commit(ctx, p.ops, obj)
	if err == nil && p.held != nil {
		// The next write of the same objects must see this one in the cache. If the wait fails, the
		// commit is valid nevertheless.
		_ = p.w.r.cache.waitFor(ctx, rev)
	}
	return rev, err
}

// maxLost is the maximum number of retries because other objects than the written one changed.
const maxLost = 100

// retry waits until the cache has the revision that caused a conflict, without a request to the
// leader.
func (w *write) retry(ctx context.Context, conflict *raftstore.ConflictError) error {
	if conflict.Key != w.fullKey() {
		if w.lost++; w.lost > maxLost {
			return apierrors.NewConflict(w.req.Kind.GroupResource(), w.req.Name,
				errors.New("objects that the request depends on have changed too often meanwhile; please try again"))
		}
	}
	return w.r.cache.waitFor(ctx, conflict.At)
}
