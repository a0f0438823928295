package volumesnapshot

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	groups "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// reconcileGroup reconciles the VolumeGroupSnapshot with this key: it binds its content, creates
// the VolumeSnapshots of its volumes, and updates its status. It returns the delay until the next
// attempt; 0 means none.
func (r *groupReconciler) reconcileGroup(ctx context.Context, key engine.Key) (time.Duration, error) {
	if !r.snapshots.isBinder() {
		return 0, nil
	}
	g, err := engine.GetTyped[groups.VolumeGroupSnapshot](ctx, r.snapshots.term.Client,
		r.snapshots.snapshotKind("VolumeGroupSnapshot"), key.Namespace, key.Name)
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if g.Typed.DeletionTimestamp != nil {
		return r.finalizeGroup(ctx, g)
	}
	if !slices.Contains(g.Typed.Finalizers, groupFinalizer) {
		if g, err = writeChange(ctx, r.snapshots, g, func(o *custom.Object) {
			o.Finalizers = append(o.Finalizers, groupFinalizer)
		}); err != nil {
			return 0, err
		}
	}
	var c *groupContent
	if g.Typed.Spec.Source.VolumeGroupSnapshotContentName != nil {
		c, err = r.staticGroupContent(ctx, g)
	} else {
		g, c, err = r.dynamicGroupContent(ctx, g)
	}
	if apierrors.IsConflict(err) {
		return 0, err
	}
	if err != nil {
		return retryInterval, r.snapshots.recordError(ctx, g.Object, "GroupSnapshotContentMissing", err.Error())
	}
	return r.copyGroupStatus(ctx, g, *c)
}

// staticGroupContent returns the pre-provisioned VolumeGroupSnapshotContent that
// VolumeGroupSnapshot g names, and binds it to g.
func (r *groupReconciler) staticGroupContent(ctx context.Context, g group) (*groupContent, error) {
	name := *g.Typed.Spec.Source.VolumeGroupSnapshotContentName
	c, err := findContent[groups.VolumeGroupSnapshotContent](ctx, r.snapshots, ofGroups, name)
	switch {
	case err != nil:
		return nil, err
	case c == nil:
		return nil, fmt.Errorf("VolumeGroupSnapshotContent %s does not exist", name)
	}
	if err := checkGroupOwnership(g.Typed, c.Typed); err != nil {
		return nil, err
	}
	bound, err := bindContent(ctx, r.snapshots, ofGroups, *c, c.Typed.Spec.VolumeGroupSnapshotRef, g.Typed.UID)
	return &bound, err
}

// dynamicGroupContent returns the VolumeGroupSnapshotContent for VolumeGroupSnapshot g, which
// selects claims by labels. It creates the content if necessary. Before that it adds a finalizer to
// the claims, which keeps them until the group snapshot is taken. It also returns the version of g
// that was stored last.
func (r *groupReconciler) dynamicGroupContent(ctx context.Context, g group) (group, *groupContent, error) {
	c, err := findContent[groups.VolumeGroupSnapshotContent](ctx, r.snapshots, ofGroups, groupContentName(g.Typed.UID))
	if err != nil {
		return g, nil, err
	}
	if c != nil {
		return g, c, checkGroupOwnership(g.Typed, c.Typed)
	}
	if g.Typed.Status != nil && g.Typed.Status.BoundVolumeGroupSnapshotContentName != nil {
		return g, nil, fmt.Errorf("VolumeGroupSnapshotContent %s no longer exists: it was deleted while it was in use",
			*g.Typed.Status.BoundVolumeGroupSnapshotContentName)
	}
	claims, volumes, err := r.listGroupSources(ctx, g.Typed)
	if err != nil {
		return g, nil, err
	}
	driver, err := commonDriver(claims, volumes)
	if err != nil {
		return g, nil, err
	}
	class, err := chooseClass(ctx, r.snapshots, ofGroups, g.Typed.Spec.VolumeGroupSnapshotClassName,
		driver, groupClassOf)
	if err != nil {
		return g, nil, err
	}
	if err := r.checkCommonNode(driver, claims, volumes); err != nil {
		return g, nil, err
	}
	made, err := groupContentOf(g.Typed, class, volumes)
	if err != nil {
		return g, nil, err
	}
	if g, err = withClass(ctx, r.snapshots, ofGroups, g, g.Typed.Spec.VolumeGroupSnapshotClassName, class); err != nil {
		return g, nil, err
	}
	for _, claim := range claims {
		if err := r.snapshots.protectClaim(ctx, claim); err != nil {
			return g, nil, err
		}
	}
	o, err := r.snapshots.createObject(ctx, "VolumeGroupSnapshotContent", made)
	if err != nil {
		return g, nil, err
	}
	stored, err := engine.TypedOf[groups.VolumeGroupSnapshotContent](o)
	return g, &stored, err
}

