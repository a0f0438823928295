package why

import (
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

type autoscaler = autoscalingv2.HorizontalPodAutoscaler

// scaler is one of Deployment web that goes by CPU, with the conditions of one that does its work.
func scaler(change ...func(*autoscaler)) *autoscaler {
	two, half, seen := int32(2), int32(50), int64(1)
	h := &autoscaler{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "hpa", Generation: 1},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1",
				Kind: "Deployment", Name: "web"},
			MinReplicas: &two, MaxReplicas: 6,
			Metrics: []autoscalingv2.MetricSpec{{Type: autoscalingv2.ResourceMetricSourceType,
				Resource: &autoscalingv2.ResourceMetricSource{
					Name: corev1.ResourceCPU,
					Target: autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType,
						AverageUtilization: &half}}}},
		},
		Status: autoscalingv2.HorizontalPodAutoscalerStatus{ObservedGeneration: &seen, CurrentReplicas: 3,
			DesiredReplicas: 3},
	}
	is(autoscalingv2.AbleToScale, true, "ReadyForNewScale", "")(h)
	is(autoscalingv2.ScalingActive, true, "ValidMetricFound", "")(h)
	is(autoscalingv2.ScalingLimited, false, "DesiredWithinRange", "")(h)
	for _, f := range change {
		f(h)
	}
	return h
}

func is(t autoscalingv2.HorizontalPodAutoscalerConditionType, yes bool, reason, message string) func(*autoscaler) {
	return func(h *autoscaler) {
		c := autoscalingv2.HorizontalPodAutoscalerCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason,
			Message: message, LastTransitionTime: ago(time.Minute)}
		if yes {
			c.Status = corev1.ConditionTrue
		}
		for i := range h.Status.Conditions {
			if h.Status.Conditions[i].Type == t {
				h.Status.Conditions[i] = c
				return
			}
		}
		h.Status.Conditions = append(h.Status.Conditions, c)
	}
}

func behaves(
	way string, window *int32, choose autoscalingv2.ScalingPolicySelect, policies ...autoscalingv2.HPAScalingPolicy,
) func(*autoscaler) {
	return func(h *autoscaler) {
		r := &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: window, Policies: policies}
		if choose != "" {
			r.SelectPolicy = &choose
		}
		h.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleDown: r}
		if way == "scaleUp" {
			h.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleUp: r}
		}
	}
}

func measures(metrics ...autoscalingv2.MetricSpec) func(*autoscaler) {
	return func(h *autoscaler) { h.Spec.Metrics = metrics }
}

func asking(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests = quantities("cpu", "100m") }

