package autoscaling

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// The annotations in which v1 has the fields that it lacks, with Kubernetes' names. cpuAtNote is
// Keelson's own: the index of the CPU metric of v1's field among the metrics, if it is not the
// last.
const (
	metricsNote    = "autoscaling.alpha.kubernetes.io/metrics"
	behaviorNote   = "autoscaling.alpha.kubernetes.io/behavior"
	cpuAtNote      = "autoscaling.keelson.dev/cpu-metric-index"
	currentNote    = "autoscaling.alpha.kubernetes.io/current-metrics"
	conditionsNote = "autoscaling.alpha.kubernetes.io/conditions"
)

var (
	autoscalerSpecNotes   = []string{metricsNote, behaviorNote, cpuAtNote}
	autoscalerStatusNotes = []string{currentNote, conditionsNote}
	autoscalerNotes       = slices.Concat(autoscalerSpecNotes, autoscalerStatusNotes)
)

// only returns the annotations with these keys.
func only(all map[string]string, keys []string) map[string]string {
	out := map[string]string{}
	for _, k := range keys {
		if v, ok := all[k]; ok {
			out[k] = v
		}
	}
	return out
}

// exchanged returns a copy of all in which these keys have the values of from, or are missing as in
// from. It returns nil if the result is empty.
func exchanged(all, from map[string]string, keys []string) map[string]string {
	out := maps.Clone(all)
	for _, k := range keys {
		delete(out, k)
	}
	if more := only(from, keys); len(more) > 0 {
		if out == nil {
			out = map[string]string{}
		}
		maps.Copy(out, more)
	}
	if len(out) == 0 {
		return nil
	}
	return out
}

// rules is the JSON form of the scaling behavior in its annotation. The field names are
// capitalized.
type rules struct {
	StabilizationWindowSeconds *int32
	SelectPolicy               *autoscalingv2.ScalingPolicySelect
	Policies                   []rule
	Tolerance                  *resource.Quantity
}

type rule struct {
	Type          autoscalingv2.HPAScalingPolicyType
	Value         int32
	PeriodSeconds int32
}

type behavior struct{ ScaleUp, ScaleDown *rules }

func rulesOf(r *autoscalingv2.HPAScalingRules) *rules {
	if r == nil {
		return nil
	}
	out := &rules{StabilizationWindowSeconds: r.StabilizationWindowSeconds, SelectPolicy: r.SelectPolicy, Tolerance: r.Tolerance}
	for _, p := range r.Policies {
		out.Policies = append(out.Policies, rule(p))
	}
	return out
}

func (r *rules) hub() *autoscalingv2.HPAScalingRules {
	if r == nil {
		return nil
	}
	out := &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: r.StabilizationWindowSeconds, SelectPolicy: r.SelectPolicy, Tolerance: r.Tolerance}
	for _, p := range r.Policies {
		out.Policies = append(out.Policies, autoscalingv2.HPAScalingPolicy(p))
	}
	return out
}

// isCPU reports whether v1 has a field for the metric.
func isCPU(m *autoscalingv2.MetricSpec) bool {
	return m.Type == autoscalingv2.ResourceMetricSourceType && m.Resource != nil && m.Resource.Name == corev1.ResourceCPU &&
		m.Resource.Target.AverageUtilization != nil
}

// autoscalerToV1 returns h in version v1. The result shares nested values with h.
func autoscalerToV1(h *autoscalingv2.HorizontalPodAutoscaler) (*autoscalingv1.HorizontalPodAutoscaler, error) {
	out := &autoscalingv1.HorizontalPodAutoscaler{
		ObjectMeta: h.ObjectMeta,
		Spec: autoscalingv1.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv1.CrossVersionObjectReference(h.Spec.ScaleTargetRef),
			MinReplicas:    h.Spec.MinReplicas, MaxReplicas: h.Spec.MaxReplicas,
		},
		Status: autoscalingv1.HorizontalPodAutoscalerStatus{
			ObservedGeneration: h.Status.ObservedGeneration, LastScaleTime: h.Status.LastScaleTime,
			CurrentReplicas: h.Status.CurrentReplicas, DesiredReplicas: h.Status.DesiredReplicas,
		},
	}
	notes := map[string]any{}
	if others := otherMetrics(h, out, notes); len(others) > 0 {
		notes[metricsNote] = others
	}
	if b := h.Spec.Behavior; b != nil {
		notes[behaviorNote] = behavior{rulesOf(b.ScaleUp), rulesOf(b.ScaleDown)}
	}
	if len(h.Status.CurrentMetrics) > 0 {
		current := make([]autoscalingv1.MetricStatus, len(h.Status.CurrentMetrics))
		for i := range current {
			m := &h.Status.CurrentMetrics[i]
			current[i] = statusToV1(m)
			if m.Type == autoscalingv2.ResourceMetricSourceType && m.Resource != nil && m.Resource.Name == corev1.ResourceCPU {
				out.Status.CurrentCPUUtilizationPercentage = m.Resource.Current.AverageUtilization
			}
		}
		notes[currentNote] = current
	}
	if len(h.Status.Conditions) > 0 {
		conditions := make([]autoscalingv1.HorizontalPodAutoscalerCondition, len(h.Status.Conditions))
		for i, c := range h.Status.Conditions {
			conditions[i] = autoscalingv1.HorizontalPodAutoscalerCondition{
				Type: autoscalingv1.HorizontalPodAutoscalerConditionType(c.Type), Status: c.Status, LastTransitionTime: c.LastTransitionTime,
				Reason: c.Reason, Message: c.Message, ObservedGeneration: c.ObservedGeneration,
			}
		}
		notes[conditionsNote] = conditions
	}
	all := exchanged(h.Annotations, nil, autoscalerNotes)
	for key, v := range notes {
		data, err := json.Marshal(v)
		if err != nil {
			return nil, fmt.Errorf("annotation %s: %w", key, err)
		}
		if all == nil {
			all = map[string]string{}
		}
		all[key] = string(data)
	}
	out.Annotations = all
	return out, nil
}

