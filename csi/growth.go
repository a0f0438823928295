package csi

import (
	"context"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
)

// ExpandsVolumes reports whether the driver requires that Expand is called after an expansion of a
// volume.
func (d *Driver) ExpandsVolumes() bool { return d.can.expand }

// Expand calls NodeExpandVolume for a volume that is published at TargetPath, so that its file
// system has at least size bytes. It is idempotent. The result actual is the new size, or 0 if the
// driver does not report it.
func (d *Driver) Expand(ctx context.Context, v Volume, size int64, secrets map[string]string) (
	actual int64, err error,
) {
	err = d.callForVolume(ctx, v.ID, "NodeExpandVolume", func(ctx context.Context) error {
		q := &spec.NodeExpandVolumeRequest{VolumeId: v.ID, VolumePath: v.TargetPath,
			VolumeCapability: d.volumeCapability(v),
			CapacityRange:    &spec.CapacityRange{RequiredBytes: size}, Secrets: secrets}
		if d.can.stage {
			q.StagingTargetPath = v.StagingPath
		}
		res, err := d.node.NodeExpandVolume(ctx, q)
		actual = res.GetCapacityBytes()
		return err
	})
	return actual, err
}
