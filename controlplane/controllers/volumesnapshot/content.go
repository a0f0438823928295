package volumesnapshot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// reconcileContent creates, looks up or deletes the snapshot of VolumeSnapshotContent c through its
// CSI driver. It returns the delay until the next attempt; 0 means none.
func (r *reconciler) reconcileContent(ctx context.Context, c content) (time.Duration, error) {
	switch {
	case isDataDeletable(c.Typed) && slices.Contains(c.Typed.Finalizers, contentFinalizer):
		return r.removeContent(ctx, c)
	case c.Typed.DeletionTimestamp != nil, c.Typed.Spec.VolumeSnapshotRef.UID == "",
		metav1.HasAnnotation(c.Object.ObjectMeta, beingDeleted):
		return 0, nil // a VolumeSnapshot still uses the content, or none is bound to it yet
	case c.Typed.Status != nil && c.Typed.Status.ReadyToUse != nil && *c.Typed.Status.ReadyToUse:
		return 0, r.markInProgress(ctx, ofSnapshots, c.Object, false)
	case c.Typed.Spec.Source.SnapshotHandle != nil:
		return r.findSnapshot(ctx, c)
	}
	return r.takeSnapshot(ctx, c)
}

// takeSnapshot calls CreateSnapshot for VolumeSnapshotContent c and writes the result to its
// status. It returns the delay after which the call must be repeated, or 0 if the snapshot is
// ready.
func (r *reconciler) takeSnapshot(ctx context.Context, c content) (time.Duration, error) {
	q, err := r.createRequest(ctx, c)
	if err != nil {
		return 0, r.recordRefusal(ctx, ofSnapshots, c.Object, err)
	}
	nodes, err := r.contentNodes(c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.recordRefusal(ctx, ofSnapshots, c.Object, err)
	}
	if !metav1.HasAnnotation(c.Object.ObjectMeta, beingCreated) {
		if err := r.markInProgress(ctx, ofSnapshots, c.Object, true); err != nil {
			return 0, err
		}
		return time.Millisecond, nil // continue with the object as stored
	}
	res, err := engine.DriverController(r.calls, nodes[0], c.Typed.Spec.Driver).CreateSnapshot(ctx, q)
	switch {
	case status.Code(err) == codes.Aborted:
		return pollInterval, nil // the driver is creating the snapshot
	case err != nil:
		return 0, r.recordRefusal(ctx, ofSnapshots, c.Object,
			fmt.Errorf("node %s: %s", nodes[0], engine.DriverErrorText(err)))
	case res.GetSnapshot().GetSnapshotId() == "":
		return 0, r.recordRefusal(ctx, ofSnapshots, c.Object,
			errors.New("the driver returned a snapshot without an ID"))
	}
	if err := r.writeStatus(ctx, c.Object, contentStatus(res.GetSnapshot())); err != nil {
		return 0, err
	}
	if !res.GetSnapshot().GetReadyToUse() {
		return pollInterval, nil
	}
	return 0, nil
}

func contentStatus(s *csi.Snapshot) *snap.VolumeSnapshotContentStatus {
	id, ready, size := s.GetSnapshotId(), s.GetReadyToUse(), s.GetSizeBytes()
	out := &snap.VolumeSnapshotContentStatus{SnapshotHandle: &id, ReadyToUse: &ready, RestoreSize: &size}
	if of := s.GetGroupSnapshotId(); of != "" {
		out.VolumeGroupSnapshotHandle = &of
	}
	if s.GetCreationTime() != nil {
		at := s.GetCreationTime().AsTime().UnixNano()
		out.CreationTime = &at
	}
	return out
}

// createRequest returns the CreateSnapshot request for VolumeSnapshotContent c.
func (r *reconciler) createRequest(ctx context.Context, c content) (*csi.CreateSnapshotRequest, error) {
	q := &csi.CreateSnapshotRequest{Name: driverName(c.Typed), SourceVolumeId: *c.Typed.Spec.Source.VolumeHandle}
	var err error
	if q.Parameters, err = classParameters(ctx, r, ofSnapshots, c.Typed.Spec.VolumeSnapshotClassName, classOf); err !=
		nil {
		return nil, err
	}
	q.Secrets, err = r.contentSecrets(ctx, ofSnapshots, c.Object, c.Typed.Spec.Driver)
	return q, err
}

