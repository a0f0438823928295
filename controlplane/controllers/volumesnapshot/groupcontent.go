package volumesnapshot

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	groups "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumegroupsnapshot/v1"
	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

// reconcileGroupContent reconciles the VolumeGroupSnapshotContent with this key: it creates, looks
// up or deletes the group snapshot through the CSI driver. It returns the delay until the next
// attempt; 0 means none.
func (r *groupReconciler) reconcileGroupContent(ctx context.Context, key engine.Key) (time.Duration, error) {
	c, err := engine.GetTyped[groups.VolumeGroupSnapshotContent](ctx, r.snapshots.term.Client,
		r.snapshots.snapshotKind("VolumeGroupSnapshotContent"), "", key.Name)
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if r.snapshots.isBinder() {
		if gone, err := r.deleteOrphanedGroupContent(ctx, c); err != nil || gone {
			return 0, err
		}
	}
	if !r.snapshots.isServed(c.Typed.Spec.Driver) {
		return 0, nil
	}
	had := c.Typed.Status
	switch {
	case c.Typed.DeletionTimestamp != nil:
		return r.removeGroupContent(ctx, c)
	case c.Typed.Spec.VolumeGroupSnapshotRef.UID == "":
		return 0, nil // no VolumeGroupSnapshot is bound to the content yet
	case had != nil && had.ReadyToUse != nil && *had.ReadyToUse:
		return 0, r.snapshots.markInProgress(ctx, ofGroups, c.Object, false)
	case c.Typed.Spec.Source.GroupSnapshotHandles != nil:
		return r.findGroupSnapshot(ctx, c)
	}
	return r.takeGroupSnapshot(ctx, c)
}

// deleteOrphanedGroupContent deletes VolumeGroupSnapshotContent c if its VolumeGroupSnapshot no
// longer exists and its deletion policy is Delete. It reports whether it deleted c.
func (r *groupReconciler) deleteOrphanedGroupContent(ctx context.Context, c groupContent) (bool, error) {
	ref := c.Typed.Spec.VolumeGroupSnapshotRef
	if ref.UID == "" || c.Typed.DeletionTimestamp != nil ||
		c.Typed.Spec.DeletionPolicy != snap.VolumeSnapshotContentDelete {
		return false, nil
	}
	g, err := engine.GetTyped[groups.VolumeGroupSnapshot](ctx, r.snapshots.term.Client,
		r.snapshots.snapshotKind("VolumeGroupSnapshot"), ref.Namespace, ref.Name)
	if err == nil && g.Typed.UID == ref.UID || err != nil && !apierrors.IsNotFound(err) {
		return false, err
	}
	return true, r.snapshots.deleteObject(ctx, c.Object)
}

