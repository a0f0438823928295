package noderesourcesfit

import (
	"context"
	"math"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/saturate"
)

// Strategy rates a node by how much of its resources is asked for, the pod's own requests among them.
type Strategy struct {
	Kind Kind
	// Resources that count, each with a weight above 0; none = CPU and memory, alike.
	Resources []Resource
	// Shape is Ratio's: what a node is worth at a percentage of use, by rising use.
	Shape []Step
}

// Kind is one of the strategies.
type Kind uint8

const (
	Least Kind = iota // the more is left the better
	Most              // the less is left the better
	Ratio             // as the shape says
)

// Resource is one that counts.
type Resource struct {
	Name   v1.ResourceName
	Weight int64
}

// Step is a point of a shape: Score is from 0 to framework.MaxScore.
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
			continue // what is worth nothing is left out of the mean, as Kubernetes does
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

// leastOfBoth is the default: the mean over CPU and memory of the share that stays free, in percent.
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

// requestedAndAllocatable is how much of a resource would be asked for on the node, and how much it has: 0 for what does not concern the
// pod. Pods that ask for no CPU or memory are counted with a guess.
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

// scoreUtilization is what so much use of one resource is worth. have is above 0.
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

// interpolate is the line through the steps, level before the first and after the last.
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
