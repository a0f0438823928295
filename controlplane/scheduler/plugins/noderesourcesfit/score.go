package noderesourcesfit

import (
	"context"
	"math"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/saturate"
)

// Strategy scores a node by the utilization of its resources, including the pod's own requests.
type Strategy struct {
	Kind Kind
	// Resources that count, each with a positive weight; none = CPU and memory with equal weights.
	Resources []Resource
	// Shape belongs to Ratio: the score at a percentage of utilization, in increasing order.
	Shape []Step
}

// Kind is the kind of a strategy.
type Kind uint8

const (
	Least Kind = iota // more free resources are better
	Most              // fewer free resources are better
	Ratio             // score by Shape
)

// Resource is a resource with its weight.
type Resource struct {
	Name   v1.ResourceName
	Weight int64
}

// Step is a point of a shape. Score is from 0 to framework.MaxScore.
type Step struct{ Utilization, Score int64 }

// Score implements framework.Score: the weighted mean over the resources that the node has.
func (p Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	s := p.Strategy
	if s == nil || s.Kind == Least && len(s.Resources) == 0 {
		return leastOfBoth(c.Pod, n), nil
	}
	resources := s.Resources
	if len(resources) == 0 {
		resources = bothAlike
	}
	var sum, weights int64
	for _, r := range resources {
		used, have := requestedAndAllocatable(c.Pod, n, r.Name)
		if have <= 0 {
			continue
		}
		score := s.scoreUtilization(used, have)
		if s.Kind == Ratio && score <= 0 {
			continue // as in Kubernetes, a resource with score 0 is left out of the mean
		}
		sum += score * r.Weight
		weights += r.Weight
	}
	switch {
	case weights == 0:
		return 0, nil
	case s.Kind == Ratio:
		return int64(math.Round(float64(sum) / float64(weights))), nil
	}
	return sum / weights, nil
}

var bothAlike = []Resource{{v1.ResourceCPU, 1}, {v1.ResourceMemory, 1}}

// leastOfBoth is the default score: the mean over CPU and memory of the free share, in percent.
func leastOfBoth(pod *framework.PodInfo, n *framework.NodeInfo) int64 {
	var sum, kinds int64
	for _, r := range [2][2]int64{
		{saturate.Add(n.CountedCPU, pod.CountedCPU), n.Allocatable.MilliCPU},
		{saturate.Add(n.CountedMem, pod.CountedMemory), n.Allocatable.Memory},
	} {
		used, have := r[0], r[1]
		if have <= 0 {
			continue
		}
		kinds++
		if used < have {
			sum += saturate.MulDiv(have-used, framework.MaxScore, have)
		}
	}
	if kinds == 0 {
		return 0
	}
	return sum / kinds
}

// requestedAndAllocatable returns how much of a resource would be requested on the node, and how
// much the node has. Both are
// 0 for a resource that does not concern the pod. Pods without CPU or memory requests are counted
// with defaults.
func requestedAndAllocatable(pod *framework.PodInfo, n *framework.NodeInfo, name v1.ResourceName) (used, have int64) {
	switch name {
	case v1.ResourceCPU:
		return saturate.Add(n.CountedCPU, pod.CountedCPU), n.Allocatable.MilliCPU
	case v1.ResourceMemory:
		return saturate.Add(n.CountedMem, pod.CountedMemory), n.Allocatable.Memory
	}
	want := pod.Requests.Of(name)
	if want == 0 && !framework.Native(name) {
		return 0, 0
	}
	return saturate.Add(n.Requested.Of(name), want), n.Allocatable.Of(name)
}

// scoreUtilization returns the score for the utilization of one resource. have must be positive.
func (s *Strategy) scoreUtilization(used, have int64) int64 {
	switch s.Kind {
	case Most:
		return saturate.MulDiv(min(used, have), framework.MaxScore, have)
	case Ratio:
		if used > have {
			return interpolate(s.Shape, 100)
		}
		return interpolate(s.Shape, saturate.MulDiv(used, 100, have))
	}
	return saturate.MulDiv(max(have-used, 0), framework.MaxScore, have)
}

// interpolate returns the value at a point of the line through the steps, which is constant before
// the first and after the last step.
func interpolate(steps []Step, at int64) int64 {
	for i, now := range steps {
		if at > now.Utilization {
			continue
		}
		if i == 0 {
			return now.Score
		}
		was := steps[i-1]
		return was.Score + (now.Score-was.Score)*(at-was.Utilization)/(now.Utilization-was.Utilization)
	}
	if len(steps) == 0 {
		return 0
	}
	return steps[len(steps)-1].Score
}
