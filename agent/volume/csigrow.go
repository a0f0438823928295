package volume

import (
	"context"
	"fmt"
	"slices"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
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
	if !s.growing || !d.ExpandsVolumes() {
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

// Call implements agent.DriverCalls. NodeExpandVolume is the node's own to make: of the request the volume and the size
// count, and where it is mounted the node knows.
func (v *Volumes) Call(ctx context.Context, driver, method string, request []byte, timeout time.Duration) ([]byte, error) {
	if v.cfg.CSI == nil {
		return nil, fmt.Errorf("%w: %s", csi.ErrNoDriver, driver)
	}
	if method != spec.Node_NodeExpandVolume_FullMethodName {
		return v.cfg.CSI.Call(ctx, driver, method, request, timeout)
	}
	q := &spec.NodeExpandVolumeRequest{}
	if err := proto.Unmarshal(request, q); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "growing a volume of CSI driver %s: %v", driver, err)
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	got, err := v.grow(ctx, driver, q.GetVolumeId(), q.GetCapacityRange().GetRequiredBytes())
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&spec.NodeExpandVolumeResponse{CapacityBytes: got})
}

// grow has what a pod of the node has mounted of a volume grow to a size.
func (v *Volumes) grow(ctx context.Context, driver, handle string, size int64) (int64, error) {
	defer v.locks.Lock(driver + "\x00" + handle)()
	pod, vol, s, r, ok := v.user(driver, handle)
	if !ok {
		return 0, status.Errorf(codes.Unavailable, "volume %s of CSI driver %s is not mounted on this node", handle, driver)
	}
	d, err := v.cfg.CSI.Driver(ctx, driver)
	if err != nil || !d.ExpandsVolumes() {
		return 0, err // a driver that does nothing on nodes has done all there is
	}
	cv, err := v.describe(pod, s, r)
	if err != nil {
		return 0, fmt.Errorf("volume %q: %w", vol, err)
	}
	secrets, err := v.driverSecret(s.expandSecret)
	if err != nil {
		return 0, fmt.Errorf("volume %q: %w", vol, err)
	}
	return d.Expand(ctx, cv, size, secrets)
}

// user is a pod that has a volume, and which of the pod's volumes it is. The volume is locked.
func (v *Volumes) user(driver, handle string) (pod *v1.Pod, vol string, s source, r record, ok bool) {
	for _, pod := range v.cfg.Objects.Pods() {
		recs, err := v.records(pod.UID)
		if err != nil {
			continue
		}
		for i := range pod.Spec.Volumes {
			vol := &pod.Spec.Volumes[i]
			r, has := recs[v.recordFile(pod.UID, vol.Name)]
			if !has || r.Driver != driver || r.Volume != handle || !r.Ready || !r.there() {
				continue
			}
			if s, ok := v.sourceOf(pod, vol); ok {
				return pod, vol.Name, s, r, true
			}
		}
	}
	return nil, "", source{}, record{}, false
}
