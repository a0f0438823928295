package autoscaling_test

import (
	"context"
	"testing"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/randfill"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func autoscalerWrongs() []kindstest.InvalidPatch {
	metric := func(s string) string { return "spec: {metrics: [{" + s + "}]}" }
	target := func(s string) string {
		return metric("type: Resource, resource: {name: cpu, target: {" + s + "}}")
	}
	rules := func(s string) string { return "spec: {behavior: {scaleUp: {" + s + "}}}" }
	policy := func(s string) string { return rules("policies: [{" + s + "}]") }
	const m0, up = "spec.metrics[0].", "spec.behavior.scaleUp."
	return []kindstest.InvalidPatch{
		{Patch: "spec: {minReplicas: 0}", Want: "spec.metrics: Forbidden: must specify at least one Object or " +
			"External metric to support scaling to zero replicas"},
		{Patch: "spec: {minReplicas: -1}",
			Want: "spec.minReplicas: Invalid value: -1: must be greater than or equal to 0"},
		{Patch: "spec: {maxReplicas: -1}", Want: "spec.maxReplicas: Invalid value: -1: must be greater than or equal " +
			"to 1; spec.maxReplicas: Invalid value: -1: must be greater than or equal to `minReplicas`"},
		{Patch: "spec: {maxReplicas: 0}", Want: "spec.maxReplicas: Required value: must be set and greater than 0; " +
			"spec.maxReplicas: Invalid value: 0: must be greater than or equal to `minReplicas`"},
		{Patch: "spec: {minReplicas: 3}", Want: "spec.maxReplicas: Invalid value: 2: must be greater than or equal " +
			"to `minReplicas`"},
		{Patch: "spec: {scaleTargetRef: {kind: null}}", Want: "spec.scaleTargetRef.kind: Required value"},
		{Patch: "spec: {scaleTargetRef: {name: null}}", Want: "spec.scaleTargetRef.name: Required value"},
		{Patch: "spec: {scaleTargetRef: {name: a/b}}",
			Want: `spec.scaleTargetRef.name: Invalid value: "a/b": may not contain '/'`},
		{Patch: metric("type: ''"), Want: m0 + "type: Required value: must specify a metric source type; " + m0 +
			`type: Unsupported value: ""`},
		{Patch: metric("type: Guess"), Want: m0 +
			`type: Unsupported value: "Guess": supported values: "ContainerResource", "External", "Object", ` +
			`"Pods", "Resource"`},
		{Patch: metric("type: Resource"), Want: m0 +
			"resource: Required value: must populate information for the given metric source"},
		{Patch: metric("type: Resource, resource: {name: cpu, target: {type: Utilization, averageUtilization: 1}}, " +
			"pods: {metric: {name: a}, target: {type: AverageValue, averageValue: 1}}"),
			Want: m0 + "pods: Forbidden: must populate the given metric source only"},
		{Patch: metric("type: Resource, resource: {target: {type: Utilization, averageUtilization: 1}}"),
			Want: m0 + "resource.name: Required value: must specify a resource name"},
		{Patch: target("averageUtilization: 1"),
			Want: m0 + "resource.target.type: Required value: must specify a metric target type; " + m0 +
				"resource.target.type: Invalid value: \"\": must be either Utilization, Value, or AverageValue"},
		{Patch: target("type: Utilization, averageUtilization: 0"),
			Want: m0 + "resource.target.averageUtilization: Invalid value: 0: must be greater than 0"},
		{Patch: target("type: AverageValue, averageValue: 0"),
			Want: m0 + `resource.target.averageValue: Invalid value: "0": must be positive`},
		{Patch: target("type: Utilization"), Want: m0 +
			"resource.target.averageUtilization: Required value: must set either a target raw value or a " +
			"target utilization"},
		{Patch: target("type: Utilization, averageUtilization: 1, averageValue: 1"),
			Want: m0 + "resource.target.averageValue: Forbidden: may not set both a target raw value and a " +
				"target utilization"},
		{Patch: metric("type: Pods, pods: {metric: {name: ''}, target: {type: AverageValue, averageValue: 1}}"),
			Want: m0 + "pods.metric.name: Required value: must specify a metric name"},
		{Patch: metric("type: Pods, pods: {metric: {name: a}, target: {type: Value, value: 1}}"),
			Want: m0 + "pods.target.averageValue: Required value: must specify a positive target averageValue"},
		{Patch: metric("type: External, external: {metric: {name: a}, target: {type: Value}}"),
			Want: m0 + "external.target.averageValue: Required value: must set either a target value for metric or " +
				"a per-pod target"},
		{Patch: metric("type: External, external: {metric: {name: a}, target: {type: Value, value: 1, " +
			"averageValue: 1}}"), Want: m0 + "external.target.value: Forbidden: may not set both a target value for " +
			"metric and a per-pod target"},
		{Patch: metric("type: Object, object: {describedObject: {kind: A, name: b}, metric: {name: a}, " +
			"target: {type: " +
			"Value}}"), Want: m0 + "object.target.averageValue: Required value: must set either a target value " +
			"or averageValue"},
		{Patch: metric("type: Object, object: {describedObject: {name: b}, metric: {name: a}, target: {type: Value, " +
			"value: 1}}"), Want: m0 + "object.describedObject.kind: Required value"},
		{Patch: metric("type: ContainerResource, containerResource: {name: cpu, target: {type: Utilization, " +
			"averageUtilization: 1}}"), Want: m0 +
			"containerResource.container: Required value: must specify a container"},
		{Patch: metric("type: ContainerResource, containerResource: {name: disk, container: c, target: {type: " +
			"Utilization, averageUtilization: 1}}"),
			Want: m0 + `containerResource.name: Invalid value: "disk": must be a standard resource type or ` +
				`fully qualified; ` +
				m0 + `containerResource.name: Invalid value: "disk": must be a standard resource for containers`},
		{Patch: rules("stabilizationWindowSeconds: -1"),
			Want: up + "stabilizationWindowSeconds: Invalid value: -1: must be greater than or equal to zero"},
		{Patch: rules("stabilizationWindowSeconds: 3601"),
			Want: up + "stabilizationWindowSeconds: Invalid value: 3601: must be less than or equal to 3600"},
		{Patch: rules("selectPolicy: Any"), Want: up +
			`selectPolicy: Unsupported value: "Any": supported values: "Disabled", "Max", "Min"`},
		{Patch: rules("policies: []"), Want: up + "policies: Required value: must specify at least one Policy"},
		{Patch: rules("tolerance: -1"), Want: up +
			`tolerance: Invalid value: "-1": must be greater than or equal to 0`},
		{Patch: policy("type: Steps, value: 1, periodSeconds: 1"),
			Want: up + `policies[0].type: Unsupported value: "Steps": supported values: "Percent", "Pods"`},
		{Patch: policy("type: Pods, value: 0, periodSeconds: 1"),
			Want: up + "policies[0].value: Invalid value: 0: must be greater than zero"},
		{Patch: policy("type: Pods, value: 1, periodSeconds: 0"),
			Want: up + "policies[0].periodSeconds: Invalid value: 0: must be greater than zero"},
		{Patch: policy("type: Pods, value: 1, periodSeconds: 1801"),
			Want: up + "policies[0].periodSeconds: Invalid value: 1801: must be less than or equal to 1800"},
	}
}

