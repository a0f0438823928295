package horizontalpodautoscaler

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
)

// twin judges by the whole past, in the plainest way.
type twin struct {
	first    int32
	replicas []HistoryEntry // the replicas from a time on
	wanted   []HistoryEntry
}

// at is how many replicas there were at a time.
func (w *twin) at(when time.Time) int32 {
	n := w.first
	for _, m := range w.replicas {
		if !m.At.After(when) {
			n = m.N
		}
	}
	return n
}

// next is the number of replicas after a tick.
func (w *twin) next(h *autoscalingv2.HorizontalPodAutoscaler, wanted, current int32, now time.Time) int32 {
	up, down := h.Spec.Behavior.ScaleUp, h.Spec.Behavior.ScaleDown
	lowest, highest := wanted, wanted
	for _, m := range w.wanted {
		age := now.Sub(m.At)
		if age < time.Duration(*up.StabilizationWindowSeconds)*time.Second {
			lowest = min(lowest, m.N)
		}
		if age < time.Duration(*down.StabilizationWindowSeconds)*time.Second {
			highest = max(highest, m.N)
		}
	}
	w.wanted = append(w.wanted, HistoryEntry{now, wanted})
	n := current
	n = max(n, lowest)
	n = min(n, highest)
	switch {
	case n > current:
		n = max(current, min(n, h.Spec.MaxReplicas, w.edge(up, 1, current, now)))
	case n < current:
		n = min(current, max(n, *h.Spec.MinReplicas, w.edge(down, -1, current, now)))
	}
	return n
}

// edge is how far the rules of a direction (1 or -1) let the number go now.
func (w *twin) edge(r *autoscalingv2.HPAScalingRules, direction float64, current int32, now time.Time) int32 {
	if *r.SelectPolicy == autoscalingv2.DisabledPolicySelect {
		return current
	}
	best := math.NaN() // the change that is allowed, counted from current in the direction
	for _, p := range r.Policies {
		start := float64(w.at(now.Add(-time.Duration(p.PeriodSeconds) * time.Second)))
		to := start + direction*float64(p.Value)
		if p.Type == autoscalingv2.PercentScalingPolicy {
			to = math.Ceil(start * (100 + float64(p.Value)) / 100)
			if direction < 0 {
				to = math.Floor(start * (100 - min(100, float64(p.Value))) / 100)
			}
		}
		change := (to - float64(current)) * direction
		switch {
		case math.IsNaN(best), *r.SelectPolicy == autoscalingv2.MinChangePolicySelect && change < best,
			*r.SelectPolicy == autoscalingv2.MaxChangePolicySelect && change > best:
			best = change
		}
	}
	return current + int32(direction*max(0, best))
}

func someRules(rnd *rand.Rand) *autoscalingv2.HPAScalingRules {
	selects := []autoscalingv2.ScalingPolicySelect{autoscalingv2.MaxChangePolicySelect,
		autoscalingv2.MinChangePolicySelect,
		autoscalingv2.MaxChangePolicySelect, autoscalingv2.MinChangePolicySelect, autoscalingv2.DisabledPolicySelect}
	r := &autoscalingv2.HPAScalingRules{SelectPolicy: &selects[rnd.IntN(len(selects))],
		StabilizationWindowSeconds: new([]int32{0, 20, 60, 300, 3600}[rnd.IntN(5)])}
	for range 1 + rnd.IntN(3) {
		p := autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PodsScalingPolicy, Value: 1 + rnd.Int32N(6),
			PeriodSeconds: 1 + rnd.Int32N(120)}
		if rnd.IntN(2) == 0 {
			p.Type, p.Value = autoscalingv2.PercentScalingPolicy, 1+rnd.Int32N(220)
		}
		r.Policies = append(r.Policies, p)
	}
	return r
}

