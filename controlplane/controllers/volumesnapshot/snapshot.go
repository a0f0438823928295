package volumesnapshot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// reconcileSnapshot binds VolumeSnapshot s to its content and copies the status of the content to
// s. It returns the delay until the next attempt; 0 means none.
func (r *reconciler) reconcileSnapshot(ctx context.Context, s snapshot) (_ time.Duration, err error) {
	if s.Typed.DeletionTimestamp != nil {
		return r.finalizeSnapshot(ctx, s)
	}
	if !slices.Contains(s.Typed.Finalizers, boundFinalizer) || !slices.Contains(s.Typed.Finalizers, sourceFinalizer) {
		if s, err = writeChange(ctx, r, s, func(o *custom.Object) {
			for _, f := range []string{boundFinalizer, sourceFinalizer} {
				if !slices.Contains(o.Finalizers, f) {
					o.Finalizers = append(o.Finalizers, f)
				}
			}
		}); err != nil {
			return 0, err
		}
	}
	var c *snap.VolumeSnapshotContent
	if s.Typed.Spec.Source.VolumeSnapshotContentName != nil {
		c, err = r.staticContent(ctx, s)
	} else {
		s, c, err = r.dynamicContent(ctx, s)
	}
	if apierrors.IsConflict(err) {
		return 0, err
	}
	if err != nil {
		return retryInterval, r.recordError(ctx, s.Object, "SnapshotContentMissing", err.Error())
	}
	return 0, r.copyContentStatus(ctx, s, c)
}

// staticContent returns the pre-provisioned content that VolumeSnapshot s names, and binds it to s.
func (r *reconciler) staticContent(ctx context.Context, s snapshot) (*snap.VolumeSnapshotContent, error) {
	name := *s.Typed.Spec.Source.VolumeSnapshotContentName
	c, err := findContent[snap.VolumeSnapshotContent](ctx, r, ofSnapshots, name)
	switch {
	case err != nil:
		return nil, err
	case c == nil:
		return nil, fmt.Errorf("VolumeSnapshotContent %s does not exist", name)
	}
	if err := checkOwnership(s.Typed, c.Typed); err != nil {
		return nil, err
	}
	bound, err := bindContent(ctx, r, ofSnapshots, *c, c.Typed.Spec.VolumeSnapshotRef, s.Typed.UID)
	return bound.Typed, err
}

// dynamicContent returns the content of VolumeSnapshot s, the source of which is a claim. It
// creates the content if necessary. It also returns the version of s that was stored last.
func (r *reconciler) dynamicContent(ctx context.Context, s snapshot) (snapshot, *snap.VolumeSnapshotContent, error) {
	c, err := findContent[snap.VolumeSnapshotContent](ctx, r, ofSnapshots, contentName(s.Typed))
	if err != nil {
		return s, nil, err
	}
	if c != nil {
		return s, c.Typed, checkOwnership(s.Typed, c.Typed)
	}
	if slices.Contains(s.Typed.Finalizers, memberFinalizer) {
		return s, nil, errors.New("its group has not created its VolumeSnapshotContent yet")
	}
	if s.Typed.Status != nil && s.Typed.Status.BoundVolumeSnapshotContentName != nil {
		return s, nil, fmt.Errorf("VolumeSnapshotContent %s no longer exists: it was deleted while it was in use",
			*s.Typed.Status.BoundVolumeSnapshotContentName)
	}
	name := *s.Typed.Spec.Source.PersistentVolumeClaimName
	claim, err := client.Get[*corev1.PersistentVolumeClaim](ctx, r.term.Client, s.Typed.Namespace, name)
	if err != nil {
		return s, nil, fmt.Errorf("PersistentVolumeClaim %s cannot be read: %w", name, err)
	}
	v, err := r.volumeOf(ctx, claim)
	if err != nil {
		return s, nil, err
	}
	class, err := chooseClass(ctx, r, ofSnapshots, s.Typed.Spec.VolumeSnapshotClassName, v.Spec.CSI.Driver, classOf)
	if err != nil {
		return s, nil, err
	}
	if s, err = withClass(ctx, r, ofSnapshots, s, s.Typed.Spec.VolumeSnapshotClassName, class); err != nil {
		return s, nil, err
	}
	made, err := contentOf(s.Typed, class, v)
	if err != nil {
		return s, nil, err
	}
	if err := r.protectClaim(ctx, claim); err != nil {
		return s, nil, err
	}
	return s, made, r.createContent(ctx, made)
}

