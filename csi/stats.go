package csi

import (
	"context"
	"fmt"
	"strings"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
)

// Stats contains the usage and the health of a published volume, as its CSI driver reports them.
type Stats struct {
	Bytes, Inodes *Usage // nil if the driver does not report the usage
	// Problem is the reason why the volume is unhealthy; "" if the driver reports no problem.
	Problem string
}

// Usage is the usage of a volume in bytes or in inodes.
type Usage struct{ Total, Available, Used uint64 }

// ReportsUsage reports whether the driver reports the usage of volumes.
func (d *Driver) ReportsUsage() bool { return d.can.stats }

// ReportsHealth reports whether the driver reports the health of volumes.
func (d *Driver) ReportsHealth() bool { return d.can.health || d.can.condition && d.can.stats }

// Stats returns the usage and the health of the volume with this ID, which is published at target
// and staged at staging. It does not wait for other calls for the volume, because it changes
// nothing.
func (d *Driver) Stats(ctx context.Context, id, target, staging string) (*Stats, error) {
	ctx, cancel := context.WithTimeout(ctx, queryTimeout)
	defer cancel()
	if !d.can.stage {
		staging = ""
	}
	out := &Stats{}
	if d.can.health {
		res, err := d.node.NodeGetVolumeHealth(ctx,
			&spec.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: target, StagingTargetPath: staging})
		if err != nil {
			return nil, fmt.Errorf("CSI driver %s: NodeGetVolumeHealth of volume %s: %w", d.Name, id, err)
		}
		out.Problem = healthMessage(res.GetVolumeHealth())
	}
	if !d.can.stats {
		return out, nil
	}
	res, err := d.node.NodeGetVolumeStats(ctx,
		&spec.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target, StagingTargetPath: staging})
	if err != nil {
		return nil, fmt.Errorf("CSI driver %s: NodeGetVolumeStats of volume %s: %w", d.Name, id, err)
	}
	for _, u := range res.GetUsage() {
		one := &Usage{Total: nonNegative(u.GetTotal()), Available: nonNegative(u.GetAvailable()),
			Used: nonNegative(u.GetUsed())}
		switch u.GetUnit() {
		case spec.VolumeUsage_BYTES:
			out.Bytes = one
		case spec.VolumeUsage_INODES:
			out.Inodes = one
		}
	}
	if d.can.condition && !d.can.health {
		out.Problem = legacyCondition(res.ProtoReflect().GetUnknown())
	}
	out.Problem = out.Problem[:min(len(out.Problem), maxProblemBytes)]
	return out, nil
}

// maxProblemBytes is the maximum length of Stats.Problem. Longer messages of a driver are
// truncated.
const maxProblemBytes = 1024

// healthMessage returns the health statuses of a volume as one text of at most maxProblemBytes. It
// returns "" if the volume has no health statuses.
func healthMessage(h *spec.VolumeHealth) string {
	var all []string
	for _, e := range h.GetHealthStatuses() {
		text := e.GetStatus().String() + " (" + e.GetReason() + ")"
		if e.GetMessage() != "" {
			text += ": " + e.GetMessage()
		}
		all = append(all, text)
	}
	text := strings.Join(all, "; ")
	return text[:min(len(text), maxProblemBytes)]
}

// Volume health in CSI 1.12 and earlier. volumeCondition is the number of the capability
// VOLUME_CONDITION. In NodeGetVolumeStatsResponse, conditionField is the number of the field
// volume_condition. In its message VolumeCondition, abnormalField and messageField are the numbers
// of the fields abnormal and message. CSI 1.13 removed all of them.
const (
	volumeCondition             spec.NodeServiceCapability_RPC_Type = 4
	conditionField                                                  = 2
	abnormalField, messageField                                     = 1, 2
)

// legacyCondition returns the message in the field volume_condition of a
// NodeGetVolumeStatsResponse, which drivers of CSI 1.12 and earlier send. unknown contains the
// encoded fields of the response that this version of CSI does not define. It returns "" if the
// field is missing or invalid, or if the volume is healthy.
func legacyCondition(unknown []byte) string {
	for len(unknown) > 0 {
		num, kind, n := protowire.ConsumeTag(unknown)
		if n < 0 {
			return ""
		}
		unknown = unknown[n:]
		if num == conditionField && kind == protowire.BytesType {
			b, n := protowire.ConsumeBytes(unknown)
			if n < 0 {
				return ""
			}
			return parseCondition(b)
		}
		if n = protowire.ConsumeFieldValue(num, kind, unknown); n < 0 {
			return ""
		}
		unknown = unknown[n:]
	}
	return ""
}

func parseCondition(b []byte) string {
	abnormal, text := false, ""
	for len(b) > 0 {
		num, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return ""
		}
		b = b[n:]
		switch {
		case num == abnormalField && kind == protowire.VarintType:
			v, _ := protowire.ConsumeVarint(b)
			abnormal = v != 0
		case num == messageField && kind == protowire.BytesType:
			s, _ := protowire.ConsumeBytes(b)
			text = string(s)
		}
		if n = protowire.ConsumeFieldValue(num, kind, b); n < 0 {
			return ""
		}
		b = b[n:]
	}
	if abnormal && text == "" {
		text = "the driver reports it as abnormal"
	}
	if !abnormal {
		return ""
	}
	return text
}

// nonNegative returns n, or 0 if a driver has reported a negative number.
func nonNegative(n int64) uint64 { return uint64(max(n, 0)) }
