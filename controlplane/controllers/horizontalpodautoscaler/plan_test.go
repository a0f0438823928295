package horizontalpodautoscaler

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var epoch = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// window is that of each sample of the tests.
const window = 30 * time.Second

// podsOf returns pods that request 1000m of CPU and memory. Each word "state:use" stands for one
// pod. "use" alone is a pod that has been ready for an hour, and "-" a pod without a sample.
func podsOf(t *testing.T, words string) ([]*corev1.Pod, Samples) {
	t.Helper()
	var pods []*corev1.Pod
	samples := Samples{}
	for i, w := range strings.Fields(words) {
		state, use, ok := strings.Cut(w, ":")
		if !ok {
			state, use = "ready", w
		}
		one := resource.MustParse("1")
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprintf("p%d", i)}}
		p.Spec.Containers = []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: one, corev1.ResourceMemory: one}}}}
		p.Status.Phase = corev1.PodRunning
		since := func(start, changed time.Duration, ready corev1.ConditionStatus) {
			p.Status.StartTime = &metav1.Time{Time: epoch.Add(-start)}
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready,
				LastTransitionTime: metav1.NewTime(epoch.Add(-changed))}}
		}
		since(time.Hour, time.Hour, corev1.ConditionTrue)
		switch state {
		case "ready":
		case "young": // started a minute ago, ready since less than a window
			since(time.Minute, 10*time.Second, corev1.ConditionTrue)
		case "warm": // started a minute ago, ready since more than a window
			since(time.Minute, 50*time.Second, corev1.ConditionTrue)
		case "never": // started an hour ago, unready since 10 seconds after that
			since(time.Hour, time.Hour-10*time.Second, corev1.ConditionFalse)
		case "lost": // started an hour ago, was ready until a minute ago
			since(time.Hour, time.Minute, corev1.ConditionFalse)
		case "bare": // no Ready condition
			p.Status.Conditions = nil
		case "pending":
			p.Status.Phase = corev1.PodPending
		case "failed":
			p.Status.Phase = corev1.PodFailed
		case "going":
			p.DeletionTimestamp = &metav1.Time{Time: epoch}
		default:
			t.Fatalf("no such state: %q", state)
		}
		pods = append(pods, p)
		if use == "-" {
			continue
		}
		n, err := strconv.ParseInt(use, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		samples[p.Name] = Sample{Value: n, At: epoch, Window: window}
	}
	return pods, samples
}

func autoscaler(least, most int32, metrics ...autoscalingv2.MetricSpec) *autoscalingv2.HorizontalPodAutoscaler {
	return &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web", UID: "web", Generation: 3},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{MinReplicas: &least, MaxReplicas: most, Metrics: metrics,
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1",
				Kind: "Deployment", Name: "web"}},
	}
}

func percent(name corev1.ResourceName, n int32) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: autoscalingv2.ResourceMetricSourceType,
		Resource: &autoscalingv2.ResourceMetricSource{Name: name,
			Target: autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType, AverageUtilization: &n}}}
}

// target is "average 5" or "value 5".
func target(s string) autoscalingv2.MetricTarget {
	kind, amount, _ := strings.Cut(s, " ")
	q := resource.MustParse(amount)
	if kind == "value" {
		return autoscalingv2.MetricTarget{Type: autoscalingv2.ValueMetricType, Value: &q}
	}
	return autoscalingv2.MetricTarget{Type: autoscalingv2.AverageValueMetricType, AverageValue: &q}
}

func average(name corev1.ResourceName, amount string) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: autoscalingv2.ResourceMetricSourceType,
		Resource: &autoscalingv2.ResourceMetricSource{Name: name, Target: target("average " + amount)}}
}

func ofContainer(container string, n int32) autoscalingv2.MetricSpec {
	m := percent(corev1.ResourceCPU, n)
	return autoscalingv2.MetricSpec{Type: autoscalingv2.ContainerResourceMetricSourceType,
		ContainerResource: &autoscalingv2.ContainerResourceMetricSource{Name: corev1.ResourceCPU, Container: container,
			Target: m.Resource.Target}}
}

func ofPods(amount string) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: autoscalingv2.PodsMetricSourceType, Pods: &autoscalingv2.PodsMetricSource{
		Metric: autoscalingv2.MetricIdentifier{Name: "hits"}, Target: target("average " + amount)}}
}