func (r *reconciler) createContent(ctx context.Context, c *snap.VolumeSnapshotContent) error {
	_, err := r.createObject(ctx, "VolumeSnapshotContent", c)
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// createObject creates an object of one of the snapshot kinds without a status, and returns it as
// stored.
func (r *reconciler) createObject(ctx context.Context, kind string, typed metav1.Object) (*custom.Object, error) {
	k := r.snapshotKind(kind)
	if k == nil {
		return nil, fmt.Errorf("%s is no longer served", kind)
	}
	m, err := runtime.DefaultUnstructuredConverter.ToUnstructured(typed)
	if err != nil {
		return nil, fmt.Errorf("making %s %s: %w", kind, typed.GetName(), err)
	}
	m["apiVersion"], m["kind"] = k.GVK.GroupVersion().String(), k.GVK.Kind
	delete(m, "status")
	o, err := custom.FromMap(m)
	if err != nil {
		return nil, fmt.Errorf("making %s %s: %w", kind, typed.GetName(), err)
	}
	made, err := r.term.Client.Do(ctx,
		&api.Request{Verb: api.VerbCreate, Kind: k, Namespace: typed.GetNamespace(), Object: o})
	if err != nil {
		return nil, err
	}
	return made.(*custom.Object), nil
}

// copyContentStatus copies the status of content c to VolumeSnapshot s. Once the snapshot was
// taken, it removes claimFinalizer from the claim if no other snapshot needs it.
func (r *reconciler) copyContentStatus(ctx context.Context, s snapshot, c *snap.VolumeSnapshotContent) error {
	next := statusOf(s.Typed, c)
	if !equality.Semantic.DeepEqual(s.Typed.Status, next) {
		if next.ReadyToUse != nil && *next.ReadyToUse && !engine.IsSnapshotReady(s.Typed) {
			r.recordEvent(s.Object, corev1.EventTypeNormal, "SnapshotReady",
				fmt.Sprintf("Snapshot %s is ready to use", engine.KeyOf(s.Object)))
		}
		if err := r.writeStatus(ctx, s.Object, next); err != nil {
			return err
		}
	}
	if c.Status == nil || c.Status.CreationTime == nil {
		return nil // the snapshot was not taken yet
	}
	return r.unprotectClaim(ctx, s.Typed)
}

// statusOf returns the new status of VolumeSnapshot s for the status of its content c.
func statusOf(s *snap.VolumeSnapshot, c *snap.VolumeSnapshotContent) *snap.VolumeSnapshotStatus {
	next := &snap.VolumeSnapshotStatus{}
	if s.Status != nil {
		next = s.Status.DeepCopy()
	}
	no := false
	next.BoundVolumeSnapshotContentName, next.ReadyToUse, next.Error = &c.Name, &no, nil
	if c.Status == nil {
		return next
	}
	if t := c.Status.CreationTime; t != nil {
		at := metav1.NewTime(time.Unix(0, *t).Truncate(time.Second))
		if next.CreationTime == nil || !next.CreationTime.Equal(&at) {
			next.CreationTime = &at
		}
	}
	for _, o := range s.OwnerReferences {
		if o.Kind == "VolumeGroupSnapshot" && slices.Contains(s.Finalizers, memberFinalizer) {
			next.VolumeGroupSnapshotName = &o.Name
		}
	}
	if n := c.Status.RestoreSize; n != nil {
		next.RestoreSize = resource.NewQuantity(*n, resource.BinarySI)
	}
	if c.Status.ReadyToUse != nil {
		next.ReadyToUse = c.Status.ReadyToUse
	}
	next.Error = c.Status.Error
	return next
}

// unprotectClaim removes claimFinalizer from the claim of VolumeSnapshot s, unless another snapshot
// still has to be taken from the claim.
func (r *reconciler) unprotectClaim(ctx context.Context, s *snap.VolumeSnapshot) error {
	name := s.Spec.Source.PersistentVolumeClaimName
	if name == nil {
		return nil
	}
	return r.releaseUnneededClaim(ctx, s.Namespace, *name, func(o *snap.VolumeSnapshot) bool {
		return o.UID != s.UID && o.DeletionTimestamp == nil
	})
}

// reconcileClaim removes claimFinalizer from a claim that no snapshot needs. Usually the deletion
// of the last snapshot removes it, but a user may have removed the snapshot's own finalizers.
func (r *reconciler) reconcileClaim(ctx context.Context, key engine.Key) error {
	c, ok := engine.Cached[*corev1.PersistentVolumeClaim](r.claims, key.Namespace, key.Name)
	if !ok || !slices.Contains(c.Finalizers, claimFinalizer) || !r.isBinder() {
		return nil
	}
	return r.releaseUnneededClaim(ctx, key.Namespace, key.Name, func(*snap.VolumeSnapshot) bool { return true })
}

// releaseUnneededClaim removes claimFinalizer from a claim, unless a snapshot still has to be taken
// from the claim: by a group snapshot, or by a VolumeSnapshot for which counts returns true.
func (r *reconciler) releaseUnneededClaim(
	ctx context.Context, namespace, name string, counts func(*snap.VolumeSnapshot) bool,
) error {
	claim, err := client.Get[*corev1.PersistentVolumeClaim](ctx, r.term.Client, namespace, name)
	if apierrors.IsNotFound(err) || err == nil && !slices.Contains(claim.Finalizers, claimFinalizer) {
		return nil
	}
	if err != nil {
		return err
	}
	all, err := engine.ListTyped[snap.VolumeSnapshot](ctx, r.term.Client, r.snapshotKind("VolumeSnapshot"), namespace)
	if err != nil {
		return err
	}
	for _, one := range all {
		s := one.Typed
		if from := s.Spec.Source.PersistentVolumeClaimName; from != nil && *from == name && counts(s) &&
			(s.Status == nil || s.Status.CreationTime == nil) {
			return nil
		}
	}
	if held, err := r.groups.heldByGroup(ctx, claim); err != nil || held {
		return err
	}
	next := claim.DeepCopy()
	next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == claimFinalizer })
	_, err = client.Update(ctx, r.term.Client, next)
	return err
}

