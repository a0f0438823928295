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

// plan is what one attempt commits: the object's own op, what belongs to it (reservations, companions), what admission
// asked for (checks, changes), and that the kind is still there. All of it applies, or nothing does.
type plan struct {
	w       *write
	ops     []raftstore.Op
	changes []api.Change
	held    *turn
	assured bool // the cache has been brought to the newest state
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

// companions change with an object that is made or removed.
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

// complete turns what was asked for into ops on what the cache has. A refusal is made of the newest state only.
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

// presence requires the object that the kind lives by.
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

// check requires what admission has seen.
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

// require adds a precondition. A key has one place in a commit: two that are told apart cannot both be met.
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
		// One of the two saw an older state. What is newest is told by the next attempt.
		return &raftstore.ConflictError{Key: key, Want: want, At: p.w.r.Revision()}
	}
	return nil
}

// change writes another object. made holds what earlier changes of the attempt have made of theirs.
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

// keep is a change that leaves the object as it is. That was judged by its state, which must still be that one.
func (p *plan) keep(key string, at raftstore.Precondition, made map[string]api.Object) error {
	if _, changed := made[key]; changed {
		return nil
	}
	return p.require(key, at)
}

// put adds a write, in the place of a check or of an earlier write of the same key.
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
		// Who has the next turn finds what this one wrote. That the cache is late is no failure of what is committed.
		_ = p.w.r.cache.waitFor(ctx, rev)
	}
	return rev, err
}

// maxLost is how often an attempt is repeated because other objects than the written one were changed meanwhile.
const maxLost = 100

// retry waits until the cache has the state that made an attempt fail, without asking the leader.
func (w *write) retry(ctx context.Context, conflict *raftstore.ConflictError) error {
	if conflict.Key != w.fullKey() {
		if w.lost++; w.lost > maxLost {
			return apierrors.NewConflict(w.req.Kind.GroupResource(), w.req.Name,
				errors.New("objects that the request depends on have changed too often meanwhile; please try again"))
		}
	}
	return w.r.cache.waitFor(ctx, conflict.At)
}