// listGroupSources returns the claims that VolumeGroupSnapshot g selects, and the PersistentVolumes
// of these claims in the same order.
func (r *groupReconciler) listGroupSources(ctx context.Context, g *groups.VolumeGroupSnapshot) (
	[]*corev1.PersistentVolumeClaim, []*corev1.PersistentVolume, error,
) {
	all, err := client.List[*corev1.PersistentVolumeClaim](ctx, r.snapshots.term.Client, g.Namespace,
		metav1.ListOptions{})
	if err != nil {
		return nil, nil, err
	}
	claims, err := selectClaims(g, all)
	if err != nil {
		return nil, nil, err
	}
	var volumes []*corev1.PersistentVolume
	for _, c := range claims {
		v, err := r.snapshots.volumeOf(ctx, c)
		if err != nil {
			return nil, nil, err
		}
		volumes = append(volumes, v)
	}
	return claims, volumes, nil
}

// checkCommonNode returns an error if no node reaches all the volumes of the claims. It checks this
// only for drivers that the agents of the nodes serve; other drivers may run anywhere.
func (r *groupReconciler) checkCommonNode(
	driver string, claims []*corev1.PersistentVolumeClaim, volumes []*corev1.PersistentVolume,
) error {
	if !r.snapshots.isServed(driver) {
		return nil
	}
	var all []string
	var where []string
	for i, v := range volumes {
		nodes, err := engine.ListReachingNodes(v, r.snapshots.csiNodes, r.snapshots.nodes)
		if err != nil {
			return fmt.Errorf("claim %s: %w", claims[i].Name, err)
		}
		where = append(where, fmt.Sprintf("%s on %s", claims[i].Name, firstOf(nodes)))
		if i == 0 {
			all = nodes
			continue
		}
		all = slices.DeleteFunc(all, func(n string) bool { return !slices.Contains(nodes, n) })
	}
	if len(all) == 0 {
		return fmt.Errorf("no node reaches the volumes of all claims (%s): a group snapshot is taken on one node; "+
			"restrict spec.source.selector to the claims of one node",
			strings.Join(where, ", "))
	}
	return nil
}

func firstOf(nodes []string) string {
	if len(nodes) > 1 {
		return fmt.Sprintf("%s and %d more", nodes[0], len(nodes)-1)
	}
	return nodes[0]
}

// copyGroupStatus copies the status of VolumeGroupSnapshotContent c to VolumeGroupSnapshot g. If
// the group snapshot was taken, it also creates the VolumeSnapshots of the volumes, and releases
// the claims. It returns the delay until the next attempt, or 0 if g is ready or must wait for a
// change of c.
func (r *groupReconciler) copyGroupStatus(ctx context.Context, g group, c groupContent) (time.Duration, error) {
	no := false
	next := &groups.VolumeGroupSnapshotStatus{}
	if g.Typed.Status != nil {
		next = g.Typed.Status.DeepCopy()
	}
	next.BoundVolumeGroupSnapshotContentName, next.ReadyToUse, next.Error = &c.Typed.Name, &no, nil
	wait := time.Duration(0)
	if s := c.Typed.Status; s != nil {
		next.Error = s.Error
		if s.VolumeGroupSnapshotHandle != nil {
			ready, err := r.createMembers(ctx, g, c)
			if err != nil {
				return 0, err
			}
			next.CreationTime = s.CreationTime
			yes := ready && s.ReadyToUse != nil && *s.ReadyToUse
			if next.ReadyToUse = &yes; !yes {
				wait = retryInterval
			}
		}
	}
	if !equality.Semantic.DeepEqual(g.Typed.Status, next) {
		if *next.ReadyToUse && (g.Typed.Status == nil || g.Typed.Status.ReadyToUse == nil ||
			!*g.Typed.Status.ReadyToUse) {
			r.snapshots.recordEvent(g.Object, corev1.EventTypeNormal, "GroupSnapshotReady",
				fmt.Sprintf("Group snapshot %s is ready to use", engine.KeyOf(g.Object)))
		}
		if err := r.snapshots.writeStatus(ctx, g.Object, next); err != nil {
			return 0, err
		}
	}
	if next.CreationTime == nil {
		return wait, nil
	}
	return wait, r.releaseGroupClaims(ctx, g.Typed.Namespace)
}

