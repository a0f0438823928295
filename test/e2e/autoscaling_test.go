package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/testenv"
)

// measured is how long a change of a load may take until it is seen and acted on: a round of measuring, which is each 15 s
// as in Kubernetes, a window of which the load is all, a round of the autoscaler, and room for a busy machine.
const measured = 4 * time.Minute

// createBusyWeb creates a Deployment with pods that use all the CPU that they may have while a file
// exists.
func (w testNamespace) createBusyWeb(name string) {
	d := webDeployment(name, 1)
	c := &d.Spec.Template.Spec.Containers[0]
	*c = v1.Container{Name: "main", Image: tools,
		Command: []string{"sh", "-c", "while :; do while [ -e /tmp/load ]; do :; done; sleep 1; done"}}
	c.Resources = v1.ResourceRequirements{
		Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse("50m"),
			v1.ResourceMemory: resource.MustParse("16Mi")},
		Limits: v1.ResourceList{v1.ResourceCPU: resource.MustParse("200m")},
	}
	d.Spec.Template.Spec.TerminationGracePeriodSeconds = new(int64(0))
	w.createWeb(d)
}

// createAutoscaler creates an autoscaler that keeps the CPU of a Deployment's pods at half of their
// requests and scales at once in both directions.
func (w testNamespace) createAutoscaler(name string, most int32) {
	w.Helper()
	h := &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1",
				Kind: "Deployment", Name: name},
			MinReplicas: new(int32(1)), MaxReplicas: most,
			Metrics: []autoscalingv2.MetricSpec{{Type: autoscalingv2.ResourceMetricSourceType,
				Resource: &autoscalingv2.ResourceMetricSource{
					Name: v1.ResourceCPU, Target: autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType,
						AverageUtilization: new(int32(50))}}}},
			Behavior: &autoscalingv2.HorizontalPodAutoscalerBehavior{
				ScaleDown: &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: new(int32(0))}},
		}}
	if _, err := w.cs.AutoscalingV2().HorizontalPodAutoscalers(w.ns).Create(context.Background(), h,
		metav1.CreateOptions{}); err != nil {
		w.Fatalf("creating autoscaler %s: %v", name, err)
	}
}

// awaitScale waits until an autoscaler has scaled its target to n replicas that are all Ready.
func (w testNamespace) awaitScale(name string, n int32) {
	w.Helper()
	testenv.Eventually(w, measured, func() error {
		d, err := w.cs.AppsV1().Deployments(w.ns).Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if *d.Spec.Replicas != n || d.Status.ReadyReplicas != n {
			h, err := w.cs.AutoscalingV2().HorizontalPodAutoscalers(w.ns).Get(context.Background(), name,
				metav1.GetOptions{})
			if err != nil {
				return err
			}
			return fmt.Errorf("%d replicas are desired and %d Ready, want %d; the autoscaler's status is %+v",
				*d.Spec.Replicas, d.Status.ReadyReplicas, n, h.Status)
		}
		return nil
	})
}

// Without additional components, 'kctl top' shows the usage of nodes and pods, and a Deployment
// scales up while its pods are busy and scales down when they are idle.
func TestAutoscalingByCPU(t *testing.T) {
	t.Parallel() // it waits for measurements most of the time
	w := newNamespace(t)
	w.createBusyWeb("load")
	w.createAutoscaler("load", 3)
	first := w.awaitReplicas("load", 1)[0].Name
	tops := map[string]func(args ...string) (string, error){
		"kctl": func(args ...string) (string, error) {
			return testenv.Try(t, testenv.Lab().Config.BinDir+"/kctl", args...)
		}}
	for _, binary := range testenv.StockKubectl() {
		tops[binary] = func(args ...string) (string, error) { return testenv.Try(t, binary, args...) }
	}
	if len(tops) < 2 {
		t.Error("no stock kubectl on this machine")
	}
	for name, top := range tops {
		testenv.Eventually(t, measured, func() error {
			nodes, err := top("top", "node")
			if err != nil || !strings.Contains(nodes, "w1") || strings.Contains(nodes, "unknown") {
				return fmt.Errorf("%s top node: %w\n%s", name, err, nodes)
			}
			pods, err := top("-n", w.ns, "top", "pod", "-l", "app=load", "--containers", "--no-headers")
			if f := strings.Fields(pods); err != nil || len(f) != 4 || f[0] != first || f[1] != "main" ||
				!strings.HasSuffix(f[2], "m") || !strings.HasSuffix(f[3], "Mi") {
				return fmt.Errorf("%s top pod: %w\n%s", name, err, pods)
			}
			return nil
		})
	}
	w.awaitExec(first, "", "touch /tmp/load")
	w.awaitScale("load", 3)
	testenv.Eventually(t, measured, func() error {
		out, err := w.cs.AutoscalingV2().HorizontalPodAutoscalers(w.ns).Get(context.Background(), "load",
			metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, m := range out.Status.CurrentMetrics {
			if m.Resource != nil && m.Resource.Current.AverageUtilization != nil &&
				*m.Resource.Current.AverageUtilization > 50 {
				return nil
			}
		}
		return fmt.Errorf("the status does not show the load: %+v", out.Status)
	})
	// The one pod that goes down last may not be the busy one: the file goes from each that is there.
	for _, p := range w.livingPods("load") {
		w.awaitExec(p.Name, "", "rm -f /tmp/load")
	}
	w.awaitScale("load", 1)
	w.awaitEvent("load", "SuccessfulRescale", "cpu resource utilization (percentage of request) above target",
		"All metrics below target")
}