func TestAutoscalers(t *testing.T) {
	running := ready(corev1.ConditionTrue)
	all := World{
		Scale: ScaleObjects{
			Scaled:   &Scaled{Kind: "deployment", Found: true, Others: []string{"web"}},
			Measured: []string{"web-1", "web-2"},
		},
		Pods: []corev1.Pod{*pod("web-1", on("w1"), running, asking), *pod("web-2", on("w2"), running, asking)}}
	with := func(change func(w *World)) World { w := all; change(&w); return w }
	gone := func(others ...string) World {
		return with(func(w *World) { w.Scale.Scaled = &Scaled{Kind: "deployment", Others: others} })
	}
	noTarget := is(autoscalingv2.AbleToScale, false, "FailedGetScale",
		`the scale of the target cannot be read: deployments.apps "web" not found`)
	noMetrics := is(autoscalingv2.ScalingActive, false, "FailedGetResourceMetric",
		"the number of replicas cannot be calculated: no metrics of the target's pods")
	four, sixty := int32(4), int32(60)
	pods := autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PodsScalingPolicy, Value: 1, PeriodSeconds: 60}
	percent := autoscalingv2.HPAScalingPolicy{Type: autoscalingv2.PercentScalingPolicy, Value: 10, PeriodSeconds: 30}
	container := autoscalingv2.MetricSpec{Type: autoscalingv2.ContainerResourceMetricSourceType,
		ContainerResource: &autoscalingv2.ContainerResourceMetricSource{
			Name: corev1.ResourceMemory, Container: "side",
			Target: autoscalingv2.MetricTarget{AverageUtilization: &sixty}}}
	custom := []autoscalingv2.MetricSpec{
		{Type: autoscalingv2.PodsMetricSourceType,
			Pods: &autoscalingv2.PodsMetricSource{Metric: autoscalingv2.MetricIdentifier{Name: "requests"}}},
		{Type: autoscalingv2.ObjectMetricSourceType,
			Object: &autoscalingv2.ObjectMetricSource{Metric: autoscalingv2.MetricIdentifier{Name: "hits"},
				DescribedObject: autoscalingv2.CrossVersionObjectReference{Kind: "Ingress", Name: "front"}}},
		{Type: autoscalingv2.ExternalMetricSourceType,
			External: &autoscalingv2.ExternalMetricSource{Metric: autoscalingv2.MetricIdentifier{Name: "queue"}}},
	}
	limited := func(reason string) func(*autoscaler) { return is(autoscalingv2.ScalingLimited, true, reason, "") }
	stable := func(reason string) func(*autoscaler) { return is(autoscalingv2.AbleToScale, true, reason, "") }
	failed := with(func(w *World) {
		w.Scale.Measured = []string{"web-1"}
		w.Events = []corev1.Event{{InvolvedObject: corev1.ObjectReference{UID: "hpa"},
			Reason: "FailedGetResourceMetric", Message: "unable to get metrics for resource cpu",
			LastTimestamp: ago(10 * time.Second)}}
	})
	old := failed
	old.Events = []corev1.Event{failed.Events[0]}
	old.Events[0].LastTimestamp = ago(time.Hour)
	transcript(t, "autoscalers", []subject{
		{"all is well", all, scaler()},
		{"not judged yet", all, scaler(func(h *autoscaler) { h.Generation = 2 })},
		{"a target that is not there", gone("db", "web2"), scaler(noTarget)},
		{"and nothing like it", gone(), scaler(noTarget)},
		{"a target of another kind", World{Unread: []string{Pods}}, scaler(noTarget, func(h *autoscaler) {
			h.Spec.ScaleTargetRef.Kind = "Rollout"
		})},
		{"a target that cannot be written", all,
			scaler(is(autoscalingv2.AbleToScale, false, "FailedUpdateScale",
				"the scale of the target cannot be written: denied"))},
		{"switched off", all, scaler(is(autoscalingv2.ScalingActive, false, "ScalingDisabled", "x"))},
		{"pods that are another's too", all, scaler(is(autoscalingv2.ScalingActive, false, "AmbiguousSelector",
			"pods of the target are also those of other autoscalers: default/web2"))},
		{"a pod without a sample", with(func(w *World) { w.Scale.Measured = []string{"web-1"} }), scaler(noMetrics)},
		{"a pod without a request", with(func(w *World) { w.Pods = []corev1.Pod{*pod("web-1", on("w1"), running)} }),
			scaler(noMetrics)},
		{"a container that is not there", all, scaler(noMetrics, measures(container))},
		{"no pods", with(func(w *World) { w.Pods = nil }), scaler(noMetrics)},
		{"samples that have come since", all, scaler(noMetrics)},
		{"samples that may not be read", with(func(w *World) { w.Unread = []string{PodMetrics} }), scaler(noMetrics)},
		{"samples that nobody serves", with(func(w *World) {
			w.Scale.NotServed, w.Scale.Measured = "the server could not find the "+
				"requested resource", nil
		}), scaler(noMetrics)},
		{"pods that may not be read", with(func(w *World) { w.Unread = []string{Pods} }), scaler(noMetrics)},
		{"metrics of others", all, scaler(noMetrics, measures(custom...))},
		{"some of the metrics", failed, scaler(measures(append(custom[2:], scaler().Spec.Metrics...)...))},
		{"some of them, an hour ago", old, scaler()},
		{"more than it may have", all, scaler(limited("TooManyReplicas"))},
		{"fewer than it may have", all, scaler(limited("TooFewReplicas"))},
		{"up as fast as it may", all, scaler(limited("ScaleUpLimit"))},
		{"down as fast as its policies let it", all,
			scaler(limited("ScaleDownLimit"), behaves("scaleDown", nil, "", pods, percent))},
		{"up by the lesser", all, scaler(limited("ScaleUpLimit"),
			behaves("scaleUp", nil, autoscalingv2.MinChangePolicySelect, pods, percent))},
		{"not down at all", all, scaler(limited("ScaleDownLimit"),
			behaves("scaleDown", nil, autoscalingv2.DisabledPolicySelect, pods))},
		{"held by the window", all, scaler(stable("ScaleDownStabilized"))},
		{"held by a window of its own", all, scaler(stable("ScaleUpStabilized"), behaves("scaleUp", &four, ""))},
	})
}
