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

	"keelson.dev/keelson/controlplane/api"
)

// deleteWorkers bounds the concurrent deletions of a collection.
const deleteWorkers = 16

// Delete removes an object, or marks it as terminating if it has finalizers or a grace period.
// deleted reports whether it was removed.
func (r *Registry) Delete(ctx context.Context, req *api.Request, a Admission) (obj runtime.Object, deleted bool, err error) {
	if err := checkDeleteOptions(&req.Delete); err != nil {
		return nil, false, err
	}
	w, err := r.newWrite(ctx, req, a, req.Delete.DryRun, "")
	if err != nil {
		return nil, false, err
	}
	stored, deleted, err := w.change(ctx, func(ctx context.Context, cur current) (outcome, error) {
		if err := checkPreconditions(req, cur.obj); err != nil {
			return outcome{}, err
		}
		out := planDelete(req.Kind, cur.obj, &req.Delete, r.now())
		t := w.begin(api.Delete, nil, cur.obj)
		t.Removes = out.remove
		if err := w.judge(ctx, t); err != nil {
			return outcome{}, err
		}
		return out, nil
	})
	if w.broken != nil {
		return w.deleteUnreadable(ctx, w.broken)
	}
	if err != nil {
		return nil, false, err
	}
	if o := &req.Delete; req.Kind.DeleteWarning != "" && o.PropagationPolicy == nil && o.OrphanDependents == nil {
		api.Warn(ctx, req.Kind.DeleteWarning)
	}
	return stored, deleted, nil
}

func checkDeleteOptions(o *metav1.DeleteOptions) error {
	if errs := metav1validation.ValidateDeleteOptions(o); len(errs) > 0 {
		return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "DeleteOptions"}, "", errs)
	}
	return nil
}

// CheckDelete returns the error of invalid delete options or of a failed precondition for cur.
func CheckDelete(req *api.Request, cur api.Object) error {
	if err := checkDeleteOptions(&req.Delete); err != nil {
		return err
	}
	return checkPreconditions(req, cur)
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
			fmt.Errorf("Precondition failed: ResourceVersion in precondition: %v, ResourceVersion in object meta: %v", *p.ResourceVersion, cur.GetResourceVersion()))
	}
	return nil
}

// planDelete returns the outcome of a deletion: no change (already terminating), an object that is
// marked as terminating, or removal.
func planDelete(k *api.Kind, cur api.Object, o *metav1.DeleteOptions, now time.Time) outcome {
	obj := cur.DeepCopyObject().(api.Object)
	obj.SetFinalizers(dependentFinalizers(cur.GetFinalizers(), o, k.Propagation))
	if cur.GetDeletionTimestamp() == nil {
		obj.SetFinalizers(withFinalizers(obj.GetFinalizers(), k.DeleteFinalizers))
	}
	pending := len(obj.GetFinalizers()) > 0 || len(specFinalizers(obj)) > 0
	var grace int64
	if k.GracePeriod != nil {
		grace = max(0, k.GracePeriod(cur, o.GracePeriodSeconds))
	}
	if cur.GetDeletionTimestamp() != nil {
		return planShorter(k, obj, cur, o, grace, pending)
	}
	if grace == 0 && !pending {
		return outcome{remove: true}
	}
	markDeleted(obj, now, grace)
	if cur.GetGeneration() > 0 {
		obj.SetGeneration(cur.GetGeneration() + 1)
	}
	if k.PrepareDelete != nil {
		k.PrepareDelete(obj)
	}
	return outcome{obj: obj}
}

