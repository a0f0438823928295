package registry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/objectmeta"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/controlplane/registry/watchcache"
)

// deleteWorkers is the number of objects that DeleteCollection deletes concurrently.
const deleteWorkers = 16

// Delete removes an object, or marks it as terminating if it has finalizers or a grace period.
// deleted reports whether the object was removed.
func (r *Registry) Delete(ctx context.Context, req *api.Request, a Admission) (
	obj runtime.Object, deleted bool, err error,
) {
	if err := checkDeleteOptions(&req.Delete); err != nil {
		return nil, false, err
	}
	w, err := r.newWrite(ctx, req, a, req.Delete.DryRun, "")
	if err != nil {
		return nil, false, err
	}
	stored, deleted, err := w.changeObject(ctx, func(ctx context.Context, cur current) (outcome, error) {
		if err := checkPreconditions(req, cur.obj); err != nil {
			return outcome{}, err
		}
		out := planDelete(req.Kind, cur.obj, &req.Delete, r.currentTime())
		a := w.startAttempt(api.Delete, nil, cur.obj)
		a.Removes = out.remove
		if err := w.runAdmission(ctx, a); err != nil {
			return outcome{}, err
		}
		return out, nil
	})
	if w.unreadable != nil {
		return w.deleteUnreadable(ctx, w.unreadable)
	}
	if err != nil {
		return nil, false, err
	}
	if o := &req.Delete; req.Kind.Deletion.Warning != "" && o.PropagationPolicy == nil && o.OrphanDependents == nil {
		api.Warn(ctx, req.Kind.Deletion.Warning)
	}
	return stored, deleted, nil
}

func checkDeleteOptions(o *metav1.DeleteOptions) error {
	if errs := metav1validation.ValidateDeleteOptions(o); len(errs) > 0 {
		return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "DeleteOptions"}, "", errs)
	}
	return nil
}

// CheckDelete returns an error if the delete options are invalid, or if the stored object does not
// satisfy their preconditions.
func CheckDelete(req *api.Request, stored api.Object) error {
	if err := checkDeleteOptions(&req.Delete); err != nil {
		return err
	}
	return checkPreconditions(req, stored)
}

func checkPreconditions(req *api.Request, cur api.Object) error {
	p := req.Delete.Preconditions
	if p == nil {
		return nil
	}
	if p.UID != nil && *p.UID != cur.GetUID() {
		return apierrors.NewConflict(req.Kind.GroupResource(), req.Name,
			fmt.Errorf("Precondition failed: UID in precondition: %v, UID in object meta: %v", *p.UID, cur.GetUID()))
	}
	if p.ResourceVersion != nil && *p.ResourceVersion != cur.GetResourceVersion() {
		return apierrors.NewConflict(req.Kind.GroupResource(), req.Name,
			fmt.Errorf("Precondition failed: ResourceVersion in precondition: %v, ResourceVersion in object meta: %v",
				*p.ResourceVersion, cur.GetResourceVersion()))
	}
	return nil
}

// planDelete returns the outcome of a deletion: the removal of the object, the object marked as
// terminating, or no change. cur is the stored object and is not modified.
func planDelete(k *api.Kind, cur api.Object, o *metav1.DeleteOptions, now time.Time) outcome {
	obj := cur.DeepCopyObject().(api.Object)
	obj.SetFinalizers(dependentFinalizers(cur.GetFinalizers(), o, k.Deletion.Propagation))
	if cur.GetDeletionTimestamp() == nil {
		obj.SetFinalizers(withFinalizers(obj.GetFinalizers(), k.Deletion.Finalizers))
	}
	pending := len(obj.GetFinalizers()) > 0 || len(objectmeta.SpecFinalizers(obj)) > 0
	var grace int64
	if k.Deletion.GracePeriod != nil {
		grace = max(0, k.Deletion.GracePeriod(cur, o.GracePeriodSeconds))
	}
	if cur.GetDeletionTimestamp() != nil {
		return planRepeatedDelete(k, obj, cur, o, grace, pending)
	}
	if grace == 0 && !pending {
		return outcome{remove: true}
	}
	markDeleted(obj, now, grace)
	if cur.GetGeneration() > 0 {
		obj.SetGeneration(cur.GetGeneration() + 1)
	}
	if k.Deletion.Prepare != nil {
		k.Deletion.Prepare(obj)
	}
	return outcome{obj: obj}
}