const autoscaler = "{metadata: {name: a}, spec: {maxReplicas: 2, scaleTargetRef: {apiVersion: apps/v1, kind: " +
	"Deployment, name: d}}}"

func TestAutoscalerValidation(t *testing.T) {
	kindstest.CheckRejected[*autoscalingv2.HorizontalPodAutoscaler](t, autoscaler, autoscalerWrongs())
	kindstest.CheckRejected[*autoscalingv1.HorizontalPodAutoscaler](t, autoscaler, []kindstest.InvalidPatch{
		{Patch: "spec: {minReplicas: 0}", Want: "spec.metrics: Forbidden: must specify at least one Object or " +
			"External metric to support scaling to zero replicas"},
		{Patch: "spec: {targetCPUUtilizationPercentage: 0}",
			Want: "spec.metrics[0].resource.target.averageUtilization: Invalid value: 0: must be greater than 0"},
		{Patch: "metadata: {annotations: {autoscaling.alpha.kubernetes.io/metrics: '['}}",
			Want: "metadata.annotations: Invalid value: autoscaling.alpha.kubernetes.io/metrics: unexpected " +
				"end of JSON input"},
		{Patch: `metadata: {annotations: {autoscaling.alpha.kubernetes.io/metrics: '[{"type":"Pods"}]'}}`,
			Want: "spec.metrics[0].pods: Required value"},
		{Patch: `metadata: {annotations: {autoscaling.alpha.kubernetes.io/behavior: '{"ScaleUp":{}}'}}`,
			Want: "spec.behavior.scaleUp.policies: Required value"},
	})
}

