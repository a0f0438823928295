package noderesourcesfit

import (
	"context"
	"math"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/saturate"
)

// Strategy is a way to score a node by the utilization of its resources, including the pod's
// requests.
type Strategy struct {
	Kind Kind
	// Resources are the resources that are scored, each with a positive weight; if empty, CPU and
	// memory with equal weights.
	Resources []Resource
	// Shape is used by Ratio only: the scores at percentages of utilization, in increasing order of
	// utilization.
	Shape []Step
}

// Kind is the way in which a Strategy scores the utilization of a resource.
type Kind uint8

const (
	Least Kind = iota // more free resources are better
	Most              // fewer free resources are better
	Ratio             // score by Shape
)

// Resource is a resource that is scored, with its weight.
type Resource struct {
	Name   v1.ResourceName
	Weight int64
}

// Step is one point of Strategy.Shape: a utilization in percent and its score, from 0 to
// framework.MaxScore.
type Step struct{ Utilization, Score int64 }

// Score implements framework.Score: the weighted mean of the scores of the resources that the node
// has.
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

// leastOfBoth returns the default score of a node: the mean of the free shares of CPU and memory,
// in percent.
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

// requestedAndAllocatable returns how much of a resource would be requested on the node with the
// pod, and how much is allocatable. Both are 0 for an extended resource that the pod does not
// request. For CPU and memory, containers without requests are counted with defaults.
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

// scoreUtilization returns the score of one resource of which used is requested and have is
// allocatable. have must be positive.
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

// interpolate returns the score at a utilization by linear interpolation between the steps. Before
// the first and after the last step the score is constant.
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
