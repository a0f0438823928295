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

	"keelson.dev/keelson/controlplane/controllers"
)

// groupContentNamed reconciles the VolumeGroupSnapshotContent of a key: it creates, looks up or
// deletes the group snapshot through the CSI driver.
func (r *reconciler) groupContentNamed(ctx context.Context, key controllers.Key) (time.Duration, error) {
	c, err := controllers.GetTyped[groups.VolumeGroupSnapshotContent](ctx, r.term.Client, r.snapshotKind("VolumeGroupSnapshotContent"), "", key.Name)
	if apierrors.IsNotFound(err) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if r.isBinder() {
		if gone, err := r.groupOrphaned(ctx, c); err != nil || gone {
			return 0, err
		}
	}
	if !r.isServed(c.Typed.Spec.Driver) {
		return 0, nil
	}
	had := c.Typed.Status
	switch {
	case c.Typed.DeletionTimestamp != nil:
		return r.groupRemove(ctx, c)
	case c.Typed.Spec.VolumeGroupSnapshotRef.UID == "":
		return 0, nil // no VolumeGroupSnapshot is bound to the content yet
	case had != nil && had.ReadyToUse != nil && *had.ReadyToUse:
		return 0, r.markInProgress(ctx, ofGroups, c.Object, false)
	case c.Typed.Spec.Source.GroupSnapshotHandles != nil:
		return r.groupFind(ctx, c)
	}
	return r.groupTake(ctx, c)
}

// groupOrphaned deletes VolumeGroupSnapshotContent c if its VolumeGroupSnapshot no longer exists
// and its deletion policy is Delete. It reports whether it deleted c.
func (r *reconciler) groupOrphaned(ctx context.Context, c groupContent) (bool, error) {
	ref := c.Typed.Spec.VolumeGroupSnapshotRef
	if ref.UID == "" || c.Typed.DeletionTimestamp != nil || c.Typed.Spec.DeletionPolicy != snap.VolumeSnapshotContentDelete {
		return false, nil
	}
	g, err := controllers.GetTyped[groups.VolumeGroupSnapshot](ctx, r.term.Client, r.snapshotKind("VolumeGroupSnapshot"), ref.Namespace, ref.Name)
	if err == nil && g.Typed.UID == ref.UID || err != nil && !apierrors.IsNotFound(err) {
		return false, err
	}
	return true, r.deleteObject(ctx, c.Object)
}

