package noderesourcesfit

import (
	"context"
	"math"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/saturate"
)

// Strategy is a scoring strategy: how Score converts the utilization of a node's resources, with
// the pod's requests, into a score.
type Strategy struct {
	Kind Kind
	// Resources are the resources that are scored, each with a positive weight; if empty, CPU and
	// memory with equal weights.
	Resources []Resource
	// Shape is used by the kind Ratio only: the scores at some utilizations, sorted by ascending
	// utilization.
	Shape []Step
}

// Kind is the way in which a Strategy converts the utilization of a resource into a score.
type Kind uint8

const (
	Least Kind = iota // LeastAllocated: a lower utilization gives a higher score
	Most              // MostAllocated: a higher utilization gives a higher score
	Ratio             // RequestedToCapacityRatio: the score follows Strategy.Shape
)

// Resource is a resource that a Strategy scores, with its weight in the score of the node.
type Resource struct {
	Name   v1.ResourceName
	Weight int64
}

// Step is one point of Strategy.Shape: a utilization in percent and its score, from 0 to
// framework.MaxScore.
type Step struct{ Utilization, Score int64 }

// Score implements framework.Score: it returns the weighted mean of the scores that the strategy
// gives to the node's resources. Resources that the node does not have are ignored.
func (p Plugin) Score(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) (int64, *framework.Status) {
	s := p.Strategy
	if s == nil || s.Kind == Least && len(s.Resources) == 0 {
		return leastAllocatedScore(c.Pod, n), nil
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
			continue // as in kube-scheduler, the mean does not include a resource with score 0
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

// leastAllocatedScore returns the score of a node if no Strategy is configured: the mean of the
// free CPU and memory, in percent of the allocatable amounts, after the pod's requests are
// subtracted.
func leastAllocatedScore(pod *framework.PodInfo, n *framework.NodeInfo) int64 {
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

// requestedAndAllocatable returns the amount of a resource that is requested on the node, including
// the pod (used), and the allocatable amount (have). Both are 0 for an extended resource that the
// pod does not request. Containers without CPU or memory requests count with defaults.
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

// scoreUtilization returns the score of one resource for the given requested and allocatable
// amounts. allocatable must be positive.
func (s *Strategy) scoreUtilization(requested, allocatable int64) int64 {
	switch s.Kind {
	case Most:
		return saturate.MulDiv(min(requested, allocatable), framework.MaxScore, allocatable)
	case Ratio:
		if requested > allocatable {
			return interpolate(s.Shape, 100)
		}
		return interpolate(s.Shape, saturate.MulDiv(requested, 100, allocatable))
	}
	return saturate.MulDiv(max(allocatable-requested, 0), framework.MaxScore, allocatable)
}

// interpolate returns the score for a utilization, by linear interpolation between the steps.
// Before the first and after the last step, the score is that of this step.
func interpolate(steps []Step, utilization int64) int64 {
	for i, now := range steps {
		if utilization > now.Utilization {
			continue
		}
		if i == 0 {
			return now.Score
		}
		was := steps[i-1]
		return was.Score + (now.Score-was.Score)*(utilization-was.Utilization)/(now.Utilization-was.Utilization)
	}
	if len(steps) == 0 {
		return 0
	}
	return steps[len(steps)-1].Score
}
