package horizontalpodautoscaler

import (
	"math"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
)

// History holds the recent recommendations and scalings of one autoscaler, from which the
// stabilization windows and scaling policies are evaluated. It is not stored. After a change of the
// leader it starts with the current replicas as the only recommendation, which delays a scale-down
// by a whole stabilization window.
type History struct {
	Wanted  []HistoryEntry // recommended replicas, before the rules of behavior are applied
	Added   []HistoryEntry // replicas added by each scale-up
	Removed []HistoryEntry // replicas removed by each scale-down
}

// HistoryEntry is one entry of a History: a number of replicas and its time.
type HistoryEntry struct {
	At time.Time
	N  int32
}

// historyLifetime is how long a History keeps an entry. Validation limits stabilization windows and
// policy periods to one hour.
const historyLifetime = time.Hour

// maxHistory is the maximum number of entries in each list of a History. An hour has 240 periodic
// recommendations; further recommendations follow changes of objects.
const maxHistory = 1024

// appendEntry returns a new list: the entries of list that are younger than historyLifetime at the
// time of entry m, and then m. If the new list has more than maxHistory entries, the oldest are
// dropped. list is not modified.
func appendEntry(list []HistoryEntry, m HistoryEntry) []HistoryEntry {
	out := make([]HistoryEntry, 0, len(list)+1)
	for _, old := range list {
		if old.At.After(m.At.Add(-historyLifetime)) {
			out = append(out, old)
		}
	}
	out = append(out, m)
	return out[max(0, len(out)-maxHistory):]
}

// sumSince returns the sum of the replicas in the entries of list that are younger than period at
// the time now.
func sumSince(list []HistoryEntry, period time.Duration, now time.Time) (n int64) {
	for _, m := range list {
		if m.At.After(now.Add(-period)) {
			n += int64(m.N)
		}
	}
	return n
}

// rules are the scaling rules of spec.behavior for scaling up or for scaling down, with defaults.
type rules struct {
	window   time.Duration
	choose   autoscalingv2.ScalingPolicySelect
	policies []autoscalingv2.HPAScalingPolicy
}

// rulesOf returns the rules for scaling down and for scaling up. If b is nil, the defaults of
// Kubernetes apply: a scale-down by any number after five minutes, and a scale-up to double or by
// four pods every
// 15 seconds. If b is not nil, admission has already set its defaults.
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

// toleranceOf returns the tolerances of behavior b. A tolerance that b does not specify is
// o.Tolerance.
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

// stabilizeReplicas returns the wanted number of replicas, limited by the past recommendations. A
// scale-up goes at most to the lowest recommendation in the scale-up window. A scale-down goes at
// least to the highest recommendation in the scale-down window.
func stabilizeReplicas(wanted, current int32, past []HistoryEntry, down, up rules, now time.Time) int32 {
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

// scaleUpLimit returns the largest number of replicas that the scale-up policies permit now. It is
// at least current. h holds the scalings of the policies' periods.
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

// scaleDownLimit returns the smallest number of replicas that the scale-down policies permit now.
// It is at most current. h holds the scalings of the policies' periods.
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

// policyLimit returns the number of replicas that the policies permit, or current if scaling in
// this direction is disabled. apply returns the limit of one policy, from the number of replicas at
// the start of the policy's period and from the policy's value. choose combines the limits of two
// policies: it returns one of them.
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
