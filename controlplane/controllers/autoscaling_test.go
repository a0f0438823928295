package controllers_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/horizontalpodautoscaler"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/internal/virtual"
)

// meters are a source of metrics: a load that the pods of a selector share evenly.
type meters struct {
	mu    sync.Mutex
	load  int64 // of all pods, in thousandths; below 0 the source returns an error
	reads int
	pods  func() []*corev1.Pod
}

func (m *meters) set(load int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load = load
}

func (m *meters) read() (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reads++
	if m.load < 0 {
		return 0, errors.New("nobody answers")
	}
	return m.load, nil
}

func (m *meters) Resource(_ context.Context, _ string, of labels.Selector, _ corev1.ResourceName, _ string) (horizontalpodautoscaler.Samples, error) {
	load, err := m.read()
	if err != nil {
		return nil, err
	}
	out := horizontalpodautoscaler.Samples{}
	for _, p := range m.pods() {
		if of.Matches(labels.Set(p.Labels)) {
			out[p.Name] = horizontalpodautoscaler.Sample{At: time.Now(), Window: 15 * time.Second}
		}
	}
	for name, s := range out {
		s.Value = load / int64(len(out))
		out[name] = s
	}
	return out, nil
}

func (m *meters) Pods(ctx context.Context, namespace string, of labels.Selector, _ autoscalingv2.MetricIdentifier) (horizontalpodautoscaler.Samples, error) {
	return m.Resource(ctx, namespace, of, "", "")
}

func (m *meters) Object(context.Context, string, autoscalingv2.CrossVersionObjectReference, autoscalingv2.MetricIdentifier) (int64, error) {
	return m.read()
}

func (m *meters) External(context.Context, string, autoscalingv2.MetricIdentifier) (int64, error) {
	return m.read()
}

// autoscalerOf targets an average memory usage of 1 per pod of a Deployment.
func autoscalerOf(name, target string, least, most int32) *autoscalingv2.HorizontalPodAutoscaler {
	one := resource.MustParse("1")
	return &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: target},
			MinReplicas:    &least, MaxReplicas: most,
			Metrics: []autoscalingv2.MetricSpec{{Type: autoscalingv2.ResourceMetricSourceType, Resource: &autoscalingv2.ResourceMetricSource{
				Name: corev1.ResourceMemory, Target: autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: &one}}}},
		},
	}
}

// autoscaled runs a test in a world with a Deployment "web" of two pods and its autoscaler, in time of its own.
func autoscaled(t *testing.T, test func(w *world, m *meters)) {
	virtual.Test(t, func(t *testing.T) {
		m := &meters{load: 2000}
		w := newWorld(t, options{quiet: true, only: func(d controllers.Deps) []*controllers.Controller {
			return []*controllers.Controller{deployment.New(d), replicaset.New(d),
				horizontalpodautoscaler.New(d, m, horizontalpodautoscaler.Defaults)}
		}})
		m.pods = w.pods
		w.node("w1")
		w.lead(controllers.Options{OwnIdentity: true})
		w.create(app("web", 2, "web:1"))
		w.rolledOut("web", 2)
		w.create(autoscalerOf("web", "web", 1, 8))
		test(w, m)
	})
}

func (w *world) autoscaler(name string) *autoscalingv2.HorizontalPodAutoscaler {
	w.t.Helper()
	h, err := client.Get[*autoscalingv2.HorizontalPodAutoscaler](w.ctx, w.admin, "default", name)
	if err != nil {
		w.t.Fatal(err)
	}
	return h
}

// reasons returns the reasons of an autoscaler's conditions: "+ReadyForNewScale
// -DesiredWithinRange".
func reasons(h *autoscalingv2.HorizontalPodAutoscaler) string {
	var out []string
	for _, c := range h.Status.Conditions {
		out = append(out, map[corev1.ConditionStatus]string{corev1.ConditionTrue: "+", corev1.ConditionFalse: "-"}[c.Status]+c.Reason)
	}
	return strings.Join(out, " ")
}

// passes lets a time pass and everything that it causes happen.
func passes(d time.Duration) {
	time.Sleep(d)
	virtual.Wait()
}

func TestAnAutoscalerFollowsTheLoad(t *testing.T) {
	autoscaled(t, func(w *world, m *meters) {
		passes(time.Minute)
		m.mu.Lock()
		reads := m.reads
		m.mu.Unlock()
		if reads < 4 || reads > 5 {
			t.Errorf("the metrics were read %d times in a minute", reads)
		}
		if n := len(w.pods()); n != 2 {
			t.Fatalf("%d pods with a load that fits two", n)
		}
		m.set(5000)
		passes(2 * horizontalpodautoscaler.Period)
		w.rolledOut("web", 5)
		h := w.autoscaler("web")
		if h.Status.LastScaleTime == nil || h.Status.DesiredReplicas != 5 || len(h.Status.CurrentMetrics) != 1 {
			t.Errorf("the status is %+v", h.Status)
		}
		m.set(1000)
		passes(4 * time.Minute)
		if n := len(w.pods()); n != 5 {
			t.Errorf("%d pods within the window of scaling down", n)
		}
		if got := reasons(w.autoscaler("web")); !strings.Contains(got, "+ScaleDownStabilized") {
			t.Errorf("within the window the conditions are %s", got)
		}
		passes(90 * time.Second)
		w.rolledOut("web", 1)
		events, err := client.List[*corev1.Event](w.ctx, w.admin, "default", metav1.ListOptions{})
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
	autoscaled(t, func(w *world, m *meters) {
		m.set(-1)
		passes(10 * time.Minute)
		if n := len(w.pods()); n != 2 {
			t.Errorf("%d pods although nobody tells their load", n)
		}
		if got := reasons(w.autoscaler("web")); !strings.Contains(got, "-FailedGetResourceMetric") {
			t.Errorf("the conditions are %s", got)
		}
		m.set(3000)
		passes(2 * horizontalpodautoscaler.Period)
		w.rolledOut("web", 3)
	})
}

func TestTwoAutoscalersOfOnePodAreRefusedByBoth(t *testing.T) {
	autoscaled(t, func(w *world, m *meters) {
		w.create(autoscalerOf("again", "web", 1, 8))
		m.set(5000)
		passes(15 * time.Second)
		passes(2 * horizontalpodautoscaler.Period)
		for _, name := range []string{"web", "again"} {
			if got := reasons(w.autoscaler(name)); !strings.Contains(got, "-AmbiguousSelector") {
				t.Errorf("the conditions of %s are %s", name, got)
			}
		}
	})
}

func TestAnAutoscalerOfWhatCannotBeScaledSaysSo(t *testing.T) {
	autoscaled(t, func(w *world, _ *meters) {
		w.create(autoscalerOf("lost", "gone", 1, 8))
		odd := autoscalerOf("odd", "web", 1, 8)
		odd.Spec.ScaleTargetRef = autoscalingv2.CrossVersionObjectReference{APIVersion: "batch/v1", Kind: "Job", Name: "web"}
		w.create(odd)
		passes(time.Second)
		for name, want := range map[string]string{"lost": "not found", "odd": "a Job cannot be scaled"} {
			h := w.autoscaler(name)
			if len(h.Status.Conditions) != 1 || h.Status.Conditions[0].Reason != "FailedGetScale" || !strings.Contains(h.Status.Conditions[0].Message, want) {
				t.Errorf("the conditions of %s are %+v", name, h.Status.Conditions)
			}
		}
	})
}