// withFinalizers returns have plus the missing elements of more.
func withFinalizers(have, more []string) []string {
	out := slices.Clone(have)
	for _, f := range more {
		if !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	return out
}

// planShorter returns the outcome of a deletion of an object that is already terminating. Its grace
// period may become shorter and its finalizers may change. It is removed when nothing holds it.
func planShorter(k *api.Kind, obj, cur api.Object, o *metav1.DeleteOptions, grace int64, pending bool) outcome {
	left := cur.GetDeletionGracePeriodSeconds()
	asked := o.GracePeriodSeconds != nil
	switch {
	case left == nil || *left == 0:
		if !pending {
			return outcome{remove: true}
		}
	case asked && grace < *left:
		if grace == 0 && !pending {
			return outcome{remove: true}
		}
		began := cur.GetDeletionTimestamp().Add(-time.Duration(*left) * time.Second)
		markDeleted(obj, began, grace)
	}
	if slices.Equal(obj.GetFinalizers(), cur.GetFinalizers()) && *deref(obj.GetDeletionGracePeriodSeconds()) == *deref(left) {
		return outcome{}
	}
	return outcome{obj: obj}
}

func deref(p *int64) *int64 {
	if p == nil {
		return new(int64)
	}
	return p
}

func markDeleted(obj api.Object, from time.Time, grace int64) {
	at := seconds(from.Add(time.Duration(grace) * time.Second))
	obj.SetDeletionTimestamp(&at)
	obj.SetDeletionGracePeriodSeconds(&grace)
}

// dependentFinalizers returns the finalizers for the propagation policy (orphan or foreground). The
// garbage collector handles and removes them. Background needs none. usual is the kind's default
// policy.
func dependentFinalizers(have []string, o *metav1.DeleteOptions, usual metav1.DeletionPropagation) []string {
	orphan := slices.Contains(have, metav1.FinalizerOrphanDependents)
	foreground := slices.Contains(have, metav1.FinalizerDeleteDependents)
	if !orphan && !foreground {
		orphan, foreground = usual == metav1.DeletePropagationOrphan, usual == metav1.DeletePropagationForeground
	}
	switch {
	case o.OrphanDependents != nil:
		orphan, foreground = *o.OrphanDependents, false
	case o.PropagationPolicy != nil:
		orphan = *o.PropagationPolicy == metav1.DeletePropagationOrphan
		foreground = *o.PropagationPolicy == metav1.DeletePropagationForeground
	}
	var out []string
	for _, f := range have {
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
	if slices.Equal(out, have) {
		return have
	}
	return out
}

// finished reports whether a terminating object can be removed: it has no finalizer and no
// remaining grace period.
func finished(obj api.Object) bool {
	if obj.GetDeletionTimestamp() == nil || len(obj.GetFinalizers()) > 0 || len(specFinalizers(obj)) > 0 {
		return false
	}
	return *deref(obj.GetDeletionGracePeriodSeconds()) == 0
}

// DeleteCollection deletes all objects that match the request's list options. It returns the
// removed and the marked objects. Each object is admitted separately.
func (r *Registry) DeleteCollection(ctx context.Context, req *api.Request, a Admission) (runtime.Object, error) {
	if err := checkDeleteOptions(&req.Delete); err != nil {
		return nil, err
	}
	list := *req
	list.Verb, list.Pointers, list.Light = api.VerbList, true, true
	found, err := r.List(ctx, &list)
	if err != nil {
		return nil, err
	}
	matches := found.(*api.ObjectList)
	victims := make([]*api.Request, 0, len(matches.Items))
	for _, o := range matches.Items {
		uid := o.GetUID()
		victims = append(victims, oneOf(req, o.GetNamespace(), o.GetName(), metav1.Preconditions{UID: &uid}))
	}
	unreadable, err := r.unreadableOf(ctx, req)
	if err != nil {
		return nil, err
	}
	for _, u := range unreadable {
		rev := formatRevision(u.Revision)
		victims = append(victims, oneOf(req, u.Namespace, u.Name, metav1.Preconditions{ResourceVersion: &rev}))
	}
	gone := make([]api.Object, len(victims))
	group, inner := errgroup.WithContext(ctx)
	group.SetLimit(deleteWorkers)
	for i, one := range victims {
		group.Go(func() error {
			obj, _, err := r.Delete(inner, one, a)
			if err != nil {
				if apierrors.IsNotFound(err) || isOtherObject(err) {
					return nil
				}
				return err
			}
			gone[i] = obj.(api.Object)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, statusError(err, describe(req))
	}
	gone = slices.DeleteFunc(gone, func(o api.Object) bool { return o == nil })
	for i, o := range gone {
		gone[i] = req.Kind.Shown(o)
	}
	return typedList(req.Kind, metav1.ListMeta{ResourceVersion: matches.ResourceVersion}, gone)
}

// oneOf returns the request that deletes one listed object of a collection, with its UID as
// precondition.
func oneOf(req *api.Request, namespace, name string, p metav1.Preconditions) *api.Request {
	one := *req
	one.Stages = nil // the stage timer must not be used by several goroutines
	one.Namespace, one.Name = namespace, name
	one.Delete = *req.Delete.DeepCopy()
	one.Delete.Preconditions = &p
	return &one
}

// unreadableOf returns the unreadable objects to delete with a collection. With selectors or paging
// it returns none.
func (r *Registry) unreadableOf(ctx context.Context, req *api.Request) ([]*Unreadable, error) {
	f, err := newFilter(req, &req.List)
	if err != nil || f.selective() || req.List.Limit > 0 || req.List.Continue != "" {
		return nil, err
	}
	s, err := r.served(ctx, req)
	if err != nil {
		return nil, err
	}
	return s.snap.Load().unreadable.within(f), nil
}

// isOtherObject reports whether the listed object was replaced by another one of the same name.
func isOtherObject(err error) bool {
	var s *apierrors.StatusError
	return errors.As(err, &s) && s.ErrStatus.Reason == metav1.StatusReasonConflict
}