// ofObject returns a metric with a target of one type, and optionally the value of the other type.
func ofObject(t string, also ...string) autoscalingv2.MetricSpec {
	m := autoscalingv2.MetricSpec{Type: autoscalingv2.ObjectMetricSourceType, Object: &autoscalingv2.ObjectMetricSource{
		DescribedObject: autoscalingv2.CrossVersionObjectReference{Kind: "Service", Name: "web"},
		Metric:          autoscalingv2.MetricIdentifier{Name: "hits"}, Target: target(t)}}
	for _, other := range also {
		m.Object.Target.AverageValue = target(other).AverageValue
	}
	return m
}

func ofOutside(t string) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{Type: autoscalingv2.ExternalMetricSourceType,
		External: &autoscalingv2.ExternalMetricSource{
			Metric: autoscalingv2.MetricIdentifier{Name: "queue"}, Target: target(t)}}
}

// snapshot is of as many replicas as there are pods.
func snapshot(t *testing.T, h *autoscalingv2.HorizontalPodAutoscaler, pods string, values ...int64) Snapshot {
	t.Helper()
	list, samples := podsOf(t, pods)
	s := Snapshot{Autoscaler: h, Pods: list, Options: Defaults, Now: epoch,
		Target: Target{Spec: int32(len(list)), Status: int32(len(list)), Selector: "app=web"}}
	for i := range h.Spec.Metrics {
		r := Reading{Samples: samples}
		if i < len(values) {
			r.Value = values[i]
		}
		s.Readings = append(s.Readings, r)
	}
	return s
}

