package horizontalpodautoscaler_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/horizontalpodautoscaler"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// autoscalerOf targets an average memory usage of 1 per pod of a Deployment.
func autoscalerOf(name, target string, least, most int32) *autoscalingv2.HorizontalPodAutoscaler {
	one := resource.MustParse("1")
	return &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1",
				Kind: "Deployment", Name: target},
			MinReplicas: &least, MaxReplicas: most,
			Metrics: []autoscalingv2.MetricSpec{{Type: autoscalingv2.ResourceMetricSourceType,
				Resource: &autoscalingv2.ResourceMetricSource{
					Name: corev1.ResourceMemory,
					Target: autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType,
						AverageValue: &one}}}},
		},
	}
}

// autoscaled runs a test in a world with a Deployment "web" of two pods and its autoscaler, in time of its own.
func autoscaled(t *testing.T, test func(w *testcluster.Cluster, m *testcluster.FakeMetrics)) {
	virtual.Test(t, func(t *testing.T) {
		m := &testcluster.FakeMetrics{CurrentLoad: 2000}
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{deployment.New(d), replicaset.New(d),
					horizontalpodautoscaler.New(d, m, horizontalpodautoscaler.Defaults)}
			}})
		m.ListPods = w.LivePods
		w.AddNode("w1")
		w.Lead(engine.Options{OwnIdentity: true})
		w.CreateObject(testcluster.NewDeployment("web", 2, "web:1"))
		w.AwaitRollout("web", 2)
		w.CreateObject(autoscalerOf("web", "web", 1, 8))
		test(w, m)
	})
}

func autoscaler(w *testcluster.Cluster, name string) *autoscalingv2.HorizontalPodAutoscaler {
	w.T.Helper()
	h, err := client.Get[*autoscalingv2.HorizontalPodAutoscaler](w.Ctx, w.Admin, "default", name)
	if err != nil {
		w.T.Fatal(err)
	}
	return h
}

// reasons returns the reasons of an autoscaler's conditions: "+ReadyForNewScale
// -DesiredWithinRange".
func reasons(h *autoscalingv2.HorizontalPodAutoscaler) string {
	var out []string
	for _, c := range h.Status.Conditions {
		out = append(out,
			map[corev1.ConditionStatus]string{corev1.ConditionTrue: "+", corev1.ConditionFalse: "-"}[c.Status]+c.Reason)
	}
	return strings.Join(out, " ")
}

// passes lets a time pass and everything that it causes happen.
func passes(d time.Duration) {
	time.Sleep(d)
	virtual.Wait()
}

func TestAnAutoscalerFollowsTheLoad(t *testing.T) {
	autoscaled(t, func(w *testcluster.Cluster, m *testcluster.FakeMetrics) {
		passes(time.Minute)
		m.Mu.Lock()
		reads := m.ReadCount
		m.Mu.Unlock()
		if reads < 4 || reads > 5 {
			t.Errorf("the metrics were read %d times in a minute", reads)
		}
		if n := len(w.LivePods()); n != 2 {
			t.Fatalf("%d pods with a load that fits two", n)
		}
		m.SetLoad(5000)
		passes(2 * horizontalpodautoscaler.Period)
		w.AwaitRollout("web", 5)
		h := autoscaler(w, "web")
		if h.Status.LastScaleTime == nil || h.Status.DesiredReplicas != 5 || len(h.Status.CurrentMetrics) != 1 {
			t.Errorf("the status is %+v", h.Status)
		}
		m.SetLoad(1000)
		passes(4 * time.Minute)
		if n := len(w.LivePods()); n != 5 {
			t.Errorf("%d pods within the window of scaling down", n)
		}
		if got := reasons(autoscaler(w, "web")); !strings.Contains(got, "+ScaleDownStabilized") {
			t.Errorf("within the window the conditions are %s", got)
		}
		passes(90 * time.Second)
		w.AwaitRollout("web", 1)
		events, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var told []string
		for _, e := range events {
			if e.InvolvedObject.Kind == "HorizontalPodAutoscaler" && e.Reason == "SuccessfulRescale" {
				told = append(told, e.Message)
			}
		}
		want := "New size: 5; reason: memory resource above target"
		if !strings.Contains(fmt.Sprint(told), want) {
			t.Errorf("the events tell %q, not %q", told, want)
		}
	})
}

func TestAnAutoscalerWithoutMetricsChangesNothing(t *testing.T) {
	autoscaled(t, func(w *testcluster.Cluster, m *testcluster.FakeMetrics) {
		m.SetLoad(-1)
		passes(10 * time.Minute)
		if n := len(w.LivePods()); n != 2 {
			t.Errorf("%d pods although nobody tells their load", n)
		}
		if got := reasons(autoscaler(w, "web")); !strings.Contains(got, "-FailedGetResourceMetric") {
			t.Errorf("the conditions are %s", got)
		}
		m.SetLoad(3000)
		passes(2 * horizontalpodautoscaler.Period)
		w.AwaitRollout("web", 3)
	})
}

func TestTwoAutoscalersOfOnePodAreRefusedByBoth(t *testing.T) {
	autoscaled(t, func(w *testcluster.Cluster, m *testcluster.FakeMetrics) {
		w.CreateObject(autoscalerOf("again", "web", 1, 8))
		m.SetLoad(5000)
		passes(15 * time.Second)
		passes(2 * horizontalpodautoscaler.Period)
		for _, name := range []string{"web", "again"} {
			if got := reasons(autoscaler(w, name)); !strings.Contains(got, "-AmbiguousSelector") {
				t.Errorf("the conditions of %s are %s", name, got)
			}
		}
	})
}

func TestAnAutoscalerOfWhatCannotBeScaledSaysSo(t *testing.T) {
	autoscaled(t, func(w *testcluster.Cluster, _ *testcluster.FakeMetrics) {
		w.CreateObject(autoscalerOf("lost", "gone", 1, 8))
		odd := autoscalerOf("odd", "web", 1, 8)
		odd.Spec.ScaleTargetRef = autoscalingv2.CrossVersionObjectReference{APIVersion: "batch/v1",
			Kind: "Job", Name: "web"}
		w.CreateObject(odd)
		passes(time.Second)
		for name, want := range map[string]string{"lost": "not found", "odd": "a Job cannot be scaled"} {
			h := autoscaler(w, name)
			if len(h.Status.Conditions) != 1 || h.Status.Conditions[0].Reason != "FailedGetScale" ||
				!strings.Contains(h.Status.Conditions[0].Message, want) {
				t.Errorf("the conditions of %s are %+v", name, h.Status.Conditions)
			}
		}
	})
}