// TestThePlanAgreesWithItsTwin drives an autoscaler with random rules through random load. It is
// never outside its bounds, never faster than its policies, and always agrees with a computation
// over the whole past.
func TestThePlanAgreesWithItsTwin(t *testing.T) {
	options := Defaults
	options.Tolerance = 0
	moved := 0
	for seed := range uint64(150) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		h := autoscaler(1+rnd.Int32N(4), 5+rnd.Int32N(60), ofOutside("average 1"))
		h.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleUp: someRules(rnd),
			ScaleDown: someRules(rnd)}
		current := *h.Spec.MinReplicas + rnd.Int32N(h.Spec.MaxReplicas-*h.Spec.MinReplicas+1)
		now := epoch
		w := &twin{first: current, wanted: []HistoryEntry{{epoch, current}}}
		var history History
		load := rnd.Int64N(80)
		for tick := range 120 {
			if rnd.IntN(4) == 0 {
				load = rnd.Int64N(80)
			}
			s := Snapshot{Autoscaler: h, Target: Target{Spec: current, Status: current, Selector: "a=b"},
				History:  history,
				Readings: []Reading{{Value: load * 1000}}, Options: options, Now: now}
			step := PlanAutoscaler(s)
			got := current
			if step.Rescale {
				moved++
				got, step = step.Replicas, s.Rescaled(step, nil)
			}
			want := w.next(h, int32(load), current, now)
			if got != want {
				t.Fatalf("seed %d, tick %d: %d replicas became %d with a load of %d, the twin says %d\nrules %+v",
					seed, tick, current, got, load, want, h.Spec.Behavior)
			}
			if got < *h.Spec.MinReplicas || got > h.Spec.MaxReplicas {
				t.Fatalf("seed %d, tick %d: %d replicas, bounds %d and %d", seed, tick, got, *h.Spec.MinReplicas,
					h.Spec.MaxReplicas)
			}
			if got != current {
				w.replicas = append(w.replicas, HistoryEntry{now, got})
			}
			current, history = got, step.History
			now = now.Add(time.Duration(1+rnd.IntN(40)) * time.Second)
		}
		if n := len(history.Wanted) + len(history.Added) + len(history.Removed); n > 3*maxHistory {
			t.Fatalf("%d moments are remembered", n)
		}
	}
	if moved < 1000 {
		t.Errorf("only %d rescales: the test shows little", moved)
	}
}

// TestPodsOfWhichNothingIsKnownTurnNothingAround tries pods in random states. While the measured
// pods require a scale-up, missing samples cause no scale-down. While they require a scale-down,
// missing samples cause no scale-up.
func TestPodsOfWhichNothingIsKnownTurnNothingAround(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 5))
	for round := range 3000 {
		n := 1 + rnd.IntN(8)
		words := ""
		for range n {
			words += []string{"", "", "", "young:", "pending:"}[rnd.IntN(5)] +
				[]string{"100", "300", "500", "900", "2000", "-"}[rnd.IntN(6)] + " "
		}
		pods, samples := podsOf(t, words)
		metric := percent(corev1.ResourceCPU, 50)
		s := Snapshot{Autoscaler: autoscaler(1, 100, metric), Pods: pods, Options: Defaults, Now: epoch,
			Target: Target{Spec: int32(n), Selector: "a=b"}}
		p := s.proposeReplicas(&metric, Reading{Samples: samples})
		if p.err != nil {
			continue
		}
		known := *p.status.Resource.Current.AverageUtilization
		sorted := groupPods(pods, samples, corev1.ResourceCPU, epoch, Defaults)
		if known > 50 && p.replicas < int32(n) && len(sorted.unready)+len(sorted.missing) > 0 {
			t.Fatalf("round %d: %s: at %d%% of 50%% the %d replicas become %d", round, words, known, n, p.replicas)
		}
		if known < 50 && p.replicas > int32(n) {
			t.Fatalf("round %d: %s: at %d%% of 50%% the %d replicas become %d", round, words, known, n, p.replicas)
		}
	}
}