// finalizeSnapshot finalizes VolumeSnapshot s, which is being deleted. If the deletion policy of
// its content is Delete, it deletes the content first. s is kept while a claim is being created
// from it. finalizeSnapshot returns the delay until the next attempt; 0 means none.
func (r *reconciler) finalizeSnapshot(ctx context.Context, s snapshot) (time.Duration, error) {
	if !slices.Contains(s.Typed.Finalizers, boundFinalizer) && !slices.Contains(s.Typed.Finalizers, sourceFinalizer) {
		return 0, nil
	}
	if stays, err := r.groups.staysWithGroup(ctx, s); err != nil || stays {
		return retryInterval, err
	}
	claims, err := client.List[*corev1.PersistentVolumeClaim](ctx, r.term.Client, s.Typed.Namespace,
		metav1.ListOptions{})
	if err != nil {
		return 0, err
	}
	for _, c := range claims {
		if isSourceOf(s.Typed, c) {
			r.recordEvent(s.Object, corev1.EventTypeWarning, "SnapshotDeletePending",
				"the volume of claim "+c.Name+": it is deleted after the claim's volume has been created")
			return retryInterval, nil
		}
	}
	name := ptr.Deref(s.Typed.Spec.Source.VolumeSnapshotContentName, contentName(s.Typed))
	c, err := findContent[snap.VolumeSnapshotContent](ctx, r, ofSnapshots, name)
	if err != nil {
		return 0, err
	}
	if c != nil && c.Typed.Spec.VolumeSnapshotRef.UID == s.Typed.UID {
		stays, err := r.prepareContentDeletion(ctx, *c)
		if err != nil || !stays && c.Typed.Spec.DeletionPolicy == snap.VolumeSnapshotContentDelete {
			return retryInterval, err // the deletion of the content queues the VolumeSnapshot again
		}
	}
	if err := r.unprotectClaim(ctx, s.Typed); err != nil {
		return 0, err
	}
	_, err = r.writeObject(ctx, s.Object, func(o *custom.Object) {
		o.Finalizers = slices.DeleteFunc(o.Finalizers, func(f string) bool {
			return f == boundFinalizer || f == sourceFinalizer || f == memberFinalizer
		})
	})
	return 0, err
}

// prepareContentDeletion adds annotation beingDeleted to content c: its VolumeSnapshot is being
// deleted. It then deletes c if its deletion policy is Delete. Otherwise c is kept and stays is
// true.
func (r *reconciler) prepareContentDeletion(ctx context.Context, c content) (stays bool, err error) {
	o := c.Object
	if !metav1.HasAnnotation(o.ObjectMeta, beingDeleted) {
		if o, err = r.writeObject(ctx, o, func(o *custom.Object) {
			metav1.SetMetaDataAnnotation(&o.ObjectMeta, beingDeleted, "yes")
		}); err != nil {
			return false, err
		}
	}
	if c.Typed.Spec.DeletionPolicy != snap.VolumeSnapshotContentDelete {
		return true, nil
	}
	if o.DeletionTimestamp != nil {
		return false, nil
	}
	return false, r.deleteObject(ctx, o)
}

// deleteOrphanedContent deletes content c if its VolumeSnapshot no longer exists and the deletion
// policy is Delete. It returns c as stored, or the zero content if c no longer exists.
func (r *reconciler) deleteOrphanedContent(ctx context.Context, c content) (content, error) {
	ref := c.Typed.Spec.VolumeSnapshotRef
	if ref.UID == "" || metav1.HasAnnotation(c.Object.ObjectMeta, beingDeleted) && c.Typed.DeletionTimestamp != nil {
		return c, nil
	}
	s, err := engine.GetTyped[snap.VolumeSnapshot](ctx, r.term.Client, r.snapshotKind("VolumeSnapshot"),
		ref.Namespace, ref.Name)
	if err == nil && s.Typed.UID == ref.UID || err != nil && !apierrors.IsNotFound(err) {
		return c, err
	}
	if stays, err := r.prepareContentDeletion(ctx, c); err != nil || stays {
		return c, err
	}
	next, err := findContent[snap.VolumeSnapshotContent](ctx, r, ofSnapshots, c.Typed.Name)
	if next == nil {
		return content{}, err
	}
	return *next, err
}
