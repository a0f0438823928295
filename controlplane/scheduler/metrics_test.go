package scheduler_test

import (
	"errors"
	"fmt"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler"
)

// readSeries returns the values of the scheduler's metrics by series.
func readSeries(t testing.TB, m *scheduler.Metrics) map[string]float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(m)
	w := httptest.NewRecorder()
	promhttp.HandlerFor(reg, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	out := map[string]float64{}
	for line := range strings.Lines(w.Body.String()) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), "} ")
		if ok {
			name += "}"
		} else if name, value, ok = strings.Cut(strings.TrimSpace(line), " "); !ok {
			continue
		}
		if n, err := strconv.ParseFloat(value, 64); err == nil && !strings.HasPrefix(name, "#") {
			out[name] = n
		}
	}
	return out
}

// awaitSeries waits until the series have the given values. A value below 0 means at least its
// absolute value.
func (b *bed) awaitSeries(m *scheduler.Metrics, want map[string]float64) {
	b.t.Helper()
	b.eventually("metrics of the scheduler", func() error {
		have := readSeries(b.t, m)
		for name, value := range want {
			got, ok := have[name]
			if !ok {
				return fmt.Errorf("no series %s", name)
			}
			if value < 0 && got < -value || value >= 0 && got != value {
				return fmt.Errorf("%s is %v, want %v", name, got, value)
			}
		}
		return nil
	})
}

// F133: the metrics have the names, labels and bucket bounds of kube-scheduler, and count attempts,
// queues and refusals. A replica that does not lead counts no pods.
func TestMetrics(t *testing.T) {
	m := scheduler.NewMetrics()
	b := newBedOf(t, scheduler.Config{Metrics: m})
	b.node("w1", "4")
	depose := b.lead()
	b.pod("fits", "1")
	b.awaitNode("fits", "w1")
	b.pod("huge", "100")
	b.pod("gated", "1", func(pod *v1.Pod) { pod.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "g"}} })
	const profile = `profile="default-scheduler"`
	point := func(name, status string) string {
		return `scheduler_framework_extension_point_duration_seconds_count{extension_point="` + name + `",` + profile +
			`,status="` + status + `"}`
	}
	b.awaitSeries(m, map[string]float64{
		`scheduler_schedule_attempts_total{` + profile + `,result="scheduled"}`:                                1,
		`scheduler_schedule_attempts_total{` + profile + `,result="unschedulable"}`:                            -1,
		`scheduler_schedule_attempts_total{` + profile + `,result="error"}`:                                    0,
		`scheduler_scheduling_attempt_duration_seconds_count{` + profile + `,result="scheduled"}`:              1,
		`scheduler_scheduling_attempt_duration_seconds_bucket{` + profile + `,result="scheduled",le="16.384"}`: 1,
		`scheduler_scheduling_algorithm_duration_seconds_count`:                                                1,
		`scheduler_pod_scheduling_sli_duration_seconds_count{attempts="1"}`:                                    1,
		`scheduler_pod_scheduling_sli_duration_seconds_bucket{attempts="1",le="5242.88"}`:                      1,
		`scheduler_pod_scheduling_attempts_bucket{le="1"}`:                                                     1,
		`scheduler_pod_scheduling_attempts_bucket{le="16"}`:                                                    1,
		`scheduler_pending_pods{queue="active"}`:                                                               0,
		`scheduler_pending_pods{queue="backoff"}`:                                                              0,
		`scheduler_pending_pods{queue="unschedulable"}`:                                                        1,
		`scheduler_pending_pods{queue="gated"}`:                                                                1,
		`scheduler_unschedulable_pods{plugin="NodeResourcesFit",` + profile + `}`:                              1,
		`scheduler_unschedulable_pods{plugin="SchedulingGates",` + profile + `}`:                               1,
		`scheduler_queue_incoming_pods_total{event="UnscheduledPodAdd",queue="active"}`:                        2,
		`scheduler_queue_incoming_pods_total{event="UnscheduledPodAdd",queue="unschedulable"}`:                 1,
		`scheduler_queue_incoming_pods_total{event="ScheduleAttemptFailure",queue="unschedulable"}`:            -1,
		`scheduler_preemption_attempts_total`:                                                                  -1,
		`scheduler_preemption_victims_bucket{le="64"}`:                                                         0,
		point("PreFilter", "Success"):                                                                          -2,
		point("Filter", "Success"):                                                                             -2,
		point("PostFilter", "Unschedulable"):                                                                   -1,
		point("PreScore", "Success"):                                                                           1,
		point("Score", "Success"):                                                                              1,
		point("Reserve", "Success"):                                                                            1,
		point("Permit", "Success"):                                                                             1,
		point("PreBind", "Success"):                                                                            1,
		point("Bind", "Success"):                                                                               1,
	})
	depose()
	b.awaitSeries(m, map[string]float64{
		`scheduler_pending_pods{queue="unschedulable"}`: 0, `scheduler_pending_pods{queue="gated"}`: 0,
	})
	for name := range readSeries(t, m) {
		if strings.HasPrefix(name, "scheduler_unschedulable_pods") {
			t.Errorf("a replica that does not lead has %s", name)
		}
	}
}

// A preemption counts its victims. A binding that fails is an error, and the pod waits for its
// backoff.
func TestMetricsOfFailures(t *testing.T) {
	m := scheduler.NewMetrics()
	b := newBedOf(t, scheduler.Config{Metrics: m})
	var bindings atomic.Int32
	b.binds = func(string) error {
		if bindings.Add(1) == 2 {
			return errors.New("no binding now")
		}
		return nil
	}
	b.node("w1", "2")
	b.lead()
	b.pod("low", "2", important(1))
	b.awaitNode("low", "")
	b.pod("high", "2", important(10))
	b.awaitSeries(m, map[string]float64{`scheduler_preemption_victims_sum`: -1,
		`scheduler_preemption_attempts_total`: -1})
	b.delete("low")
	b.awaitNode("high", "w1")
	b.awaitSeries(m, map[string]float64{
		`scheduler_schedule_attempts_total{profile="default-scheduler",result="error"}`:       1,
		`scheduler_schedule_attempts_total{profile="default-scheduler",result="scheduled"}`:   2,
		`scheduler_pod_scheduling_attempts_sum`:                                               -4,
		`scheduler_queue_incoming_pods_total{event="ScheduleAttemptFailure",queue="backoff"}`: -1,
		`scheduler_queue_incoming_pods_total{event="BackoffComplete",queue="active"}`:         -1,
	})
}