// createMembers creates the missing VolumeSnapshots of the volumes in group snapshot g, each with
// its content. ready reports whether all of them are ready to use.
func (r *groupReconciler) createMembers(ctx context.Context, g group, c groupContent) (ready bool, err error) {
	ready = true
	var claims map[string]string
	for _, info := range c.Typed.Status.VolumeSnapshotInfoList {
		s, err := engine.GetTyped[snap.VolumeSnapshot](ctx, r.snapshots.term.Client,
			r.snapshots.snapshotKind("VolumeSnapshot"), g.Typed.Namespace, memberName(g.Typed.UID, info.SnapshotHandle))
		if apierrors.IsNotFound(err) {
			if claims == nil {
				if claims, err = r.claimsOf(ctx, g.Typed.Namespace, c.Typed.Spec.Driver); err != nil {
					return false, err
				}
			}
			var o *custom.Object
			if o, err = r.snapshots.createObject(ctx, "VolumeSnapshot",
				memberOf(g.Typed, info, claims[info.VolumeHandle])); err == nil {
				s, err = engine.TypedOf[snap.VolumeSnapshot](o)
			}
		}
		if err != nil {
			return false, err
		}
		if !ownedBy(s.Typed, g.Typed.UID) {
			return false, fmt.Errorf("VolumeSnapshot %s does not belong to group %s: delete it",
				s.Typed.Name, g.Typed.Name)
		}
		if err := r.snapshots.createContent(ctx, memberContentOf(s.Typed, c.Typed, info.SnapshotHandle)); err != nil {
			return false, err
		}
		ready = ready && engine.IsSnapshotReady(s.Typed)
	}
	return ready, nil
}

// claimsOf returns the names of the claims in a namespace that have a volume of the driver and are
// protected by claimFinalizer. The keys are the handles of their volumes.
func (r *groupReconciler) claimsOf(ctx context.Context, namespace, driver string) (map[string]string, error) {
	all, err := client.List[*corev1.PersistentVolumeClaim](ctx, r.snapshots.term.Client, namespace,
		metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, c := range all {
		if !slices.Contains(c.Finalizers, claimFinalizer) || c.Spec.VolumeName == "" {
			continue
		}
		v, err := client.Get[*corev1.PersistentVolume](ctx, r.snapshots.term.Client, "", c.Spec.VolumeName)
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, err
		}
		if err == nil && v.Spec.CSI != nil && v.Spec.CSI.Driver == driver {
			out[v.Spec.CSI.VolumeHandle] = c.Name
		}
	}
	return out, nil
}

