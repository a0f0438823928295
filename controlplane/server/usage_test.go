package server_test

import (
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/server/servertest"
)

// The leader runs autoscalers. Their conditions have the reasons of Kubernetes for metrics that
// cannot be read. Every replica serves metrics.k8s.io.
func TestAutoscalerConditions(t *testing.T) {
	p := newPlane(t, 1, nil)
	cs := p.Client("cp1")
	ctx := t.Context()
	labels := map[string]string{"app": "web"}
	one := resource.MustParse("1")
	_, err := cs.AppsV1().Deployments("default").Create(ctx,
		&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: v1.PodTemplateSpec{
					ObjectMeta: metav1.ObjectMeta{Labels: labels},
					Spec:       v1.PodSpec{Containers: []v1.Container{{Name: "c", Image: "i"}}}}}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	metric := autoscalingv2.MetricIdentifier{Name: "hits"}
	target := autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: &one}
	for _, c := range []struct {
		metric          autoscalingv2.MetricSpec
		reason, message string
	}{
		{autoscalingv2.MetricSpec{Type: "Resource",
			Resource: &autoscalingv2.ResourceMetricSource{Name: v1.ResourceMemory, Target: target}},
			"FailedGetResourceMetric", "no metrics returned from resource metrics API"},
		{autoscalingv2.MetricSpec{Type: "Pods", Pods: &autoscalingv2.PodsMetricSource{Metric: metric, Target: target}},
			"FailedGetPodsMetric", "no custom metrics API (custom.metrics.k8s.io) registered"},
		{autoscalingv2.MetricSpec{Type: "External",
			External: &autoscalingv2.ExternalMetricSource{Metric: metric, Target: target}},
			"FailedGetExternalMetric", "no external metrics API (external.metrics.k8s.io) registered"},
	} {
		name := strings.ToLower(c.reason)
		h := &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
				ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1",
					Kind: "Deployment", Name: "web"},
				MaxReplicas: 3, Metrics: []autoscalingv2.MetricSpec{c.metric}}}
		if _, err := cs.AutoscalingV2().HorizontalPodAutoscalers("default").Create(ctx, h,
			metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		servertest.Eventually(t, func() error {
			h, err := cs.AutoscalingV2().HorizontalPodAutoscalers("default").Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, have := range h.Status.Conditions {
				if have.Type == autoscalingv2.ScalingActive && have.Status == v1.ConditionFalse &&
					have.Reason == c.reason && strings.Contains(have.Message, c.message) {
					return nil
				}
			}
			return fmt.Errorf("conditions: %+v", h.Status.Conditions)
		})
		if err := cs.AutoscalingV2().HorizontalPodAutoscalers("default").Delete(ctx, name,
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	var list metricsv1beta1.PodMetricsList
	if err := p.Call("cp1", "GET", "/apis/metrics.k8s.io/v1beta1/pods", nil, &list); err != nil ||
		list.Kind != "PodMetricsList" || len(list.Items) != 0 {
		t.Errorf("the metrics of no pods: %+v, %v", list, err)
	}
}