func TestWhatAMetricCallsFor(t *testing.T) {
	cpu50, memory50 := percent(corev1.ResourceCPU, 50), percent(corev1.ResourceMemory, 50)
	for _, c := range []struct {
		name   string
		metric autoscalingv2.MetricSpec
		pods   string
		value  int64
		want   int32
		wrong  string
	}{
		{name: "double the load, double the pods", metric: cpu50, pods: "1000 1000", want: 4},
		{name: "rounded up", metric: cpu50, pods: "600 600 600", want: 4},
		{name: "half the load", metric: cpu50, pods: "250 250 250 250", want: 2},
		{name: "no load", metric: cpu50, pods: "0 0 0", want: 0},
		{name: "within the tolerance above", metric: cpu50, pods: "550 550", want: 2},
		{name: "beyond the tolerance above", metric: cpu50, pods: "560 560", want: 3},
		{name: "within the tolerance below", metric: cpu50, pods: "450 450 450 450 450 450 450 450 450 450 450",
			want: 11},
		{name: "beyond the tolerance below", metric: cpu50, pods: "440 440 440 440 440 440 440 440 440 440", want: 9},
		{name: "a pod without a sample uses nothing where the others call for more", metric: cpu50,
			pods: "1000 1000 -", want: 4},
		{name: "a pod without a sample turns nothing around", metric: cpu50, pods: "600 - -", want: 3},
		{name: "a pod without a sample uses its request where the others call for less", metric: cpu50,
			pods: "100 100 100 -", want: 3},
		{name: "a pod without a sample keeps the others", metric: cpu50, pods: "400 400 - -", want: 4},
		{name: "with a target above the request a pod without a sample uses the target",
			metric: percent(corev1.ResourceCPU, 200),
			pods:   "100 100 100 -", want: 2},
		{name: "a pod that starts uses nothing where the others call for more", metric: cpu50,
			pods: "1000 1000 young:1000", want: 4},
		{name: "pods that start are not removed where the others call for more", metric: cpu50,
			pods: "600 young:0 young:0 young:0", want: 4},
		{name: "a pod that starts does not count where the others call for less", metric: cpu50,
			pods: "100 100 100 100 young:1000", want: 1},
		{name: "a pod that was measured for a window since it is ready counts", metric: cpu50,
			pods: "1000 warm:1000", want: 4},
		{name: "a pod that was never ready does not count", metric: cpu50, pods: "1000 never:1000", want: 2},
		{name: "a pod that is unready after it was ready counts", metric: cpu50, pods: "1000 lost:1000", want: 4},
		{name: "a pod that says nothing of its readiness does not count", metric: cpu50,
			pods: "1000 bare:1000", want: 2},
		{name: "memory is not that of the start", metric: memory50, pods: "1000 young:1000", want: 4},
		{name: "a pending pod does not count, also of memory", metric: memory50, pods: "1000 pending:1000", want: 2},
		{name: "failed pods and those that end are not there", metric: cpu50,
			pods: "1000 1000 failed:0 going:0", want: 4},
		{name: "none of the pods is ready", metric: cpu50, pods: "young:100 pending:-",
			wrong: "no metrics of the target's pods"},
		{name: "no sample at all", metric: cpu50, pods: "- -", wrong: "no metrics of the target's pods"},
		{name: "the average of a resource", metric: average(corev1.ResourceMemory, "500m"), pods: "1000 1000", want: 4},
		{name: "the average, a pod without a sample has the target where the others call for less",
			metric: average(corev1.ResourceMemory, "500m"), pods: "100 100 100 -", want: 2},
		{name: "one container", metric: ofContainer("c", 50), pods: "1000 1000", want: 4},
		{name: "a container that is not there", metric: ofContainer("d", 50), pods: "1000",
			wrong: "container d is not in Pod p0"},
		{name: "a request that is not there", metric: percent("example.com/gpu", 50), pods: "1000",
			wrong: "missing request for example.com/gpu in container c of Pod p0"},
		{name: "a metric of pods", metric: ofPods("2"), pods: "3000 3000", want: 3},
		{name: "a metric of pods knows no start", metric: ofPods("2"), pods: "3000 young:3000", want: 3},
		{name: "an object's value against the ready pods", metric: ofObject("value 10"), pods: "- -",
			value: 25_000, want: 5},
		{name: "an object's value, pods that are not ready", metric: ofObject("value 10"), pods: "- never:-",
			value: 40_000, want: 4},
		{name: "an object's value within the tolerance", metric: ofObject("value 10"), pods: "- -",
			value: 11_000, want: 2},
		{name: "an object's value, of two the one that the type names", metric: ofObject("value 10", "average 1"),
			pods: "- -", value: 25_000, want: 5},
		{name: "an object's value for each pod", metric: ofObject("average 10"), pods: "- -", value: 41_000, want: 5},
		{name: "an outer value", metric: ofOutside("value 10"), pods: "- -", value: 5_000, want: 1},
		{name: "an outer value for each pod", metric: ofOutside("average 10"), pods: "- - -", value: 15_000, want: 2},
		{name: "an outer value for each pod within the tolerance", metric: ofOutside("average 10"), pods: "- - -",
			value: 32_000, want: 3},
		{name: "more than a number of replicas can be", metric: ofOutside("average 1m"), pods: "-", value: 1 << 62,
			want: 1<<31 - 1},
		{name: "a negative value", metric: ofOutside("average 1"), pods: "-", value: -1 << 62, want: 0},
		{name: "a target of zero", metric: ofOutside("value 0"), pods: "-", value: 1,
			wrong: "the target must be greater than zero"},
		{name: "a metric without its part", metric: autoscalingv2.MetricSpec{Type: "Pods"}, pods: "-",
			wrong: "its part is missing"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := snapshot(t, autoscaler(1, 100, c.metric), c.pods, c.value)
			p := s.proposeReplicas(&c.metric, s.metricReading(0))
			switch {
			case c.wrong != "" && (p.err == nil || !strings.Contains(p.err.Error(), c.wrong)):
				t.Errorf("the error is %v, want one with %q", p.err, c.wrong)
			case c.wrong == "" && (p.err != nil || p.replicas != c.want):
				t.Errorf("%d replicas (%v), want %d", p.replicas, p.err, c.want)
			}
		})
	}
}

// outcome is a step as text: "4 New size: 4; reason: ... | AbleToScale=True ReadyForNewScale ...".
func outcome(step Step) string {
	out := "stays"
	if step.Rescale {
		out = fmt.Sprintf("%d: %s", step.Replicas, step.Reason)
	}
	for _, c := range step.Status.Conditions {
		sign := "+"
		if c.Status != corev1.ConditionTrue {
			sign = "-"
		}
		out += " " + sign + c.Reason
	}
	for _, e := range step.Events {
		out += " !" + e.Reason
	}
	return out
}