// A valid autoscaler does not change when it is converted to v1 and back.
func TestAutoscalersConvertWhole(t *testing.T) {
	ctx := context.Background()
	k := kinds.All().ByType(&autoscalingv1.HorizontalPodAutoscaler{})
	seen := 0
	for seed := range int64(400) {
		h := &autoscalingv2.HorizontalPodAutoscaler{}
		kindstest.NewFiller(seed).Funcs(func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewMilliQuantity(c.Int63n(5000)+1, resource.DecimalSI)
		}, metricFill).Fill(h)
		h.Annotations = map[string]string{"mine": "kept"}
		h.Spec.Behavior = nil
		if seed%2 == 0 {
			h.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleUp: &autoscalingv2.HPAScalingRules{
				StabilizationWindowSeconds: new(int32(seed)), Tolerance: new(resource.MustParse("100m")),
			}}
		}
		h.TypeMeta, h.Status.CurrentMetrics = metav1.TypeMeta{}, nil
		for i := range h.Status.Conditions { // times are written to the second
			h.Status.Conditions[i].LastTransitionTime = metav1.NewTime(kindstest.Now)
		}
		kinds.All().ByType(h).Writes.Default(h)
		before := h.DeepCopy()
		first, err := k.Conversion.From(ctx, []api.Object{h})
		if err != nil {
			t.Fatal(err)
		}
		back, err := k.Conversion.To(ctx, first[0])
		if err != nil {
			t.Fatal(err)
		}
		if !fieldrules.SemanticEqual(back, before) || !fieldrules.SemanticEqual(h, before) {
			a, _ := yaml.Marshal(before)
			b, _ := yaml.Marshal(back)
			t.Fatalf("seed %d:\n%s\nbecame\n%s", seed, a, b)
		}
		seen += len(h.Spec.Metrics)
	}
	if seen < 400 {
		t.Errorf("%d metrics only were converted", seen)
	}
}

// metricFill makes consistent metrics: the source matches the type.
func metricFill(m *autoscalingv2.MetricSpec, c randfill.Continue) {
	value, share := new(*resource.NewQuantity(c.Int63n(100)+1, resource.DecimalSI)), new(int32(c.Intn(99)+1))
	id := autoscalingv2.MetricIdentifier{Name: "m",
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}}
	average := autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: value}
	whole := autoscalingv2.MetricTarget{Type: autoscalingv2.ValueMetricType, Value: value}
	used := autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType, AverageUtilization: share}
	*m = []autoscalingv2.MetricSpec{
		{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{Name: "cpu", Target: used}},
		{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{Name: "cpu", Target: average}},
		{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{Name: "memory", Target: used}},
		{Type: "ContainerResource", ContainerResource: &autoscalingv2.ContainerResourceMetricSource{Name: "cpu",
			Container: "c", Target: used}},
		{Type: "Pods", Pods: &autoscalingv2.PodsMetricSource{Metric: id, Target: average}},
		{Type: "External", External: &autoscalingv2.ExternalMetricSource{Metric: id, Target: average}},
		{Type: "External", External: &autoscalingv2.ExternalMetricSource{Metric: id, Target: whole}},
		{Type: "Object", Object: &autoscalingv2.ObjectMetricSource{Metric: id, Target: whole}},
		{Type: "Object", Object: &autoscalingv2.ObjectMetricSource{Metric: id, Target: average}},
	}[c.Intn(9)]
}