// otherMetrics sets v1's metric field in out and returns the other metrics. It records the position
// of the CPU metric in notes.
func otherMetrics(h *autoscalingv2.HorizontalPodAutoscaler, out *autoscalingv1.HorizontalPodAutoscaler, notes map[string]any) []autoscalingv1.MetricSpec {
	var others []autoscalingv1.MetricSpec
	cpu := slices.IndexFunc(h.Spec.Metrics, func(m autoscalingv2.MetricSpec) bool { return isCPU(&m) })
	for i := range h.Spec.Metrics {
		if i == cpu {
			out.Spec.TargetCPUUtilizationPercentage = h.Spec.Metrics[i].Resource.Target.AverageUtilization
			continue
		}
		others = append(others, specToV1(&h.Spec.Metrics[i]))
	}
	if cpu >= 0 && cpu < len(others) {
		notes[cpuAtNote] = cpu
	}
	return others
}

// autoscalerFromV1 is the inverse of autoscalerToV1. It returns an error if an annotation is
// malformed.
func autoscalerFromV1(h *autoscalingv1.HorizontalPodAutoscaler) (*autoscalingv2.HorizontalPodAutoscaler, error) {
	out := &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: h.ObjectMeta,
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference(h.Spec.ScaleTargetRef),
			MinReplicas:    h.Spec.MinReplicas, MaxReplicas: h.Spec.MaxReplicas,
		},
		Status: autoscalingv2.HorizontalPodAutoscalerStatus{
			ObservedGeneration: h.Status.ObservedGeneration, LastScaleTime: h.Status.LastScaleTime,
			CurrentReplicas: h.Status.CurrentReplicas, DesiredReplicas: h.Status.DesiredReplicas,
		},
	}
	var others []autoscalingv1.MetricSpec
	var current []autoscalingv1.MetricStatus
	var conditions []autoscalingv1.HorizontalPodAutoscalerCondition
	var b *behavior
	for _, n := range []struct {
		key  string
		into any
	}{{metricsNote, &others}, {currentNote, &current}, {conditionsNote, &conditions}, {behaviorNote, &b}} {
		text, ok := h.Annotations[n.key]
		if !ok {
			continue
		}
		if err := json.Unmarshal([]byte(text), n.into); err != nil {
			return nil, fmt.Errorf("%s: %w", n.key, err)
		}
	}
	for i := range others {
		out.Spec.Metrics = append(out.Spec.Metrics, specFromV1(&others[i]))
	}
	if p := h.Spec.TargetCPUUtilizationPercentage; p != nil {
		at, err := strconv.Atoi(h.Annotations[cpuAtNote])
		if err != nil || at < 0 || at > len(out.Spec.Metrics) {
			at = len(out.Spec.Metrics)
		}
		out.Spec.Metrics = slices.Insert(out.Spec.Metrics, at, cpuMetric(*p))
	}
	if len(out.Spec.Metrics) == 0 { // default of v1, which has no field for it
		out.Spec.Metrics = []autoscalingv2.MetricSpec{cpuMetric(defaultCPUUtilization)}
	}
	if b != nil {
		out.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleUp: b.ScaleUp.hub(), ScaleDown: b.ScaleDown.hub()}
	}
	for i := range current {
		out.Status.CurrentMetrics = append(out.Status.CurrentMetrics, statusFromV1(&current[i]))
	}
	if p := h.Status.CurrentCPUUtilizationPercentage; p != nil && len(current) == 0 {
		out.Status.CurrentMetrics = []autoscalingv2.MetricStatus{{
			Type: autoscalingv2.ResourceMetricSourceType,
			Resource: &autoscalingv2.ResourceMetricStatus{
				Name: corev1.ResourceCPU, Current: autoscalingv2.MetricValueStatus{AverageUtilization: p},
			},
		}}
	}
	for _, c := range conditions {
		out.Status.Conditions = append(out.Status.Conditions, autoscalingv2.HorizontalPodAutoscalerCondition{
			Type: autoscalingv2.HorizontalPodAutoscalerConditionType(c.Type), Status: c.Status, LastTransitionTime: c.LastTransitionTime,
			Reason: c.Reason, Message: c.Message, ObservedGeneration: c.ObservedGeneration,
		})
	}
	out.Annotations = exchanged(h.Annotations, nil, autoscalerNotes)
	return out, nil
}
