// Package balancedallocation is the Score plugin NodeResourcesBalancedAllocation. It prefers nodes
// on which CPU and memory are requested to a similar degree.
package balancedallocation

import (
	"context"
	"math"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/saturate"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "NodeResourcesBalancedAllocation"

// Plugin gives a higher score to a node whose resources, with the pod, are requested to a similar
// degree. The zero value compares CPU and memory.
type Plugin struct {
	// Resources are the resources to compare; if empty, CPU and memory.
	Resources []v1.ResourceName
}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Score implements framework.Score: it returns 100 minus the standard deviation of the percentages
// of the node's resources that are requested, including the requests of the pod.
func (p Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	if len(p.Resources) > 0 {
		return p.balanceScore(c.Pod, n), nil
	}
	if n.Allocatable.MilliCPU <= 0 || n.Allocatable.Memory <= 0 {
		return 0, nil
	}
	cpu := min(float64(saturate.Add(n.Requested.MilliCPU, c.Pod.Requests.MilliCPU))/float64(n.Allocatable.MilliCPU), 1)
	memory := min(float64(saturate.Add(n.Requested.Memory, c.Pod.Requests.Memory))/float64(n.Allocatable.Memory), 1)
	deviation := math.Abs(cpu-memory) / 2 // the standard deviation of two values is half their difference
	return int64((1 - deviation) * float64(framework.MaxScore)), nil
}

// balanceScore returns the score of the node for the resources in p.Resources. It ignores resources
// that the node does not have, and extended resources that the pod does not request.
func (p Plugin) balanceScore(pod *framework.PodInfo, n *framework.NodeInfo) int64 {
	var shares []float64
	var mean float64
	for _, name := range p.Resources {
		want, have := pod.Requests.Of(name), n.Allocatable.Of(name)
		if have <= 0 || want == 0 && !framework.Native(name) {
			continue
		}
		share := min(float64(saturate.Add(n.Requested.Of(name), want))/float64(have), 1)
		shares, mean = append(shares, share), mean+share
	}
	if len(shares) == 0 {
		return 0
	}
	mean /= float64(len(shares))
	var squares float64
	for _, s := range shares {
		squares += (s - mean) * (s - mean)
	}
	return int64((1 - math.Sqrt(squares/float64(len(shares)))) * float64(framework.MaxScore))
}