// findSnapshot searches for the pre-provisioned snapshot of VolumeSnapshotContent c on every node
// that has the driver. It writes the result to the status, and records which nodes can reach the
// snapshot. It returns the delay after which c must be reconciled again, or 0.
func (r *reconciler) findSnapshot(ctx context.Context, c content) (time.Duration, error) {
	nodes, err := r.contentNodes(c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.recordRefusal(ctx, ofSnapshots, c.Object, err)
	}
	secrets, err := r.contentSecrets(ctx, ofSnapshots, c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return 0, r.recordRefusal(ctx, ofSnapshots, c.Object, err)
	}
	handle := *c.Typed.Spec.Source.SnapshotHandle
	for _, name := range nodes {
		res, err := engine.DriverController(r.calls, name, c.Typed.Spec.Driver).ListSnapshots(ctx,
			&csi.ListSnapshotsRequest{SnapshotId: handle, Secrets: secrets})
		if status.Code(err) == codes.Unimplemented {
			// the driver cannot list snapshots: assume that the snapshot exists
			yes := true
			return 0, r.writeStatus(ctx, c.Object,
				&snap.VolumeSnapshotContentStatus{SnapshotHandle: &handle, ReadyToUse: &yes})
		}
		if err != nil {
			return 0, r.recordRefusal(ctx, ofSnapshots, c.Object,
				fmt.Errorf("node %s: %s", name, engine.DriverErrorText(err)))
		}
		for _, e := range res.GetEntries() {
			if e.GetSnapshot().GetSnapshotId() == handle {
				return r.recordFound(ctx, c, name, e.GetSnapshot())
			}
		}
	}
	return retryInterval, r.recordRefusal(ctx, ofSnapshots, c.Object,
		fmt.Errorf("CSI driver %s has no snapshot %s on any node", c.Typed.Spec.Driver, handle))
}

func (r *reconciler) recordFound(ctx context.Context, c content, name string, s *csi.Snapshot) (time.Duration, error) {
	node, _ := engine.Cached[*corev1.Node](r.nodes, "", name)
	on, _ := engine.Cached[*storagev1.CSINode](r.csiNodes, "", name)
	d := engine.FindNodeDriver(on, c.Typed.Spec.Driver)
	if missing := engine.MissingTopologyLabel(d, node); missing != "" {
		// wait for the label, because the reachable nodes are written only once
		return retryInterval, r.recordRefusal(ctx, ofSnapshots, c.Object,
			fmt.Errorf("node %s lacks topology label %s of CSI driver %s: the driver's registration sets the label",
				name, missing, c.Typed.Spec.Driver))
	}
	if at := engine.TopologySegments(d, node); len(at) > 0 &&
		!metav1.HasAnnotation(c.Object.ObjectMeta, engine.ReachedFromAnnotation) {
		var term corev1.NodeSelectorTerm
		for k, v := range at {
			term.MatchExpressions = append(term.MatchExpressions,
				corev1.NodeSelectorRequirement{Key: k, Operator: corev1.NodeSelectorOpIn, Values: []string{v}})
		}
		text, err := json.Marshal(corev1.VolumeNodeAffinity{
			Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}})
		if err != nil {
			return 0, err
		}
		_, err = r.writeObject(ctx, c.Object, func(o *custom.Object) {
			metav1.SetMetaDataAnnotation(&o.ObjectMeta, engine.ReachedFromAnnotation, string(text))
		})
		return time.Millisecond, err
	}
	if err := r.writeStatus(ctx, c.Object, contentStatus(s)); err != nil {
		return 0, err
	}
	if !s.GetReadyToUse() {
		return pollInterval, nil
	}
	return 0, nil
}

// removeContent finalizes VolumeSnapshotContent c. It deletes the snapshot if the deletion policy
// is Delete and the snapshot is not part of a group snapshot. Then it removes the finalizer. It
// returns the delay until the next attempt; 0 means none.
func (r *reconciler) removeContent(ctx context.Context, c content) (time.Duration, error) {
	var err error
	if c.Typed.Spec.DeletionPolicy == snap.VolumeSnapshotContentDelete &&
		!metav1.HasAnnotation(c.Object.ObjectMeta, inGroup) {
		err = r.deleteSnapshot(ctx, c)
	}
	return r.finishRemoval(ctx, ofSnapshots, c.Object, err)
}

// deleteSnapshot calls DeleteSnapshot for VolumeSnapshotContent c. If the creation was interrupted,
// the snapshot's handle is unknown; then it repeats CreateSnapshot to get the handle.
func (r *reconciler) deleteSnapshot(ctx context.Context, c content) error {
	handle := ""
	switch {
	case c.Typed.Status != nil && c.Typed.Status.SnapshotHandle != nil:
		handle = *c.Typed.Status.SnapshotHandle
	case c.Typed.Spec.Source.SnapshotHandle != nil:
		handle = *c.Typed.Spec.Source.SnapshotHandle
	case !metav1.HasAnnotation(c.Object.ObjectMeta, beingCreated):
		return nil // the driver was never called
	}
	nodes, err := r.contentNodes(c.Object, c.Typed.Spec.Driver)
	if errors.Is(err, engine.ErrNoNode) {
		return nil // all nodes that could reach the snapshot were deleted
	}
	if err != nil {
		return err
	}
	driver := engine.DriverController(r.calls, nodes[0], c.Typed.Spec.Driver)
	secrets, err := r.contentSecrets(ctx, ofSnapshots, c.Object, c.Typed.Spec.Driver)
	if err != nil {
		return err
	}
	if handle == "" {
		q, err := r.createRequest(ctx, c)
		if err != nil {
			return err
		}
		res, err := driver.CreateSnapshot(ctx, q)
		if err != nil && engine.IsCallWithoutEffect(err) {
			return nil // the snapshot does not exist
		}
		if err != nil {
			return err
		}
		handle = res.GetSnapshot().GetSnapshotId()
	}
	_, err = driver.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: handle, Secrets: secrets})
	return err
}
