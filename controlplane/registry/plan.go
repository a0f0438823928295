package registry

import (
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/objectmeta"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/raftstore"
)

// plan contains the operations of one commit: the write of the object, its reservations of unique
// values, the writes of other objects, and all preconditions. Preconditions are the checks of
// admission, and that the definition of the kind still exists. The commit is applied completely or
// not at all.
type plan struct {
	w         *write
	ops       []raftstore.Op
	changes   []api.Change
	locks     *heldLocks
	refreshed bool // the cache has been refreshed to the newest state
}

func (p *plan) addOp(ops ...raftstore.Op) { p.ops = append(p.ops, ops...) }

// releaseLocks releases the locks of the plan.
func (p *plan) releaseLocks() { p.w.registry.locks.unlockObjects(p.locks) }

// opIndex returns the index of the operation on a key in p.ops. It returns -1 if the plan has no
// operation on the key.
func (p *plan) opIndex(key string) int {
	return slices.IndexFunc(p.ops, func(o raftstore.Op) bool { return o.Key == key })
}

func (p *plan) wrapError(err error) error {
	return fmt.Errorf("changing another object with %s: %w", storeerrors.DescribeRequest(p.w.req), err)
}

func refKey(s *watchcache.Served, r api.Ref) string { return s.Key(r.Namespace, r.Name) }

// addCompanions adds the writes of other objects that accompany the creation or removal of obj (see
// Companions) to p.changes.
func (p *plan) addCompanions(obj api.Object, created bool) {
	companions := p.w.registry.companions[p.w.req.Kind]
	if companions == nil {
		return
	}
	for _, c := range companions(obj, created, p.w.registry.currentTime()) {
		ref := api.Ref{Kind: p.w.registry.kinds.ByType(c.Object), Namespace: c.Object.GetNamespace(),
			Name: c.Object.GetName()}
		p.changes = append(p.changes, api.Change{Ref: ref, Next: func(stored api.Object) (api.Object, error) {
			return c.Next(stored), nil
		}})
	}
}

// addDependencies adds the operations for the preconditions and for the writes of other objects. It
// locks these objects. The operations are based on cached states. If a state leads to an error, it
// refreshes the cache and tries once more.
func (p *plan) addDependencies(ctx context.Context) error {
	a := &p.w.attempt
	p.changes = append(p.changes, a.Changes()...)
	if len(p.changes) > 0 {
		locks, err := p.w.registry.locks.lockObjects(ctx, p.changes)
		if err != nil {
			return err
		}
		p.locks = locks
	}
	complete := len(p.ops)
	for {
		err := p.addAttempt(a)
		if err == nil || p.refreshed {
			return err
		}
		if _, err := p.w.registry.cache.Refresh(ctx); err != nil {
			return err
		}
		p.ops, p.refreshed = p.ops[:complete], true
	}
}

// addAttempt adds the operations for the definition of the kind, for the checks of the attempt, and
// for p.changes.
func (p *plan) addAttempt(a *api.Attempt) error {
	if err := p.requireDefinition(); err != nil {
		return err
	}
	for _, c := range a.Checks() {
		if err := p.addCheck(c); err != nil {
			return err
		}
	}
	var results map[string]api.Object
	for i := range p.changes {
		if i == 0 {
			results = make(map[string]api.Object, len(p.changes))
		}
		if err := p.addChange(p.changes[i], results); err != nil {
			return err
		}
	}
	return nil
}

// requireDefinition adds the precondition that the definition of the kind (its
// CustomResourceDefinition) still exists. It returns an error if the definition no longer exists.
// Built-in kinds have no definition.
func (p *plan) requireDefinition() error {
	if p.w.served.Kind.Commit.Presence == nil {
		return nil
	}
	ref, uid := p.w.served.Kind.Commit.Presence()
	s := p.w.registry.cache.ByKind(ref.Kind)
	if s == nil {
		return storeerrors.NewNotServed()
	}
	key := refKey(s, ref)
	e := s.Current(key)
	if e == nil || uid != "" && e.Object.GetUID() != uid {
		return storeerrors.NewNotServed()
	}
	return p.requireState(s.Storage().Prefix+key, raftstore.Precondition{Revision: e.Revision})
}

// addCheck adds the precondition that an object is still in the state that admission read.
// check.Seen is that state, nil if the object did not exist.
func (p *plan) addCheck(check api.Check) error {
	s := p.w.registry.cache.ByKind(check.Kind)
	if s == nil {
		return p.wrapError(errors.New("its kind is not served"))
	}
	want := raftstore.Precondition{Absent: check.Seen == nil}
	if check.Seen != nil {
		rev, err := storedform.ParseRevision(check.Seen.GetResourceVersion())
		if err != nil || rev == 0 {
			return p.wrapError(fmt.Errorf("invalid resourceVersion %q of the object that was read",
				check.Seen.GetResourceVersion()))
		}
		want.Revision = rev
	}
	return p.requireState(s.Storage().Prefix+refKey(s, check.Ref), want)
}

