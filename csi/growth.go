package csi

import (
	"context"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
)

// Grows says that the driver has a part in the growth of volumes on the node.
func (d *Driver) Grows() bool { return d.grows }

// Expand has the driver make a volume that is published at TargetPath use all of its size, which is size bytes at least.
// Idempotent. got is what it has then, 0 where the driver does not say.
func (d *Driver) Expand(ctx context.Context, v Volume, size int64, secrets map[string]string) (got int64, err error) {
	err = d.call(ctx, v.ID, "NodeExpandVolume", func(ctx context.Context) error {
		q := &spec.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: v.TargetPath, VolumeCapability: d.capability(v),
			CapacityRange: &spec.CapacityRange{RequiredBytes: size}, Secrets: secrets}
		if d.stages {
			q.StagingTargetPath = v.StagingPath
		}
		res, err := d.node.NodeExpandVolume(ctx, q)
		got = res.GetCapacityBytes()
		return err
	})
	return got, err
}
