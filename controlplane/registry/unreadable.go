package registry

import (
	"context"
	"errors"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/raftstore"
)

// Unreadable is a stored value that cannot be decoded as an object of its kind.
type Unreadable = watchcache.Unreadable

// deleteUnreadable deletes an object with a stored value that cannot be decoded. Its finalizers and
// grace period are unknown and do not delay the deletion. A request with a UID precondition is
// rejected, because the UID is unknown.
func (w *write) deleteUnreadable(ctx context.Context, u *watchcache.Unreadable) (runtime.Object, bool, error) {
	stub := u.Stub()
	if p := w.req.Delete.Preconditions; p != nil {
		if p.UID != nil {
			return nil, false, u.StatusError()
		}
		if err := checkPreconditions(w.req, stub); err != nil {
			return nil, false, err
		}
	}
	ctx, cancel := w.registry.cache.WithTimeout(ctx)
	defer cancel()
	if err := w.runAdmission(ctx, w.startAttempt(api.Delete, nil, stub)); err != nil {
		return nil, false, err
	}
	p := plan{w: w}
	defer p.releaseLocks()
	p.addOp(raftstore.DeleteAt(u.Key, u.Revision))
	for _, key := range w.registry.cache.ReservationKeys(u.Key) {
		p.addOp(raftstore.Delete(key))
	}
	p.addCompanions(stub, false)
	if err := p.addDependencies(ctx); err != nil {
		return nil, false, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
	}
	if w.dryRun {
		return stub, true, nil
	}
	rev, err := p.commitPlan(ctx, nil)
	var conflict *raftstore.ConflictError
	if errors.As(err, &conflict) {
		if err := w.registry.cache.WaitFor(ctx, conflict.At); err != nil {
			return nil, false, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
		}
		return nil, false, apierrors.NewConflict(w.req.Kind.GroupResource(), w.req.Name, storeerrors.ErrModified)
	}
	if err != nil {
		return nil, false, storeerrors.ToStatus(err, storeerrors.DescribeRequest(w.req))
	}
	w.registry.options.Log.Warn("an unreadable object was deleted", "key", u.Key, "user", w.req.User.Name)
	return watchcache.WithRevision(u.Kind, stub, rev), true, nil
}
