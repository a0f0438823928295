// Package leastallocated prefers nodes with the most CPU and memory left.
package leastallocated

import (
	"context"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name of the plugin.
const Name = "LeastAllocated"

// Plugin scores by what would be left.
type Plugin struct{}

// Name implements framework.Plugin.
func (Plugin) Name() string { return Name }

// Score implements framework.Score: the mean over CPU and memory of the share that stays free, in percent.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	var sum, kinds int64
	for _, r := range [2][2]int64{
		{n.CountedCPU + c.Pod.CountedCPU, n.Allocatable.MilliCPU},
		{n.CountedMem + c.Pod.CountedMemory, n.Allocatable.Memory},
	} {
		used, have := r[0], r[1]
		if have <= 0 {
			continue
		}
		kinds++
		if used < have {
			sum += (have - used) * framework.MaxScore / have
		}
	}
	if kinds == 0 {
		return 0, nil
	}
	return sum / kinds, nil
}