// comparePlan compares the outcome of a plan with the wanted one. The plan must not change the object that it is given.
func comparePlan(t *testing.T, s Snapshot, want string) {
	t.Helper()
	before := s.Autoscaler.DeepCopy()
	step := PlanAutoscaler(s)
	if got := outcome(step); got != want {
		t.Errorf("\n got %s\nwant %s", got, want)
	}
	if fmt.Sprint(before) != fmt.Sprint(s.Autoscaler) {
		t.Error("the plan changed the object that it was given")
	}
	if len(step.Status.CurrentMetrics) > 0 && len(step.Status.CurrentMetrics) != len(s.Autoscaler.Spec.Metrics) {
		t.Errorf("%d metrics in the status, want one of each", len(step.Status.CurrentMetrics))
	}
}

var planCpu50 = percent(corev1.ResourceCPU, 50)

func planBroken(i int) func(*Snapshot) {
	return func(s *Snapshot) { s.Readings[i] = Reading{Err: errors.New("nobody answers")} }
}

func planRules(up, down *autoscalingv2.HPAScalingRules) func(*Snapshot) {
	return func(s *Snapshot) {
		s.Autoscaler.Spec.Behavior = &autoscalingv2.HorizontalPodAutoscalerBehavior{ScaleUp: up, ScaleDown: down}
	}
}

var planNow, planDisabled = int32(0), autoscalingv2.DisabledPolicySelect

var planOutside = []autoscalingv2.MetricSpec{ofOutside("average 1")}

func planZero(s *Snapshot) {
	s.Autoscaler.Status.Conditions = []autoscalingv2.HorizontalPodAutoscalerCondition{
		{Type: autoscalingv2.ScaledToZero, Status: corev1.ConditionTrue, Reason: "ScaledToZero"}}
}

func planAt(before time.Duration, n int32) []HistoryEntry {
	return []HistoryEntry{{epoch.Add(-before), n}}
}