// requireState adds a precondition on a key. A commit has only one operation per key, so two
// different preconditions on a key cannot both be added. In that case, it returns a ConflictError.
func (p *plan) requireState(key string, want raftstore.Precondition) error {
	i := p.opIndex(key)
	if i < 0 {
		p.addOp(raftstore.Op{Kind: raftstore.OpCheck, Key: key, If: want})
		return nil
	}
	if p.ops[i].If == (raftstore.Precondition{}) {
		p.ops[i].If = want
	}
	if p.ops[i].If != want {
		// One of the two preconditions is based on an older state. The next attempt uses the newest
		// state.
		return &raftstore.ConflictError{Key: key, Want: want, At: p.w.registry.Revision()}
	}
	return nil
}

// addChange calls change.Next with another object and adds the write of its result. results
// contains the results of earlier changes of the attempt, by key. The result of this change is
// added to it.
func (p *plan) addChange(change api.Change, results map[string]api.Object) error {
	s := p.w.registry.cache.ByKind(change.Kind)
	if s == nil {
		return p.wrapError(errors.New("its kind is not served"))
	}
	key := refKey(s, change.Ref)
	full := s.Storage().Prefix + key
	if full == p.w.fullKey() {
		return p.wrapError(errors.New("the changed object is the object of the request"))
	}
	var stored api.Object
	var condition raftstore.Precondition
	cur, bad := s.Lookup(key)
	switch {
	case cur != nil:
		object, err := s.CompleteObject(cur)
		if err != nil {
			return p.wrapError(err)
		}
		stored, condition.Revision = object, cur.Revision
	case bad != nil:
		condition.Revision = bad.Revision
	default:
		condition.Absent = true
	}
	input := stored
	if earlier, ok := results[full]; ok {
		input = earlier
	}
	next, err := change.Next(input)
	if err != nil {
		var status apierrors.APIStatus
		if errors.As(err, &status) {
			return err
		}
		return p.wrapError(err)
	}
	if next == input && (next != nil || bad == nil) {
		return p.requireUnchanged(full, condition, results)
	}
	results[full] = next
	op := raftstore.Op{Kind: raftstore.OpDelete, Key: full, If: condition}
	switch {
	case next == nil && condition.Absent:
		op.Kind = raftstore.OpCheck
	case next != nil:
		op.Kind, op.TTL = raftstore.OpPut, s.Kind.Commit.TTL
		s.Kind.SetTypeMeta(next)
		if stored == nil {
			objectmeta.InitMeta(next, p.w.registry.newUID(), p.w.registry.currentTime())
		} else {
			objectmeta.KeepMeta(next, stored)
		}
		next.SetResourceVersion("")
		if op.Value, err = s.Codec().Encode(next); err != nil {
			return p.wrapError(err)
		}
	}
	return p.addWrite(op)
}

// requireUnchanged adds the operation for a change that leaves its object as it is: the
// precondition that the object still has the state that was read, because the decision depends on
// that state. It adds nothing if an earlier change of the attempt wrote the object: that write
// already has the precondition.
func (p *plan) requireUnchanged(key string, readState raftstore.Precondition, results map[string]api.Object) error {
	if _, changed := results[key]; changed {
		return nil
	}
	return p.requireState(key, readState)
}

// addWrite adds a write operation. It replaces a check or an earlier write of the same key, and
// returns a ConflictError if their preconditions differ.
func (p *plan) addWrite(op raftstore.Op) error {
	i := p.opIndex(op.Key)
	if i < 0 {
		p.addOp(op)
		return nil
	}
	if p.ops[i].If != op.If {
		return &raftstore.ConflictError{Key: op.Key, Want: op.If, At: p.w.registry.Revision()}
	}
	p.ops[i] = op
	return nil
}

// commitPlan commits the operations of the plan and returns the revision of the commit. If the plan
// holds locks, it first waits until the cache has that revision. obj is the written object.
func (p *plan) commitPlan(ctx context.Context, obj api.Object) (raftstore.Revision, error) {
	rev, err := p.w.commitOps(ctx, p.ops, obj)
	if err == nil && p.locks != nil {
		// The next write of the locked objects must see this write in the cache. If the wait fails,
		// the commit is valid nevertheless.
		_ = p.w.registry.cache.WaitFor(ctx, rev)
	}
	return rev, err
}

// maxDependencyConflicts is the maximum number of retries of a write after conflicts on objects
// other than the written object.
const maxDependencyConflicts = 100

// waitForConflict waits until the cache has the revision that caused a conflict, so that the write
// can be retried. It sends no request to the leader. It returns an error (409) after
// maxDependencyConflicts conflicts on objects other than the written object.
func (w *write) waitForConflict(ctx context.Context, conflict *raftstore.ConflictError) error {
	if conflict.Key != w.fullKey() {
		if w.dependencyConflicts++; w.dependencyConflicts > maxDependencyConflicts {
			return apierrors.NewConflict(w.req.Kind.GroupResource(), w.req.Name,
				errors.New("objects that the request depends on changed too often during the request; "+
					"please try again"))
		}
	}
	return w.registry.cache.WaitFor(ctx, conflict.At)
}