// withFinalizers returns the finalizers, followed by the additional finalizers that they do not
// contain.
func withFinalizers(finalizers, additional []string) []string {
	out := slices.Clone(finalizers)
	for _, f := range additional {
		if !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out
}

// planRepeatedDelete returns the outcome of a deletion of an object that is already terminating.
// obj is a copy of the stored object cur, with the new finalizers. grace is the requested grace
// period; it is used only if it is shorter than the current grace period. The object is removed if
// its grace period is zero and it has no finalizers (pending is false).
func planRepeatedDelete(k *api.Kind, obj, cur api.Object, o *metav1.DeleteOptions, grace int64, pending bool) outcome {
	left := cur.GetDeletionGracePeriodSeconds()
	requested := o.GracePeriodSeconds != nil
	switch {
	case left == nil || *left == 0:
		if !pending {
			return outcome{remove: true}
		}
	case requested && grace < *left:
		if grace == 0 && !pending {
			return outcome{remove: true}
		}
		started := cur.GetDeletionTimestamp().Add(-time.Duration(*left) * time.Second)
		markDeleted(obj, started, grace)
	}
	if slices.Equal(obj.GetFinalizers(), cur.GetFinalizers()) &&
		ptr.Deref(obj.GetDeletionGracePeriodSeconds(), 0) == ptr.Deref(left, 0) {
		return outcome{}
	}
	return outcome{obj: obj}
}

func markDeleted(obj api.Object, started time.Time, grace int64) {
	at := objectmeta.ToSeconds(started.Add(time.Duration(grace) * time.Second))
	obj.SetDeletionTimestamp(&at)
	obj.SetDeletionGracePeriodSeconds(&grace)
}

// dependentFinalizers returns the finalizers of an object to be deleted, with the finalizer of the
// propagation policy (orphan or foreground). The garbage collector processes and removes that
// finalizer. Background propagation needs no finalizer. kindPolicy is the kind's default policy.
func dependentFinalizers(finalizers []string, o *metav1.DeleteOptions, kindPolicy metav1.DeletionPropagation) []string {
	orphan := slices.Contains(finalizers, metav1.FinalizerOrphanDependents)
	foreground := slices.Contains(finalizers, metav1.FinalizerDeleteDependents)
	if !orphan && !foreground {
		orphan, foreground = kindPolicy == metav1.DeletePropagationOrphan,
			kindPolicy == metav1.DeletePropagationForeground
	}
	switch {
	case o.OrphanDependents != nil:
		orphan, foreground = *o.OrphanDependents, false
	case o.PropagationPolicy != nil:
		orphan = *o.PropagationPolicy == metav1.DeletePropagationOrphan
		foreground = *o.PropagationPolicy == metav1.DeletePropagationForeground
	}
	var out []string
	for _, f := range finalizers {
		if f != metav1.FinalizerOrphanDependents && f != metav1.FinalizerDeleteDependents {
			out = append(out, f)
		}
	}
	if orphan {
		out = append(out, metav1.FinalizerOrphanDependents)
	}
	if foreground {
		out = append(out, metav1.FinalizerDeleteDependents)
	}
	if slices.Equal(out, finalizers) {
		return finalizers
	}
	return out
}

// isRemovable reports whether a terminating object can be removed: it has no finalizer and no
// remaining grace period.
func isRemovable(obj api.Object) bool {
	if obj.GetDeletionTimestamp() == nil || len(obj.GetFinalizers()) > 0 || len(objectmeta.SpecFinalizers(obj)) > 0 {
		return false
	}
	return ptr.Deref(obj.GetDeletionGracePeriodSeconds(), 0) == 0
}

// DeleteCollection deletes all objects that match the request's list options. It returns the
// objects that were removed and those that were marked as terminating. Each object is admitted
// separately.
func (r *Registry) DeleteCollection(ctx context.Context, req *api.Request, a Admission) (runtime.Object, error) {
	if err := checkDeleteOptions(&req.Delete); err != nil {
		return nil, err
	}
	list := *req
	list.Verb, list.Internal.Pointers, list.Internal.Light = api.VerbList, true, true
	found, err := r.List(ctx, &list)
	if err != nil {
		return nil, err
	}
	matches := found.(*api.ObjectList)
	requests := make([]*api.Request, 0, len(matches.Items))
	for _, o := range matches.Items {
		uid := o.GetUID()
		requests = append(requests, deleteRequest(req, o.GetNamespace(), o.GetName(), metav1.Preconditions{UID: &uid}))
	}
	unreadable, err := r.unreadableObjects(ctx, req)
	if err != nil {
		return nil, err
	}
	for _, u := range unreadable {
		rev := storedform.FormatRevision(u.Revision)
		requests = append(requests, deleteRequest(req, u.Namespace, u.Name,
			metav1.Preconditions{ResourceVersion: &rev}))
	}
	deletedObjects := make([]api.Object, len(requests))
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(deleteWorkers)
	for i, one := range requests {
		group.Go(func() error {
			obj, _, err := r.Delete(groupCtx, one, a)
			if err != nil {
				if apierrors.IsNotFound(err) || isReplaced(err) {
					return nil
				}
				return err
			}
			deletedObjects[i] = obj.(api.Object)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, storeerrors.ToStatus(err, storeerrors.DescribeRequest(req))
	}
	deletedObjects = slices.DeleteFunc(deletedObjects, func(o api.Object) bool { return o == nil })
	for i, o := range deletedObjects {
		deletedObjects[i] = req.Kind.ClientView(o)
	}
	return watchcache.TypedList(req.Kind, metav1.ListMeta{ResourceVersion: matches.ResourceVersion}, deletedObjects)
}

// deleteRequest returns the request that deletes one object of a collection, with the preconditions
// p: the UID, or the resourceVersion of an unreadable object.
func deleteRequest(req *api.Request, namespace, name string, p metav1.Preconditions) *api.Request {
	one := *req
	one.Client.Stages = nil // the stage timer must not be used by several goroutines
	one.Namespace, one.Name = namespace, name
	one.Delete = *req.Delete.DeepCopy()
	one.Delete.Preconditions = &p
	return &one
}

// unreadableObjects returns the unreadable objects (their stored values cannot be decoded) that
// DeleteCollection deletes. It returns nil if the request has selectors or paging.
func (r *Registry) unreadableObjects(ctx context.Context, req *api.Request) ([]*watchcache.Unreadable, error) {
	if req.List.Limit > 0 || req.List.Continue != "" {
		return nil, nil
	}
	return r.UnreadableIn(ctx, req)
}

// isReplaced reports whether err is a conflict. DeleteCollection gets a conflict if another object
// with the same name has replaced the listed object.
func isReplaced(err error) bool {
	var s *apierrors.StatusError
	return errors.As(err, &s) && s.ErrStatus.Reason == metav1.StatusReasonConflict
}
