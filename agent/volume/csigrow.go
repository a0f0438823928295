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

// needsNodeExpansion reports whether a volume must still be expanded on the node. The status of its
// claim states that.
func needsNodeExpansion(pv *v1.PersistentVolume, claim *v1.PersistentVolumeClaim) bool {
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

// expandPublished calls NodeExpandVolume for a published volume that was expanded while no pod used
// it. A failure is logged only: the control plane retries, and the pod does not wait for it.
func (v *csiVolumes) expandPublished(ctx context.Context, d *csi.Driver, s csiSource, cv csi.Volume) {
	if !s.needsExpansion || !d.ExpandsVolumes() {
		return
	}
	secrets, err := readSecret(v.cfg.Objects, s.expandSecret)
	if err == nil {
		_, err = d.Expand(ctx, cv, s.size, secrets)
	}
	if err != nil {
		v.cfg.Log.Warn("the file system of an expanded volume could not be expanded yet", "volume", s.name, "err", err)
	}
}

// callDriver calls a CSI driver of this node for the control plane, and returns the encoded
// response. For NodeExpandVolume it uses only the volume ID and the size of the request, and adds
// paths and secrets itself.
func (v *csiVolumes) callDriver(ctx context.Context, driver, method string, request []byte, timeout time.Duration) (
	[]byte, error,
) {
	if v.cfg.CSI == nil {
		return nil, fmt.Errorf("%w: %s", csi.ErrNoDriver, driver)
	}
	if method != spec.Node_NodeExpandVolume_FullMethodName {
		return v.cfg.CSI.Call(ctx, driver, method, request, timeout)
	}
	q := &spec.NodeExpandVolumeRequest{}
	if err := proto.Unmarshal(request, q); err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "expanding a volume of CSI driver %s: %v", driver, err)
	}
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	got, err := v.expandMounted(ctx, driver, q.GetVolumeId(), q.GetCapacityRange().GetRequiredBytes())
	if err != nil {
		return nil, err
	}
	return proto.Marshal(&spec.NodeExpandVolumeResponse{CapacityBytes: got})
}

// expandMounted calls NodeExpandVolume of the driver for the volume handle, which is mounted on
// this node. It returns the volume's new size.
func (v *csiVolumes) expandMounted(ctx context.Context, driver, handle string, size int64) (int64, error) {
	defer v.locks.Lock(driver + "\x00" + handle)()
	pod, vol, s, r, ok := v.findUser(driver, handle)
	if !ok {
		return 0, status.Errorf(codes.Unavailable, "volume %s of CSI driver %s is not mounted on this node",
			handle, driver)
	}
	d, err := v.cfg.CSI.Driver(ctx, driver)
	if err != nil || !d.ExpandsVolumes() {
		return 0, err // a driver without node expansion has nothing to do
	}
	cv, err := v.driverVolume(pod, s, r)
	if err != nil {
		return 0, fmt.Errorf("volume %q: %w", vol, err)
	}
	secrets, err := readSecret(v.cfg.Objects, s.expandSecret)
	if err != nil {
		return 0, fmt.Errorf("volume %q: %w", vol, err)
	}
	return d.Expand(ctx, cv, size, secrets)
}

// findUser searches for a pod of this node that has the volume handle of the driver mounted. It
// returns the pod, the name of the pod's volume, and its source and record. ok is false if there is
// no such pod. The caller holds the lock of the volume.
func (v *csiVolumes) findUser(driver, handle string) (pod *v1.Pod, vol string, s csiSource, r csiRecord, ok bool) {
	for _, pod := range v.cfg.Objects.Pods() {
		recs, err := v.csiRecords(pod.UID)
		if err != nil {
			continue
		}
		for i := range pod.Spec.Volumes {
			vol := &pod.Spec.Volumes[i]
			r, has := recs[v.csiRecordFile(pod.UID, vol.Name)]
			if !has || r.Driver != driver || r.Volume != handle || !r.Ready || !r.isPublished() {
				continue
			}
			if s, ok := v.csiSourceOf(pod, vol); ok {
				return pod, vol.Name, s, r, true
			}
		}
	}
	return nil, "", csiSource{}, csiRecord{}, false
}
