package csi

import (
	"context"
	"fmt"
	"strings"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
)

// Stats is what a driver says of a published volume.
type Stats struct {
	Bytes, Inodes *Usage // nil where the driver does not say
	// Trouble is what is wrong with the volume, in the driver's words; "" = nothing that it knows of.
	Trouble string
}

// Usage is how full a volume is.
type Usage struct{ Total, Available, Used uint64 }

// Counts says that the driver tells how full volumes are.
func (d *Driver) Counts() bool { return d.counts }

// Judges says that the driver tells whether volumes are well.
func (d *Driver) Judges() bool { return d.health || d.judges && d.counts }

// Stats asks how full a volume is, and whether it is well. It does not wait for other calls about the volume: reading is
// no change.
func (d *Driver) Stats(ctx context.Context, id, target, staging string) (*Stats, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	if !d.stages {
		staging = ""
	}
	out := &Stats{}
	if d.health {
		res, err := d.node.NodeGetVolumeHealth(ctx, &spec.NodeGetVolumeHealthRequest{VolumeId: id, VolumePublishPath: target, StagingTargetPath: staging})
		if err != nil {
			return nil, fmt.Errorf("CSI driver %s: NodeGetVolumeHealth of volume %s: %w", d.Name, id, err)
		}
		out.Trouble = trouble(res.GetVolumeHealth())
	}
	if !d.counts {
		return out, nil
	}
	res, err := d.node.NodeGetVolumeStats(ctx, &spec.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target, StagingTargetPath: staging})
	if err != nil {
		return nil, fmt.Errorf("CSI driver %s: NodeGetVolumeStats of volume %s: %w", d.Name, id, err)
	}
	for _, u := range res.GetUsage() {
		one := &Usage{Total: least(u.GetTotal()), Available: least(u.GetAvailable()), Used: least(u.GetUsed())}
		switch u.GetUnit() {
		case spec.VolumeUsage_BYTES:
			out.Bytes = one
		case spec.VolumeUsage_INODES:
			out.Inodes = one
		}
	}
	if d.judges && !d.health {
		out.Trouble = condition(res.ProtoReflect().GetUnknown())
	}
	out.Trouble = out.Trouble[:min(len(out.Trouble), maxTrouble)]
	return out, nil
}

// maxTrouble is how much of a driver's words is passed on, in bytes.
const maxTrouble = 1024

// trouble words what is wrong with a volume.
func trouble(h *spec.VolumeHealth) string {
	var all []string
	for _, e := range h.GetHealthStatuses() {
		text := e.GetStatus().String() + " (" + e.GetReason() + ")"
		if e.GetMessage() != "" {
			text += ": " + e.GetMessage()
		}
		all = append(all, text)
	}
	text := strings.Join(all, "; ")
	return text[:min(len(text), maxTrouble)]
}

// What CSI 1.12 and before had for the health of volumes, and 1.13 took out: capability VOLUME_CONDITION, and field 2 of
// NodeGetVolumeStatsResponse, which is a message of a bool (abnormal) and a string.
const (
	volumeCondition      spec.NodeServiceCapability_RPC_Type = 4
	conditionField                                           = 2
	abnormalField, words                                     = 1, 2
)

// condition reads that field; "" where a volume is well.
func condition(unknown []byte) string {
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
			return conditionOf(b)
		}
		if n = protowire.ConsumeFieldValue(num, kind, unknown); n < 0 {
			return ""
		}
		unknown = unknown[n:]
	}
	return ""
}

func conditionOf(b []byte) string {
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
		case num == words && kind == protowire.BytesType:
			s, _ := protowire.ConsumeBytes(b)
			text = string(s)
		}
		if n = protowire.ConsumeFieldValue(num, kind, b); n < 0 {
			return ""
		}
		b = b[n:]
	}
	if abnormal && text == "" {
		text = "the driver calls it abnormal"
	}
	if !abnormal {
		return ""
	}
	return text
}

// least reads a number that a driver may have got wrong.
func least(n int64) uint64 { return uint64(max(n, 0)) }