// planCases are the cases of TestPlan.
var planCases = []struct {
	name    string
	metrics []autoscalingv2.MetricSpec
	bounds  [2]int32
	pods    string
	values  []int64
	change  func(*Snapshot)
	want    string
}{
	{name: "up", pods: "1000 1000", want: "4: cpu resource utilization (percentage of request) above target " +
		"+ReadyForNewScale +ValidMetricFound -DesiredWithinRange"},
	{name: "steady", pods: "500 500", want: "stays +ReadyForNewScale +ValidMetricFound -DesiredWithinRange"},
	{name: "down waits for the window", pods: "0 0 0 0",
		want: "stays +ScaleDownStabilized +ValidMetricFound -DesiredWithinRange"},
	{name: "down to the highest of the window", pods: "0 0 0 0", change: func(s *Snapshot) {
		s.History.Wanted = planAt(time.Minute, 3)
	},
		want: "3: All metrics below target +ScaleDownStabilized +ValidMetricFound -DesiredWithinRange"},
	{name: "down after the window, to the minimum", pods: "0 0 0 0", change: func(s *Snapshot) {
		s.History.Wanted = planAt(5*time.Minute, 4)
	},
		want: "1: All metrics below target +ReadyForNewScale +ValidMetricFound +TooFewReplicas"},
	{name: "down at once with a window of zero", pods: "100 100 100 100",
		change: planRules(nil, &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: &planNow}),
		want:   "1: All metrics below target +ReadyForNewScale +ValidMetricFound -DesiredWithinRange"},
	{name: "up no further than the maximum", bounds: [2]int32{1, 3}, pods: "1000 1000",
		want: "3: cpu resource utilization (percentage of request) above target +ReadyForNewScale " +
			"+ValidMetricFound +TooManyReplicas"},
	{name: "up no faster than the policies", pods: "9000 9000",
		want: "6: cpu resource utilization (percentage of request) above target +ReadyForNewScale " +
			"+ValidMetricFound +ScaleUpLimit"},
	{name: "what was added in the period counts", pods: "9000 9000 9000 9000 9000 9000", change: func(s *Snapshot) {
		s.History.Added = planAt(10*time.Second, 4)
	},
		want: "stays +ReadyForNewScale +ValidMetricFound +ScaleUpLimit"},
	{name: "down no faster than the policies", pods: "0 0 0 0",
		change: planRules(nil, &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: &planNow,
			Policies: []autoscalingv2.HPAScalingPolicy{{Type: autoscalingv2.PodsScalingPolicy, Value: 1,
				PeriodSeconds: 60}}}),
		want: "3: All metrics below target +ReadyForNewScale +ValidMetricFound +ScaleDownLimit"},
	{name: "a direction that is disabled", pods: "0 0 0 0",
		change: planRules(nil, &autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: &planNow,
			SelectPolicy: &planDisabled}),
		want: "stays +ReadyForNewScale +ValidMetricFound +ScaleDownLimit"},
	{name: "a tolerance of its own", pods: "530 530",
		change: planRules(&autoscalingv2.HPAScalingRules{Tolerance: resource.NewMilliQuantity(50, resource.DecimalSI)},
			nil),
		want: "3: cpu resource utilization (percentage of request) above target +ReadyForNewScale " +
			"+ValidMetricFound -DesiredWithinRange"},
	{name: "a tolerance is of one direction",
		pods: "470 470 470 470 470 470 470 470 470 470 470 470 470 470 470 470 470 470", bounds: [2]int32{1, 20},
		change: planRules(&autoscalingv2.HPAScalingRules{Tolerance: resource.NewMilliQuantity(50, resource.DecimalSI)},
			&autoscalingv2.HPAScalingRules{StabilizationWindowSeconds: &planNow}),
		want: "stays +ReadyForNewScale +ValidMetricFound -DesiredWithinRange"},
	{name: "the largest of several", metrics: []autoscalingv2.MetricSpec{planCpu50, ofOutside("average 1")},
		pods: "500 500", values: []int64{0, 3000},
		want: "3: external metric queue above target +ReadyForNewScale +ValidMetricFound -DesiredWithinRange"},
	{name: "one fails, the other calls for more",
		metrics: []autoscalingv2.MetricSpec{planCpu50, ofOutside("average 1")}, pods: "500 500",
		values: []int64{0, 3000},
		change: planBroken(0), want: "3: external metric queue above target +ReadyForNewScale +ValidMetricFound " +
			"-DesiredWithinRange !FailedGetResourceMetric"},
	{name: "one fails, the other calls for less",
		metrics: []autoscalingv2.MetricSpec{planCpu50, ofOutside("average 1")}, pods: "500 500",
		values: []int64{0, 1000},
		change: planBroken(0), want: "stays +SucceededGetScale -FailedGetResourceMetric !FailedGetResourceMetric " +
			"!FailedComputeMetricsReplicas"},
	{name: "all fail", pods: "500 500", change: planBroken(0),
		want: "stays +SucceededGetScale -FailedGetResourceMetric !FailedGetResourceMetric " +
			"!FailedComputeMetricsReplicas"},
	{name: "switched off", pods: "", want: "stays +SucceededGetScale -ScalingDisabled"},
	{name: "switched off with a minimum of zero", metrics: planOutside, bounds: [2]int32{0, 9}, pods: "",
		values: []int64{3000},
		want:   "stays +SucceededGetScale -ScalingDisabled"},
	{name: "down to zero", metrics: planOutside, bounds: [2]int32{0, 9}, pods: "0", values: []int64{0},
		change: func(s *Snapshot) { s.History.Wanted = planAt(5*time.Minute, 1) },
		want:   "0: All metrics below target +ReadyForNewScale +ValidMetricFound -DesiredWithinRange"},
	{name: "up from zero", metrics: planOutside, bounds: [2]int32{0, 9}, pods: "", values: []int64{3000},
		change: planZero,
		want: "3: external metric queue above target +ScaledToZero +ReadyForNewScale +ValidMetricFound " +
			"-DesiredWithinRange"},
	{name: "stays at zero", metrics: planOutside, bounds: [2]int32{0, 9}, pods: "", values: []int64{0},
		change: planZero,
		want:   "stays +ScaledToZero +ReadyForNewScale +ValidMetricFound -DesiredWithinRange"},
	{name: "up from zero to a new minimum", bounds: [2]int32{2, 9}, pods: "", change: planZero,
		want: "2: Current number of replicas below Spec.MinReplicas +ScaledToZero +SucceededGetScale"},
	{name: "zero without a metric that can leave it", bounds: [2]int32{0, 9}, pods: "", change: planZero,
		want: "stays +ScaledToZero +SucceededGetScale -ScalingDisabled"},
	{name: "above the maximum", bounds: [2]int32{1, 1}, pods: "500 500", change: planBroken(0),
		want: "1: Current number of replicas above Spec.MaxReplicas +SucceededGetScale"},
	{name: "below the minimum", bounds: [2]int32{3, 5}, pods: "500 500", change: planBroken(0),
		want: "3: Current number of replicas below Spec.MinReplicas +SucceededGetScale"},
	{name: "no target", pods: "500", change: func(s *Snapshot) {
		s.TargetErr = errors.New("not found")
	}, want: "stays -FailedGetScale !FailedGetScale"},
	{name: "no selector", pods: "500", change: func(s *Snapshot) { s.Target.Selector = "" },
		want: "stays +SucceededGetScale -InvalidSelector !SelectorRequired !FailedComputeMetricsReplicas"},
	{name: "a selector that is wrong", pods: "500", change: func(s *Snapshot) {
		s.PodsErr = errors.New("unexpected !")
	},
		want: "stays +SucceededGetScale -InvalidSelector !InvalidSelector !FailedComputeMetricsReplicas"},
	{name: "pods of another autoscaler", pods: "500", change: func(s *Snapshot) { s.Shared = []string{"other"} },
		want: "stays +SucceededGetScale -AmbiguousSelector !AmbiguousSelector !FailedComputeMetricsReplicas"},
}

