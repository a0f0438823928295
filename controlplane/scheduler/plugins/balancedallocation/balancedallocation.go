// Package balancedallocation prefers nodes whose CPU and memory would be used to a like degree.
package balancedallocation

import (
	"context"
	"math"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name of the plugin.
const Name = "NodeResourcesBalancedAllocation"

// Plugin scores by the balance of use.
type Plugin struct{}

// Name implements framework.Plugin.
func (Plugin) Name() string { return Name }

// Score implements framework.Score: 100 less the standard deviation of the used shares, in percent.
func (Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	if n.Allocatable.MilliCPU <= 0 || n.Allocatable.Memory <= 0 {
		return 0, nil
	}
	cpu := min(float64(n.Requested.MilliCPU+c.Pod.Requests.MilliCPU)/float64(n.Allocatable.MilliCPU), 1)
	memory := min(float64(n.Requested.Memory+c.Pod.Requests.Memory)/float64(n.Allocatable.Memory), 1)
	deviation := math.Abs(cpu-memory) / 2 // of two values
	return int64((1 - deviation) * float64(framework.MaxScore)), nil
}