// groupTake calls CreateVolumeGroupSnapshot for VolumeGroupSnapshotContent c and writes the result
// to its status. It returns the delay after which the call must be repeated, or 0 if the group
// snapshot is ready.
func (r *reconciler) groupTake(ctx context.Context, c groupContent) (time.Duration, error) {
	q, err := r.groupRequest(ctx, c)
	if err != nil {
		return 0, r.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	nodes, err := r.contentNodes(c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	if err := r.checkGroupSupport(ctx, nodes[0], c.Typed.Spec.Driver); err != nil {
		return 0, r.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	if !metav1.HasAnnotation(c.Object.ObjectMeta, groupBeingCreated) {
		return time.Millisecond, r.markInProgress(ctx, ofGroups, c.Object, true) // continue with the object as stored
	}
	res, err := controllers.DriverGroups(r.calls, nodes[0], c.Typed.Spec.Driver).CreateVolumeGroupSnapshot(ctx, q)
	switch {
	case status.Code(err) == codes.Aborted:
		return poll, nil // the driver is creating the group snapshot
	case err != nil:
		return 0, r.recordRefusal(ctx, ofGroups, c.Object, fmt.Errorf("node %s: %s", nodes[0], controllers.DriverErrorText(err)))
	}
	return r.groupTaken(ctx, c, res.GetGroupSnapshot())
}

// groupTaken writes the driver's group snapshot g to the status of VolumeGroupSnapshotContent c.
func (r *reconciler) groupTaken(ctx context.Context, c groupContent, g *csi.VolumeGroupSnapshot) (time.Duration, error) {
	if g.GetGroupSnapshotId() == "" || len(g.GetSnapshots()) == 0 || len(g.GetSnapshots()) > mostInGroup {
		return 0, r.recordRefusal(ctx, ofGroups, c.Object, fmt.Errorf("the driver returned group snapshot %q with %d snapshots", g.GetGroupSnapshotId(), len(g.GetSnapshots())))
	}
	id, ready := g.GetGroupSnapshotId(), g.GetReadyToUse()
	at := metav1.NewTime(r.term.Now().Truncate(time.Second))
	if g.GetCreationTime() != nil {
		at = metav1.NewTime(g.GetCreationTime().AsTime().Truncate(time.Second))
	}
	next := &groups.VolumeGroupSnapshotContentStatus{VolumeGroupSnapshotHandle: &id, CreationTime: &at, ReadyToUse: &ready}
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
	if err := r.writeStatus(ctx, c.Object, next); err != nil || ready {
		return 0, err
	}
	return poll, nil
}

// checkGroupSupport returns an error if a driver on a node does not support group snapshots.
func (r *reconciler) checkGroupSupport(ctx context.Context, node, driver string) error {
	res, err := controllers.DriverGroups(r.calls, node, driver).GroupControllerGetCapabilities(ctx, &csi.GroupControllerGetCapabilitiesRequest{})
	if err != nil && status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("what CSI driver %s on node %s can do is not known: %s", driver, node, controllers.DriverErrorText(err))
	}
	if slices.ContainsFunc(res.GetCapabilities(), func(c *csi.GroupControllerServiceCapability) bool {
		return c.GetRpc().GetType() == csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT
	}) {
		return nil
	}
	return fmt.Errorf("CSI driver %s takes no groups of snapshots: it does not have the capability CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT; take a VolumeSnapshot of each claim", driver)
}

// groupRequest returns the CreateVolumeGroupSnapshot request for VolumeGroupSnapshotContent c.
func (r *reconciler) groupRequest(ctx context.Context, c groupContent) (*csi.CreateVolumeGroupSnapshotRequest, error) {
	q := &csi.CreateVolumeGroupSnapshotRequest{Name: groupDriverName(c.Typed.Spec.VolumeGroupSnapshotRef.UID), SourceVolumeIds: c.Typed.Spec.Source.VolumeHandles}
	var err error
	if q.Parameters, err = classParameters(ctx, r, ofGroups, c.Typed.Spec.VolumeGroupSnapshotClassName, groupClassOf); err != nil {
		return nil, err
	}
	q.Secrets, err = r.contentSecrets(ctx, ofGroups, c.Object, c.Typed.Spec.Driver)
	return q, err
}

// groupFind looks for the pre-provisioned group snapshot of VolumeGroupSnapshotContent c on every
// node that has the driver, and writes the result to its status.
func (r *reconciler) groupFind(ctx context.Context, c groupContent) (time.Duration, error) {
	nodes, err := r.contentNodes(c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	secrets, err := r.contentSecrets(ctx, ofGroups, c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.recordRefusal(ctx, ofGroups, c.Object, err)
	}
	given := c.Typed.Spec.Source.GroupSnapshotHandles
	for _, name := range nodes {
		res, err := controllers.DriverGroups(r.calls, name, c.Typed.Spec.Driver).GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{
			GroupSnapshotId: given.VolumeGroupSnapshotHandle, SnapshotIds: given.VolumeSnapshotHandles, Secrets: secrets})
		if status.Code(err) == codes.NotFound {
			continue
		}
		if err != nil {
			return 0, r.recordRefusal(ctx, ofGroups, c.Object, fmt.Errorf("node %s: %s", name, controllers.DriverErrorText(err)))
		}
		return r.groupTaken(ctx, c, res.GetGroupSnapshot())
	}
	return again, r.recordRefusal(ctx, ofGroups, c.Object, fmt.Errorf("CSI driver %s has no group of snapshots %s on any node", c.Typed.Spec.Driver, given.VolumeGroupSnapshotHandle))
}

// groupRemove finalizes VolumeGroupSnapshotContent c. It deletes the group snapshot if the deletion
// policy is Delete, and removes the finalizer. The VolumeSnapshots of the group were deleted
// before. If a user deleted c itself, c is kept while its VolumeGroupSnapshot exists.
func (r *reconciler) groupRemove(ctx context.Context, c groupContent) (time.Duration, error) {
	if !slices.Contains(c.Typed.Finalizers, groupContentFinalizer) {
		return 0, nil
	}
	ref := c.Typed.Spec.VolumeGroupSnapshotRef
	if g, err := controllers.GetTyped[groups.VolumeGroupSnapshot](ctx, r.term.Client, r.snapshotKind("VolumeGroupSnapshot"), ref.Namespace, ref.Name); err == nil {
		if g.Typed.UID == ref.UID && g.Typed.DeletionTimestamp == nil {
			r.recordEvent(c.Object, corev1.EventTypeWarning, "GroupSnapshotDeletePending", "VolumeGroupSnapshot "+ref.Namespace+"/"+ref.Name+" uses this content: delete the group snapshot")
			return again, nil
		}
	} else if !apierrors.IsNotFound(err) {
		return 0, err
	}
	var err error
	if c.Typed.Spec.DeletionPolicy == snap.VolumeSnapshotContentDelete {
		err = r.groupDelete(ctx, c)
	}
	return r.finishRemoval(ctx, ofGroups, c.Object, err)
}

// groupDelete calls DeleteVolumeGroupSnapshot for VolumeGroupSnapshotContent c. If the creation was
// interrupted, the handle is unknown; then it repeats CreateVolumeGroupSnapshot to get the handle.
func (r *reconciler) groupDelete(ctx context.Context, c groupContent) error {
	q := &csi.DeleteVolumeGroupSnapshotRequest{}
	switch {
	case c.Typed.Status != nil && c.Typed.Status.VolumeGroupSnapshotHandle != nil:
		q.GroupSnapshotId = *c.Typed.Status.VolumeGroupSnapshotHandle
		for _, info := range c.Typed.Status.VolumeSnapshotInfoList {
			q.SnapshotIds = append(q.SnapshotIds, info.SnapshotHandle)
		}
	case c.Typed.Spec.Source.GroupSnapshotHandles != nil:
		q.GroupSnapshotId, q.SnapshotIds = c.Typed.Spec.Source.GroupSnapshotHandles.VolumeGroupSnapshotHandle, c.Typed.Spec.Source.GroupSnapshotHandles.VolumeSnapshotHandles
	case !metav1.HasAnnotation(c.Object.ObjectMeta, groupBeingCreated):
		return nil // the driver was never called
	}
	nodes, err := r.contentNodes(c.Object, c.Typed.Spec.Driver)
	if errors.Is(err, controllers.ErrNoNode) {
		return nil // all nodes that could reach the group snapshot were deleted
	}
	if err != nil {
		return err
	}
	driver := controllers.DriverGroups(r.calls, nodes[0], c.Typed.Spec.Driver)
	if q.Secrets, err = r.contentSecrets(ctx, ofGroups, c.Object, c.Typed.Spec.Driver); err != nil {
		return err
	}
	if q.GroupSnapshotId == "" {
		ask, err := r.groupRequest(ctx, c)
		if err != nil {
			return err
		}
		res, err := driver.CreateVolumeGroupSnapshot(ctx, ask)
		if err != nil && controllers.IsCallWithoutEffect(err) {
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
