package server

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway"
)

// Metrics are those of the objects that are stored, and a pod's are its own node's word: another node that names it
// says nothing of it, and neither does one that names an earlier pod of the name.
func TestMetricsAreOfWhatIsStored(t *testing.T) {
	now := time.Unix(2000, 0)
	u := nodegateway.Used{CPU: 250_000_000, Memory: 3 << 20, Window: 15 * time.Second}
	claims := func(uid types.UID) map[types.UID][]nodegateway.ContainerUsed {
		return map[types.UID][]nodegateway.ContainerUsed{uid: {{Name: "app", Used: u}}}
	}
	used := map[string]*nodegateway.NodeUsed{
		"w1": {At: now.Add(-time.Second), Node: &u, Pods: claims("own")},
		"w2": {At: now, Pods: claims("other")},
	}
	pod := func(name, uid, node string, phase v1.PodPhase) *v1.Pod {
		return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: name, UID: types.UID(uid), Labels: map[string]string{"a": "b"}},
			Spec: v1.PodSpec{NodeName: node}, Status: v1.PodStatus{Phase: phase}}
	}
	node := func(name string) *v1.Node { return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}} }
	got := metricsOf([]api.Object{node("w1"), node("w2"), node("w3"), pod("p", "own", "w1", v1.PodRunning),
		pod("done", "own", "w1", v1.PodSucceeded), pod("claimed", "other", "w1", v1.PodRunning), pod("again", "new", "w1", v1.PodRunning),
		pod("free", "own", "", v1.PodRunning)}, used, now)
	if len(got) != 2 {
		t.Fatalf("%d metrics: %v", len(got), got)
	}
	n, ok := got[0].(*metricsv1beta1.NodeMetrics)
	if !ok || n.Name != "w1" || n.Usage.Cpu().String() != "250m" || n.Usage.Memory().String() != "3Mi" || !n.Timestamp.Time.Equal(now.Add(-time.Second)) {
		t.Errorf("of the node: %+v", got[0])
	}
	p, ok := got[1].(*metricsv1beta1.PodMetrics)
	if !ok || p.Namespace != "n" || p.Name != "p" || p.Labels["a"] != "b" || len(p.Containers) != 1 || p.Window.Duration != 15*time.Second ||
		p.Containers[0].Name != "app" || p.Containers[0].Usage.Cpu().MilliValue() != 250 {
		t.Errorf("of the pod: %+v", got[1])
	}
}

// The leader runs autoscalers. Of what they cannot read the condition says why, in the reasons of Kubernetes, and every
// replica answers metrics.k8s.io.
func TestAutoscalersSayWhatTheyCannotRead(t *testing.T) {
	p := newPlane(t, 1, nil)
	cs := p.client("cp1")
	ctx := t.Context()
	labels := map[string]string{"app": "web"}
	one := resource.MustParse("1")
	_, err := cs.AppsV1().Deployments("default").Create(ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: v1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c", Image: "i"}}}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	metric := autoscalingv2.MetricIdentifier{Name: "hits"}
	target := autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: &one}
	for _, c := range []struct {
		metric          autoscalingv2.MetricSpec
		reason, message string
	}{
		{autoscalingv2.MetricSpec{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{Name: v1.ResourceMemory, Target: target}},
			"FailedGetResourceMetric", "no metrics returned from resource metrics API"},
		{autoscalingv2.MetricSpec{Type: "Pods", Pods: &autoscalingv2.PodsMetricSource{Metric: metric, Target: target}},
			"FailedGetPodsMetric", "no custom metrics API (custom.metrics.k8s.io) registered"},
		{autoscalingv2.MetricSpec{Type: "External", External: &autoscalingv2.ExternalMetricSource{Metric: metric, Target: target}},
			"FailedGetExternalMetric", "no external metrics API (external.metrics.k8s.io) registered"},
	} {
		name := strings.ToLower(c.reason)
		h := &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "web"},
			MaxReplicas:    3, Metrics: []autoscalingv2.MetricSpec{c.metric}}}
		if _, err := cs.AutoscalingV2().HorizontalPodAutoscalers("default").Create(ctx, h, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			h, err := cs.AutoscalingV2().HorizontalPodAutoscalers("default").Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, have := range h.Status.Conditions {
				if have.Type == autoscalingv2.ScalingActive && have.Status == v1.ConditionFalse && have.Reason == c.reason && strings.Contains(have.Message, c.message) {
					return nil
				}
			}
			return fmt.Errorf("the conditions are %+v", h.Status.Conditions)
		})
		if err := cs.AutoscalingV2().HorizontalPodAutoscalers("default").Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	var list metricsv1beta1.PodMetricsList
	if err := p.call("cp1", "GET", "/apis/metrics.k8s.io/v1beta1/pods", nil, &list); err != nil || list.Kind != "PodMetricsList" || len(list.Items) != 0 {
		t.Errorf("the metrics of no pods: %+v, %v", list, err)
	}
}