func TestPlan(t *testing.T) {
	for _, c := range planCases {
		t.Run(c.name, func(t *testing.T) {
			if c.metrics == nil {
				c.metrics = []autoscalingv2.MetricSpec{planCpu50}
			}
			if c.bounds == [2]int32{} {
				c.bounds = [2]int32{1, 10}
			}
			s := snapshot(t, autoscaler(c.bounds[0], c.bounds[1], c.metrics...), c.pods, c.values...)
			if c.change != nil {
				c.change(&s)
			}
			comparePlan(t, s, c.want)
		})
	}
}

func TestWhatBecameOfARescaleIsTold(t *testing.T) {
	s := snapshot(t, autoscaler(1, 10, percent(corev1.ResourceCPU, 50)), "1000 1000")
	step := PlanAutoscaler(s)
	done := s.Rescaled(step, nil)
	if got, want := outcome(done), step.Reason; !strings.HasPrefix(got, "4: "+want+" +SucceededRescale") ||
		!strings.HasSuffix(got, "!SuccessfulRescale") {
		t.Errorf("after a rescale: %s", got)
	}
	if at := done.Status.LastScaleTime; at == nil || !at.Time.Equal(epoch) {
		t.Errorf("lastScaleTime is %v", at)
	}
	if !slices.Equal(done.History.Added, []HistoryEntry{{epoch, 2}}) || done.Status.DesiredReplicas != 4 ||
		done.Status.CurrentReplicas != 2 {
		t.Errorf("after a rescale: %+v, %+v", done.History, done.Status)
	}
	current := done.Status.CurrentMetrics[0].Resource.Current
	if *current.AverageUtilization != 100 || current.AverageValue.String() != "1" {
		t.Errorf("the status tells of %d%% and %s", *current.AverageUtilization, current.AverageValue)
	}
	failed := s.Rescaled(step, errors.New("conflict"))
	if got := outcome(failed); !strings.Contains(got, "-FailedUpdateScale") ||
		!strings.HasSuffix(got, "!FailedRescale") {
		t.Errorf("after a rescale that failed: %s", got)
	}
	if failed.Status.LastScaleTime != nil || len(failed.History.Added) != 0 {
		t.Errorf("a rescale that failed counts: %+v", failed)
	}
}

func TestAConditionsTimeMovesWithItsStatus(t *testing.T) {
	s := snapshot(t, autoscaler(1, 10, percent(corev1.ResourceCPU, 50)), "500 500")
	s.Autoscaler.Status = PlanAutoscaler(s).Status
	s.Now = epoch.Add(time.Minute)
	for _, c := range PlanAutoscaler(s).Status.Conditions {
		if !c.LastTransitionTime.Time.Equal(epoch) || *c.ObservedGeneration != 3 {
			t.Errorf("%s moved to %s though its status is the same", c.Type, c.LastTransitionTime)
		}
	}
	s.Readings[0] = Reading{Err: errors.New("nobody answers")}
	for _, c := range PlanAutoscaler(s).Status.Conditions {
		if c.Type == autoscalingv2.ScalingActive && !c.LastTransitionTime.Time.Equal(s.Now) {
			t.Errorf("%s became false and its time is %s", c.Type, c.LastTransitionTime)
		}
	}
}
