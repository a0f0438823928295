package volume

import (
	"context"
	"slices"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/csi"
)

// growsOnNode says that a volume has grown, and that what is on the node has to grow after it: the claim says so until
// it was told that this is done.
func growsOnNode(pv *v1.PersistentVolume, claim *v1.PersistentVolumeClaim) bool {
	has := claim.Status.Capacity[v1.ResourceStorage]
	if has.Cmp(pv.Spec.Capacity[v1.ResourceStorage]) >= 0 {
		return false
	}
	switch claim.Status.AllocatedResourceStatuses[v1.ResourceStorage] {
	case v1.PersistentVolumeClaimNodeResizePending, v1.PersistentVolumeClaimNodeResizeInProgress:
		return true
	}
	return slices.ContainsFunc(claim.Status.Conditions, func(c v1.PersistentVolumeClaimCondition) bool {
		return c.Type == v1.PersistentVolumeClaimFileSystemResizePending && c.Status == v1.ConditionTrue
	})
}

// growPublished has a volume that has grown while nobody used it used in full before its pod sees it. What fails is
// tried again by the control plane, which tells the claim: a pod does not wait for a larger volume.
func (v *Volumes) growPublished(ctx context.Context, d *csi.Driver, s source, cv csi.Volume) {
	if !s.growing || !d.Grows() {
		return
	}
	secrets, err := v.driverSecret(s.expandSecret)
	if err == nil {
		_, err = d.Expand(ctx, cv, s.size, secrets)
	}
	if err != nil {
		v.cfg.Log.Warn("a volume that has grown is not used in full yet", "volume", s.name, "err", err)
	}
}
