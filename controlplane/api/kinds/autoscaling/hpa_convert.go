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

// The annotations that contain, in v1, the fields that v1 lacks. Their names are those of
// Kubernetes, except for cpuAtNote. That is the index in the v2 metrics of the CPU metric that is a
// field in v1, if it is not the last metric.
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

// selectKeys returns the annotations with the given keys.
func selectKeys(annotations map[string]string, keys []string) map[string]string {
	out := map[string]string{}
	for _, k := range keys {
		if v, ok := annotations[k]; ok {
			out[k] = v
		}
	}
	return out
}

// replaceKeys returns a copy of annotations in which the given keys have the values of source. Keys
// that source lacks are removed. It returns nil if the result is empty.
func replaceKeys(annotations, source map[string]string, keys []string) map[string]string {
	out := maps.Clone(annotations)
	for _, k := range keys {
		delete(out, k)
	}
	if more := selectKeys(source, keys); len(more) > 0 {
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

// rules is the JSON format of the scaling behavior in the annotation of a v1 autoscaler. The field
// names are capitalized.
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

func rulesFromHub(r *autoscalingv2.HPAScalingRules) *rules {
	if r == nil {
		return nil
	}
	out := &rules{StabilizationWindowSeconds: r.StabilizationWindowSeconds, SelectPolicy: r.SelectPolicy,
		Tolerance: r.Tolerance}
	for _, p := range r.Policies {
		out.Policies = append(out.Policies, rule(p))
	}
	return out
}

func (r *rules) toHub() *autoscalingv2.HPAScalingRules {
	if r == nil {
		return nil
	}
	out := &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: r.StabilizationWindowSeconds,
		SelectPolicy: r.SelectPolicy, Tolerance: r.Tolerance}
	for _, p := range r.Policies {
		out.Policies = append(out.Policies, autoscalingv2.HPAScalingPolicy(p))
	}
	return out
}

// isCPU reports whether a metric is the CPU utilization, for which v1 has a field.
func isCPU(metric *autoscalingv2.MetricSpec) bool {
	return metric.Type == autoscalingv2.ResourceMetricSourceType && metric.Resource != nil &&
		metric.Resource.Name == corev1.ResourceCPU &&
		metric.Resource.Target.AverageUtilization != nil
}

// autoscalerToV1 converts an autoscaler to version v1. The result shares nested values with it.
func autoscalerToV1(autoscaler *autoscalingv2.HorizontalPodAutoscaler) (*autoscalingv1.HorizontalPodAutoscaler, error) {
	out := &autoscalingv1.HorizontalPodAutoscaler{
		ObjectMeta: autoscaler.ObjectMeta,
		Spec: autoscalingv1.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv1.CrossVersionObjectReference(autoscaler.Spec.ScaleTargetRef),
			MinReplicas:    autoscaler.Spec.MinReplicas, MaxReplicas: autoscaler.Spec.MaxReplicas,
		},
		Status: autoscalingv1.HorizontalPodAutoscalerStatus{
			ObservedGeneration: autoscaler.Status.ObservedGeneration, LastScaleTime: autoscaler.Status.LastScaleTime,
			CurrentReplicas: autoscaler.Status.CurrentReplicas, DesiredReplicas: autoscaler.Status.DesiredReplicas,
		},
	}
	notes := map[string]any{}
	if others := otherMetrics(autoscaler, out, notes); len(others) > 0 {
		notes[metricsNote] = others
	}
	if b := autoscaler.Spec.Behavior; b != nil {
		notes[behaviorNote] = behavior{rulesFromHub(b.ScaleUp), rulesFromHub(b.ScaleDown)}
	}
	if len(autoscaler.Status.CurrentMetrics) > 0 {
		current := make([]autoscalingv1.MetricStatus, len(autoscaler.Status.CurrentMetrics))
		for i := range current {
			m := &autoscaler.Status.CurrentMetrics[i]
			current[i] = statusToV1(m)
			if m.Type == autoscalingv2.ResourceMetricSourceType && m.Resource != nil &&
				m.Resource.Name == corev1.ResourceCPU {
				out.Status.CurrentCPUUtilizationPercentage = m.Resource.Current.AverageUtilization
			}
		}
		notes[currentNote] = current
	}
	if len(autoscaler.Status.Conditions) > 0 {
		conditions := make([]autoscalingv1.HorizontalPodAutoscalerCondition, len(autoscaler.Status.Conditions))
		for i, c := range autoscaler.Status.Conditions {
			conditions[i] = autoscalingv1.HorizontalPodAutoscalerCondition{
				Type: autoscalingv1.HorizontalPodAutoscalerConditionType(c.Type), Status: c.Status,
				LastTransitionTime: c.LastTransitionTime,
				Reason:             c.Reason, Message: c.Message, ObservedGeneration: c.ObservedGeneration,
			}
		}
		notes[conditionsNote] = conditions
	}
	all := replaceKeys(autoscaler.Annotations, nil, autoscalerNotes)
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

// otherMetrics sets the CPU metric field of out and returns the other metrics. It records the
// position of the CPU metric in the annotations notes.
func otherMetrics(
	h *autoscalingv2.HorizontalPodAutoscaler, out *autoscalingv1.HorizontalPodAutoscaler, notes map[string]any,
) []autoscalingv1.MetricSpec {
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

// autoscalerFromV1 converts an autoscaler from version v1 to v2. It returns an error for a
// malformed annotation.
func autoscalerFromV1(source *autoscalingv1.HorizontalPodAutoscaler) (*autoscalingv2.HorizontalPodAutoscaler, error) {
	out := &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: source.ObjectMeta,
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference(source.Spec.ScaleTargetRef),
			MinReplicas:    source.Spec.MinReplicas, MaxReplicas: source.Spec.MaxReplicas,
		},
		Status: autoscalingv2.HorizontalPodAutoscalerStatus{
			ObservedGeneration: source.Status.ObservedGeneration, LastScaleTime: source.Status.LastScaleTime,
			CurrentReplicas: source.Status.CurrentReplicas, DesiredReplicas: source.Status.DesiredReplicas,
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
		text, ok := source.Annotations[n.key]
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
	if p := source.Spec.TargetCPUUtilizationPercentage; p != nil {
		at, err := strconv.Atoi(source.Annotations[cpuAtNote])
		if err != nil || at < 0 || at > len(out.Spec.Metrics) {
			at = len(out.Spec.Metrics)
		}
		out.Spec.Metrics = slices.Insert(out.Spec.Metrics, at, cpuMetric(*p))
	}
	if len(out.Spec.Metrics) == 0 { // the default of v1 if it has no metrics
		out.Spec.Metrics = []autoscalingv2.MetricSpec{cpuMetric(defaultCPUUtilization)}
	}
	if b != nil {
		out.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleUp: b.ScaleUp.toHub(),
			ScaleDown: b.ScaleDown.toHub()}
	}
	for i := range current {
		out.Status.CurrentMetrics = append(out.Status.CurrentMetrics, statusFromV1(&current[i]))
	}
	if p := source.Status.CurrentCPUUtilizationPercentage; p != nil && len(current) == 0 {
		out.Status.CurrentMetrics = []autoscalingv2.MetricStatus{{
			Type: autoscalingv2.ResourceMetricSourceType,
			Resource: &autoscalingv2.ResourceMetricStatus{
				Name: corev1.ResourceCPU, Current: autoscalingv2.MetricValueStatus{AverageUtilization: p},
			},
		}}
	}
	for _, c := range conditions {
		out.Status.Conditions = append(out.Status.Conditions, autoscalingv2.HorizontalPodAutoscalerCondition{
			Type: autoscalingv2.HorizontalPodAutoscalerConditionType(c.Type), Status: c.Status,
			LastTransitionTime: c.LastTransitionTime,
			Reason:             c.Reason, Message: c.Message, ObservedGeneration: c.ObservedGeneration,
		})
	}
	out.Annotations = replaceKeys(source.Annotations, nil, autoscalerNotes)
	return out, nil
}