// takeGroupSnapshot calls CreateVolumeGroupSnapshot for VolumeGroupSnapshotContent c and writes the
// result to its status. It returns the delay after which the call must be repeated, or 0 if the
// group snapshot is ready.
func (r *groupReconciler) takeGroupSnapshot(ctx context.Context, c groupContent) (time.Duration, error) {
	q, err := r.createGroupRequest(ctx, c)
	if err != nil {
		return 0, r.snapshots.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	nodes, err := r.snapshots.contentNodes(c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.snapshots.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	if err := r.checkGroupSupport(ctx, nodes[0], c.Typed.Spec.Driver); err != nil {
		return 0, r.snapshots.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	if !metav1.HasAnnotation(c.Object.ObjectMeta, groupBeingCreated) {
		// continue with the object as stored
		return time.Millisecond, r.snapshots.markInProgress(ctx, ofGroups, c.Object, true)
	}
	res, err := engine.DriverGroups(r.snapshots.calls, nodes[0], c.Typed.Spec.Driver).CreateVolumeGroupSnapshot(ctx, q)
	switch {
	case status.Code(err) == codes.Aborted:
		return pollInterval, nil // the driver is creating the group snapshot
	case err != nil:
		return 0, r.snapshots.recordRefusal(ctx, ofGroups, c.Object,
			fmt.Errorf("node %s: %s", nodes[0], engine.DriverErrorText(err)))
	}
	return r.recordGroupSnapshot(ctx, c, res.GetGroupSnapshot())
}

// recordGroupSnapshot writes the driver's group snapshot g to the status of
// VolumeGroupSnapshotContent c. It returns the delay after which the driver must be called again,
// or 0 if g is ready to use.
func (r *groupReconciler) recordGroupSnapshot(ctx context.Context, c groupContent, g *csi.VolumeGroupSnapshot) (
	time.Duration, error,
) {
	if g.GetGroupSnapshotId() == "" || len(g.GetSnapshots()) == 0 || len(g.GetSnapshots()) > mostInGroup {
		return 0, r.snapshots.recordRefusal(ctx, ofGroups, c.Object,
			fmt.Errorf("the driver returned group snapshot %q with %d snapshots", g.GetGroupSnapshotId(),
				len(g.GetSnapshots())))
	}
	id, ready := g.GetGroupSnapshotId(), g.GetReadyToUse()
	at := metav1.NewTime(r.snapshots.term.Now().Truncate(time.Second))
	if g.GetCreationTime() != nil {
		at = metav1.NewTime(g.GetCreationTime().AsTime().Truncate(time.Second))
	}
	next := &groups.VolumeGroupSnapshotContentStatus{VolumeGroupSnapshotHandle: &id, CreationTime: &at,
		ReadyToUse: &ready}
	for _, s := range g.GetSnapshots() {
		info := groups.VolumeSnapshotInfo{VolumeHandle: s.GetSourceVolumeId(), SnapshotHandle: s.GetSnapshotId()}
		done, size := s.GetReadyToUse(), s.GetSizeBytes()
		info.ReadyToUse, info.RestoreSize = &done, &size
		if s.GetCreationTime() != nil {
			n := s.GetCreationTime().AsTime().UnixNano()
			info.CreationTime = &n
		}
		next.VolumeSnapshotInfoList = append(next.VolumeSnapshotInfoList, info)
	}
	if err := r.snapshots.writeStatus(ctx, c.Object, next); err != nil || ready {
		return 0, err
	}
	return pollInterval, nil
}

// checkGroupSupport returns an error if a driver on a node does not support group snapshots.
func (r *groupReconciler) checkGroupSupport(ctx context.Context, node, driver string) error {
	res, err := engine.DriverGroups(r.snapshots.calls, node, driver).GroupControllerGetCapabilities(ctx,
		&csi.GroupControllerGetCapabilitiesRequest{})
	if err != nil && status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("the capabilities of CSI driver %s on node %s are not known: %s", driver, node,
			engine.DriverErrorText(err))
	}
	if slices.ContainsFunc(res.GetCapabilities(), func(c *csi.GroupControllerServiceCapability) bool {
		return c.GetRpc().GetType() == csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
	}) {
		return nil
	}
	return fmt.Errorf("CSI driver %s does not support group snapshots: it lacks the capability "+
		"CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT; create a VolumeSnapshot of each claim", driver)
}

// createGroupRequest returns the CreateVolumeGroupSnapshot request for content c.
func (r *groupReconciler) createGroupRequest(ctx context.Context, c groupContent) (
	*csi.CreateVolumeGroupSnapshotRequest, error,
) {
	q := &csi.CreateVolumeGroupSnapshotRequest{Name: groupDriverName(c.Typed.Spec.VolumeGroupSnapshotRef.UID),
		SourceVolumeIds: c.Typed.Spec.Source.VolumeHandles}
	var err error
	if q.Parameters, err = classParameters(ctx, r.snapshots, ofGroups, c.Typed.Spec.VolumeGroupSnapshotClassName,
		groupClassOf); err != nil {
		return nil, err
	}
	q.Secrets, err = r.snapshots.contentSecrets(ctx, ofGroups, c.Object, c.Typed.Spec.Driver)
	return q, err
}

// findGroupSnapshot searches for the pre-provisioned group snapshot of VolumeGroupSnapshotContent c
// on every node that has the driver, and writes the result to its status. It returns the delay
// after which the driver must be called again, or 0.
func (r *groupReconciler) findGroupSnapshot(ctx context.Context, c groupContent) (time.Duration, error) {
	nodes, err := r.snapshots.contentNodes(c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.snapshots.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	secrets, err := r.snapshots.contentSecrets(ctx, ofGroups, c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.snapshots.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	given := c.Typed.Spec.Source.GroupSnapshotHandles
	for _, name := range nodes {
		res, err := engine.DriverGroups(r.snapshots.calls, name, c.Typed.Spec.Driver).GetVolumeGroupSnapshot(ctx,
			&csi.GetVolumeGroupSnapshotRequest{
				GroupSnapshotId: given.VolumeGroupSnapshotHandle, SnapshotIds: given.VolumeSnapshotHandles,
				Secrets: secrets})
		if status.Code(err) == codes.NotFound {
			continue
		}
		if err != nil {
			return 0, r.snapshots.recordRefusal(ctx, ofGroups, c.Object,
				fmt.Errorf("node %s: %s", name, engine.DriverErrorText(err)))
		}
		return r.recordGroupSnapshot(ctx, c, res.GetGroupSnapshot())
	}
	return retryInterval, r.snapshots.recordRefusal(ctx, ofGroups, c.Object,
		fmt.Errorf("CSI driver %s has no group snapshot %s on any node", c.Typed.Spec.Driver,
			given.VolumeGroupSnapshotHandle))
}

// removeGroupContent finalizes VolumeGroupSnapshotContent c. It deletes the group snapshot if the
// deletion policy is Delete, and removes the finalizer. The VolumeSnapshots of the group were
// deleted before. If a user deleted c itself, c is kept while its VolumeGroupSnapshot exists.
// removeGroupContent returns the delay until the next attempt; 0 means none.
func (r *groupReconciler) removeGroupContent(ctx context.Context, c groupContent) (time.Duration, error) {
	if !slices.Contains(c.Typed.Finalizers, groupContentFinalizer) {
		return 0, nil
	}
	ref := c.Typed.Spec.VolumeGroupSnapshotRef
	if g, err := engine.GetTyped[groups.VolumeGroupSnapshot](ctx, r.snapshots.term.Client,
		r.snapshots.snapshotKind("VolumeGroupSnapshot"), ref.Namespace, ref.Name); err == nil {
		if g.Typed.UID == ref.UID && g.Typed.DeletionTimestamp == nil {
			r.snapshots.recordEvent(c.Object, corev1.EventTypeWarning, "GroupSnapshotDeletePending",
				"VolumeGroupSnapshot "+ref.Namespace+"/"+ref.Name+" uses this content: delete the group snapshot")
			return retryInterval, nil
		}
	} else if !apierrors.IsNotFound(err) {
		return 0, err
	}
	var err error
	if c.Typed.Spec.DeletionPolicy == snap.VolumeSnapshotContentDelete {
		err = r.deleteGroupSnapshot(ctx, c)
	}
	return r.snapshots.finishRemoval(ctx, ofGroups, c.Object, err)
}

// deleteGroupSnapshot calls DeleteVolumeGroupSnapshot for VolumeGroupSnapshotContent c. If the
// creation was interrupted, the handle is unknown; then it repeats CreateVolumeGroupSnapshot to get
// the handle.
func (r *groupReconciler) deleteGroupSnapshot(ctx context.Context, c groupContent) error {
	q := &csi.DeleteVolumeGroupSnapshotRequest{}
	switch {
	case c.Typed.Status != nil && c.Typed.Status.VolumeGroupSnapshotHandle != nil:
		q.GroupSnapshotId = *c.Typed.Status.VolumeGroupSnapshotHandle
		for _, info := range c.Typed.Status.VolumeSnapshotInfoList {
			q.SnapshotIds = append(q.SnapshotIds, info.SnapshotHandle)
		}
	case c.Typed.Spec.Source.GroupSnapshotHandles != nil:
		q.GroupSnapshotId, q.SnapshotIds = c.Typed.Spec.Source.GroupSnapshotHandles.VolumeGroupSnapshotHandle,
			c.Typed.Spec.Source.GroupSnapshotHandles.VolumeSnapshotHandles
	case !metav1.HasAnnotation(c.Object.ObjectMeta, groupBeingCreated):
		return nil // the driver was never called
	}
	nodes, err := r.snapshots.contentNodes(c.Object, c.Typed.Spec.Driver)
	if errors.Is(err, engine.ErrNoNode) {
		return nil // all nodes that could reach the group snapshot were deleted
	}
	if err != nil {
		return err
	}
	driver := engine.DriverGroups(r.snapshots.calls, nodes[0], c.Typed.Spec.Driver)
	if q.Secrets, err = r.snapshots.contentSecrets(ctx, ofGroups, c.Object, c.Typed.Spec.Driver); err != nil {
		return err
	}
	if q.GroupSnapshotId == "" {
		ask, err := r.createGroupRequest(ctx, c)
		if err != nil {
			return err
		}
		res, err := driver.CreateVolumeGroupSnapshot(ctx, ask)
		if err != nil && engine.IsCallWithoutEffect(err) {
			return nil // the group snapshot does not exist
		}
		if err != nil {
			return err
		}
		q.GroupSnapshotId = res.GetGroupSnapshot().GetGroupSnapshotId()
		for _, s := range res.GetGroupSnapshot().GetSnapshots() {
			q.SnapshotIds = append(q.SnapshotIds, s.GetSnapshotId())
		}
	}
	_, err = driver.DeleteVolumeGroupSnapshot(ctx, q)
	return err
}