// releaseGroupClaims removes claimFinalizer from the claims of a namespace that no VolumeSnapshot
// or VolumeGroupSnapshot still needs as a source.
func (r *groupReconciler) releaseGroupClaims(ctx context.Context, namespace string) error {
	all, err := client.List[*corev1.PersistentVolumeClaim](ctx, r.snapshots.term.Client, namespace,
		metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, c := range all {
		if slices.Contains(c.Finalizers, claimFinalizer) {
			if err := r.snapshots.releaseUnneededClaim(ctx, namespace, c.Name, func(s *snap.VolumeSnapshot) bool {
				return s.DeletionTimestamp == nil
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// heldByGroup reports whether a VolumeGroupSnapshot that has not been taken yet selects a claim.
func (r *groupReconciler) heldByGroup(ctx context.Context, claim *corev1.PersistentVolumeClaim) (bool, error) {
	k := r.snapshots.snapshotKind("VolumeGroupSnapshot")
	if k == nil {
		return false, nil
	}
	all, err := engine.ListTyped[groups.VolumeGroupSnapshot](ctx, r.snapshots.term.Client, k, claim.Namespace)
	if err != nil {
		return false, err
	}
	for _, one := range all {
		g := one.Typed
		if g.DeletionTimestamp != nil || g.Spec.Source.Selector == nil ||
			g.Status != nil && g.Status.CreationTime != nil {
			continue
		}
		if mine, err := selectClaims(g, []*corev1.PersistentVolumeClaim{claim}); err == nil && len(mine) == 1 {
			return true, nil
		}
	}
	return false, nil
}

// staysWithGroup reports whether VolumeSnapshot s, which is being deleted, must be kept because its
// VolumeGroupSnapshot is not being deleted. It then records an event of s.
func (r *groupReconciler) staysWithGroup(ctx context.Context, s snapshot) (bool, error) {
	k := r.snapshots.snapshotKind("VolumeGroupSnapshot")
	if k == nil || !slices.Contains(s.Typed.Finalizers, memberFinalizer) {
		return false, nil
	}
	for _, o := range s.Typed.OwnerReferences {
		if o.Kind != k.GVK.Kind {
			continue
		}
		g, err := engine.GetTyped[groups.VolumeGroupSnapshot](ctx, r.snapshots.term.Client, k,
			s.Typed.Namespace, o.Name)
		if apierrors.IsNotFound(err) || err == nil && (g.Typed.UID != o.UID || g.Typed.DeletionTimestamp != nil) {
			continue
		}
		if err != nil {
			return false, err
		}
		r.snapshots.recordEvent(s.Object, corev1.EventTypeWarning, "SnapshotDeletePending",
			"the snapshot belongs to VolumeGroupSnapshot "+o.Name+" and is deleted with it: delete the group")
		return true, nil
	}
	return false, nil
}

// finalizeGroup finalizes VolumeGroupSnapshot g, which is being deleted. It deletes the group's
// VolumeSnapshots first. Then it deletes the content if the deletion policy is Delete. It returns
// the delay until the next attempt, or 0 when g has no finalizer any more.
func (r *groupReconciler) finalizeGroup(ctx context.Context, g group) (time.Duration, error) {
	if !slices.Contains(g.Typed.Finalizers, groupFinalizer) {
		return 0, nil
	}
	all, err := engine.ListTyped[snap.VolumeSnapshot](ctx, r.snapshots.term.Client,
		r.snapshots.snapshotKind("VolumeSnapshot"), g.Typed.Namespace)
	if err != nil {
		return 0, err
	}
	left := false
	for _, s := range all {
		if !ownedBy(s.Typed, g.Typed.UID) {
			continue
		}
		left = true
		if s.Typed.DeletionTimestamp == nil {
			if err := r.snapshots.deleteObject(ctx, s.Object); err != nil {
				return 0, err
			}
		}
	}
	if left {
		return retryInterval, nil // the deletion of each VolumeSnapshot queues this group again
	}
	name := ptr.Deref(g.Typed.Spec.Source.VolumeGroupSnapshotContentName, groupContentName(g.Typed.UID))
	c, err := findContent[groups.VolumeGroupSnapshotContent](ctx, r.snapshots, ofGroups, name)
	if err != nil {
		return 0, err
	}
	if c != nil && c.Typed.Spec.VolumeGroupSnapshotRef.UID == g.Typed.UID &&
		c.Typed.Spec.DeletionPolicy == snap.VolumeSnapshotContentDelete {
		if c.Typed.DeletionTimestamp == nil {
			err = r.snapshots.deleteObject(ctx, c.Object)
		}
		return retryInterval, err
	}
	if _, err := r.snapshots.writeObject(ctx, g.Object, func(o *custom.Object) {
		o.Finalizers = slices.DeleteFunc(o.Finalizers, func(f string) bool { return f == groupFinalizer })
	}); err != nil {
		return 0, err
	}
	return 0, r.releaseGroupClaims(ctx, g.Typed.Namespace)
}

// deleteObject deletes an object of one of the snapshot kinds, with its UID as precondition.
func (r *reconciler) deleteObject(ctx context.Context, o *custom.Object) error {
	k := r.snapshotKind(o.Kind)
	if k == nil {
		return fmt.Errorf("%s is no longer served", o.Kind)
	}
	uid := o.UID
	_, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbDelete, Kind: k, Namespace: o.Namespace, Name: o.Name,
		Delete: metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
