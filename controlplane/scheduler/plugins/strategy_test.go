package plugins_test

import (
	"fmt"
	"math"
	"math/big"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"pgregory.net/rapid"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins/noderesourcesfit"
)

// twinStrategy rates a node by the objects alone, as Kubernetes documents the strategies: amounts are added up from the
// pods' requests, in whole numbers of any size.
func twinStrategy(s *noderesourcesfit.Strategy, node *v1.Node, there []*v1.Pod, p *v1.Pod) int64 {
	var sum, weights int64
	for _, r := range s.Resources {
		have, used := amount(node.Status.Allocatable, r.Name), new(big.Int)
		extended := r.Name == "example.com/gpu"
		if extended && amount(requestsOf(p), r.Name).Sign() == 0 {
			continue
		}
		for _, q := range append([]*v1.Pod{p}, there...) {
			list := requestsOf(q)
			_, said := list[r.Name]
			switch {
			case !said && r.Name == v1.ResourceCPU:
				used.Add(used, big.NewInt(100))
			case !said && r.Name == v1.ResourceMemory:
				used.Add(used, big.NewInt(200<<20))
			default:
				used.Add(used, amount(list, r.Name))
			}
		}
		if have.Sign() <= 0 {
			continue
		}
		score := twinRate(s, used, have)
		if s.Kind == noderesourcesfit.Ratio && score == 0 {
			continue
		}
		sum, weights = sum+score*r.Weight, weights+r.Weight
	}
	switch {
	case weights == 0:
		return 0
	case s.Kind == noderesourcesfit.Ratio:
		return int64(math.Round(float64(sum) / float64(weights)))
	}
	return sum / weights
}

func percent(a, b *big.Int) int64 {
	return new(big.Int).Div(new(big.Int).Mul(a, big.NewInt(100)), b).Int64()
}

func twinRate(s *noderesourcesfit.Strategy, used, have *big.Int) int64 {
	over := used.Cmp(have) > 0
	switch s.Kind {
	case noderesourcesfit.Least:
		if over {
			return 0
		}
		return percent(new(big.Int).Sub(have, used), have)
	case noderesourcesfit.Most:
		if over {
			return 100
		}
		return percent(used, have)
	}
	at := int64(100)
	if !over {
		at = percent(used, have)
	}
	// Every percentage from 0 to 100 is looked up in a table that is drawn step by step.
	table := make([]int64, 101)
	for i := range table {
		x := int64(i)
		table[i] = s.Shape[len(s.Shape)-1].Score
		for j := len(s.Shape) - 1; j >= 0; j-- {
			if x <= s.Shape[j].Utilization {
				table[i] = s.Shape[j].Score
				if j > 0 && x > s.Shape[j-1].Utilization {
					a, b := s.Shape[j-1], s.Shape[j]
					rise := new(big.Rat).SetFrac64((b.Score-a.Score)*(x-a.Utilization), b.Utilization-a.Utilization)
					table[i] = a.Score + new(big.Int).Quo(rise.Num(), rise.Denom()).Int64()
				}
			}
		}
	}
	return table[at]
}

func requestsOf(p *v1.Pod) v1.ResourceList { return p.Spec.Containers[0].Resources.Requests }

func amount(l v1.ResourceList, name v1.ResourceName) *big.Int {
	q := l[name]
	if name == v1.ResourceCPU {
		return big.NewInt(q.MilliValue())
	}
	return big.NewInt(q.Value())
}

// F86: each strategy rates each node as its twin does.
func TestStrategiesEqualTwin(t *testing.T) {
	var seen [3]map[int64]bool
	for i := range seen {
		seen[i] = map[int64]bool{}
	}
	rapid.Check(t, func(t *rapid.T) {
		list := func(what string, zero bool) v1.ResourceList {
			out := v1.ResourceList{}
			for name, unit := range map[v1.ResourceName]string{v1.ResourceCPU: "m", v1.ResourceMemory: "Mi",
				v1.ResourceEphemeralStorage: "Mi", "example.com/gpu": ""} {
				if least := 1; zero || rapid.Bool().Draw(t, what+" has "+string(name)) {
					if zero {
						least = 0
					}
					out[name] = resource.MustParse(fmt.Sprintf("%d%s",
						rapid.IntRange(least, 4000).Draw(t, what+" "+string(name)), unit))
				}
			}
			return out
		}
		n := &v1.Node{}
		n.Name, n.Status.Allocatable = "n", list("node", true)
		newPod := func(name string) *v1.Pod {
			return pod(func(p *v1.Pod) { p.Name, p.Spec.Containers[0].Resources.Requests = name, list(name, false) })
		}
		info := &framework.NodeInfo{}
		info.SetNode(n)
		var there []*v1.Pod
		for i := range rapid.IntRange(0, 3).Draw(t, "pods") {
			q := newPod(fmt.Sprintf("p%d", i))
			there = append(there, q)
			info.AddPod(framework.NewPodInfo(q))
		}
		s := &noderesourcesfit.Strategy{Kind: noderesourcesfit.Kind(rapid.IntRange(0, 2).Draw(t, "kind"))}
		for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory, v1.ResourceEphemeralStorage,
			"example.com/gpu"} {
			if rapid.Bool().Draw(t, "counts "+string(name)) {
				s.Resources = append(s.Resources, noderesourcesfit.Resource{Name: name,
					Weight: rapid.Int64Range(1, 100).Draw(t, "weight")})
			}
		}
		if len(s.Resources) == 0 {
			s.Resources = []noderesourcesfit.Resource{{Name: v1.ResourceCPU, Weight: 1},
				{Name: v1.ResourceMemory, Weight: 1}}
		}
		if s.Kind == noderesourcesfit.Ratio {
			at := rapid.Int64Range(0, 40).Draw(t, "first step")
			for range rapid.IntRange(1, 4).Draw(t, "steps") {
				s.Shape = append(s.Shape, noderesourcesfit.Step{Utilization: at,
					Score: 10 * rapid.Int64Range(0, 10).Draw(t, "score")})
				at += rapid.Int64Range(1, 20).Draw(t, "further")
			}
		}
		p := newPod("new")
		got, _ := noderesourcesfit.Plugin{Strategy: s}.Score(t.Context(),
			framework.NewCycle(framework.NewPodInfo(p), nil), info)
		want := twinStrategy(s, n, there, p)
		if got != want {
			t.Fatalf("%+v: %d, want %d", s, got, want)
		}
		if got < 0 || got > framework.MaxScore {
			t.Fatalf("%+v: score %d", s, got)
		}
		seen[s.Kind][got] = true
	})
	for kind, scores := range seen {
		if len(scores) < 5 {
			t.Errorf("strategy %d gave %d different scores only", kind, len(scores))
		}
	}
}
