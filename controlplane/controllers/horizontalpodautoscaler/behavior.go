package horizontalpodautoscaler

import (
	"math"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
)

// History holds an autoscaler's recommendations and scalings for as long as its rules may need
// them. It is not stored. A new leadership starts with the current replicas as the only
// recommendation, which delays a scale-down by a whole stabilization window.
type History struct {
	Wanted  []Moment // the recommendations before rules are applied
	Added   []Moment // numbers of added replicas
	Removed []Moment // numbers of removed replicas
}

// Moment is a number of replicas at a time.
type Moment struct {
	At time.Time
	N  int32
}

// memory is the retention of a History. Valid stabilization windows and policy periods are at most
// this long.
const memory = time.Hour

// most is the maximum number of moments in each list: an hour of recommendations, with a reserve
// for those that events cause in between.
const most = 1024

// appendMoment returns list with m appended, without expired moments. It does not modify list.
func appendMoment(list []Moment, m Moment) []Moment {
	out := make([]Moment, 0, len(list)+1)
	for _, old := range list {
		if old.At.After(m.At.Add(-memory)) {
			out = append(out, old)
		}
	}
	out = append(out, m)
	return out[max(0, len(out)-most):]
}

// sumSince returns the sum of the moments within period before now.
func sumSince(list []Moment, period time.Duration, now time.Time) (n int64) {
	for _, m := range list {
		if m.At.After(now.Add(-period)) {
			n += int64(m.N)
		}
	}
	return n
}

// rules are the scaling rules of one direction, with defaults applied.
type rules struct {
	window   time.Duration
	choose   autoscalingv2.ScalingPolicySelect
	policies []autoscalingv2.HPAScalingPolicy
}

// rulesOf returns the rules of both directions. A stored behavior has its defaults applied already.
// Without a behavior the documented defaults apply: scale down by any number after five minutes;
// scale up to double or by four pods every 15 seconds.
func rulesOf(b *autoscalingv2.HorizontalPodAutoscalerBehavior, o Options) (down, up rules) {
	double := autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PercentScalingPolicy, Value: 100, PeriodSeconds: 15}
	four := autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PodsScalingPolicy, Value: 4, PeriodSeconds: 15}
	down = rules{window: o.DownscaleStabilization, choose: autoscalingv2.MaxChangePolicySelect,
		policies: []autoscalingv2.HPAScalingPolicy{double}}
	up = rules{choose: autoscalingv2.MaxChangePolicySelect, policies: []autoscalingv2.HPAScalingPolicy{four, double}}
	if b != nil {
		down.applyRules(b.ScaleDown)
		up.applyRules(b.ScaleUp)
	}
	return down, up
}

func (r *rules) applyRules(h *autoscalingv2.HPAScalingRules) {
	if h == nil {
		return
	}
	if w := h.StabilizationWindowSeconds; w != nil {
		r.window = time.Duration(*w) * time.Second
	}
	if h.SelectPolicy != nil {
		r.choose = *h.SelectPolicy
	}
	if h.Policies != nil {
		r.policies = h.Policies
	}
}

// toleranceOf returns the tolerance of both directions.
func toleranceOf(b *autoscalingv2.HorizontalPodAutoscalerBehavior, o Options) tolerance {
	t := tolerance{down: o.Tolerance, up: o.Tolerance}
	if b == nil {
		return t
	}
	if b.ScaleDown != nil && b.ScaleDown.Tolerance != nil {
		t.down = b.ScaleDown.Tolerance.AsApproximateFloat64()
	}
	if b.ScaleUp != nil && b.ScaleUp.Tolerance != nil {
		t.up = b.ScaleUp.Tolerance.AsApproximateFloat64()
	}
	return t
}

// stabilizeReplicas limits the wanted number by the recommendations in the stabilization windows.
// It scales up to at most the lowest recommendation in the scale-up window. It scales down to at
// least the highest recommendation in the scale-down window.
func stabilizeReplicas(wanted, current int32, past []Moment, down, up rules, now time.Time) int32 {
	least, highest := wanted, wanted
	for _, m := range past {
		if m.At.After(now.Add(-up.window)) {
			least = min(least, m.N)
		}
		if m.At.After(now.Add(-down.window)) {
			highest = max(highest, m.N)
		}
	}
	return min(max(current, least), highest)
}

// scaleUpLimit returns the largest number that the scale-up policies permit now. It is at least
// current.
func (r rules) scaleUpLimit(current int32, h History, now time.Time) int32 {
	limit := r.policyLimit(current, h, now, func(start, value int64, percent bool) int64 {
		if percent {
			return start + (start*value+99)/100
		}
		return start + value
	}, func(a, b int64) int64 {
		if r.choose == autoscalingv2.MinChangePolicySelect {
			return min(a, b)
		}
		return max(a, b)
	})
	return int32(min(math.MaxInt32, max(int64(current), limit)))
}

// scaleDownLimit returns the smallest number that the scale-down policies permit now. It is at most
// current.
func (r rules) scaleDownLimit(current int32, h History, now time.Time) int32 {
	limit := r.policyLimit(current, h, now, func(start, value int64, percent bool) int64 {
		if percent {
			return start * (100 - min(100, value)) / 100
		}
		return start - value
	}, func(a, b int64) int64 {
		if r.choose == autoscalingv2.MinChangePolicySelect {
			return max(a, b)
		}
		return min(a, b)
	})
	return int32(max(0, min(int64(current), limit)))
}

// policyLimit returns the limit of the policy that choose selects. Each policy counts from the
// number of replicas at the start of its period.
func (r rules) policyLimit(current int32, h History, now time.Time, apply func(start, value int64, percent bool) int64,
	choose func(a, b int64) int64) int64 {
	if r.choose == autoscalingv2.DisabledPolicySelect || len(r.policies) == 0 {
		return int64(current)
	}
	var out int64
	for i, p := range r.policies {
		period := time.Duration(p.PeriodSeconds) * time.Second
		start := int64(current) - sumSince(h.Added, period, now) + sumSince(h.Removed, period, now)
		start = min(math.MaxInt32, max(0, start))
		n := apply(start, int64(p.Value), p.Type == autoscalingv2.PercentScalingPolicy)
		if i == 0 {
			out = n
		}
		out = choose(out, n)
	}
	return out
}
