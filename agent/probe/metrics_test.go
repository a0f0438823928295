package probe

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

// readMetrics returns the response of /metrics/probes.
func readMetrics(t *testing.T, p *Prober) string {
	t.Helper()
	var out strings.Builder
	if err := p.WriteMetrics(&out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func newProbedPod(uid types.UID) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: uid}}
}

// Results are counted by kind and result, under the names of the kubelet. Failures of the first
// period do not count. Counters outlive the container, and are deleted with the pod. F133
func TestProbeMetrics(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		a := &app{start: time.Now(), ok: map[string]func(time.Duration) bool{
			Readiness: passAfter(30 * time.Millisecond),
			Liveness:  func(age time.Duration) bool { return age < 15*time.Second }}}
		pods := []*v1.Pod{newProbedPod("u1")}
		p := New(Config{Ask: func(ctx context.Context, spec *v1.Probe, target agent.ProbeTarget) (bool, string, error) {
			time.Sleep(20 * time.Millisecond) // virtual time
			return a.runProbe(ctx, spec, target)
		}, Pods: func() []*v1.Pod { return pods }})
		c := &v1.Container{Name: "app", ReadinessProbe: &v1.Probe{PeriodSeconds: 10},
			LivenessProbe: &v1.Probe{PeriodSeconds: 10, FailureThreshold: 3}}
		// The liveness probe fails at the age of 21, 31 and 41 s.
		target := agent.ProbeTarget{Pod: pods[0], Container: c, StartedAt: a.start}
		p.Watch(t.Context(), target, func(agent.ProbeEvent) {})
		got := readMetrics(t, p)
		for _, line := range []string{
			`prober_probe_total{container="app",namespace="default",pod="web",probe_type="Liveness",pod_uid="u1",` +
				`result="successful"} 2`,
			`prober_probe_total{container="app",namespace="default",pod="web",probe_type="Liveness",pod_uid="u1",` +
				`result="failed"} 3`,
			`prober_probe_duration_seconds_bucket{container="app",namespace="default",pod="web",` +
				`probe_type="Liveness",le="0.01"} 0`,
			`prober_probe_duration_seconds_bucket{container="app",namespace="default",pod="web",` +
				`probe_type="Liveness",le="0.025"} 5`,
			`prober_probe_duration_seconds_count{container="app",namespace="default",pod="web",` +
				`probe_type="Liveness"} 5`,
		} {
			if !strings.Contains(got, "\n"+line+"\n") {
				t.Errorf("the response lacks\n%s\n%s", line, got)
			}
		}
		if strings.Contains(got, `probe_type="Readiness",pod_uid="u1",result="failed"`) ||
			!strings.Contains(got, `probe_type="Readiness",pod_uid="u1",result="successful"`) {
			t.Errorf("readiness probes: %s", got)
		}
		pods = nil
		if got := readMetrics(t, p); got != "" {
			t.Errorf("after the pod was removed: %s", got)
		}
	})
}

// A pod that replaces one of the same name adds no second series with the same labels, which
// Prometheus would refuse.
func TestProbeMetricsOfReplacedPod(t *testing.T) {
	p := New(Config{Ask: AlwaysPass})
	c := &v1.Container{Name: "app"}
	for _, uid := range []types.UID{"u1", "u2"} {
		counter := p.counters.startWatch(&agent.ProbeTarget{Pod: newProbedPod(uid), Container: c}, Readiness)
		p.counters.countResult(counter, resultSuccess, time.Millisecond)
	}
	seen := map[string]bool{}
	for line := range strings.Lines(readMetrics(t, p)) {
		series, _, _ := strings.Cut(line, "} ")
		if seen[series] {
			t.Errorf("%s occurs twice", series)
		}
		seen[series] = true
	}
}

// Counters of removed pods are deleted also on a node that is not scraped.
func TestProbeCountersAreBounded(t *testing.T) {
	p := New(Config{Ask: AlwaysPass, Pods: func() []*v1.Pod { return nil }})
	c := &v1.Container{Name: "app"}
	for i := range 10 * maxEndedWatches {
		target := agent.ProbeTarget{Pod: newProbedPod(types.UID(fmt.Sprint(i))), Container: c}
		p.counters.endWatch(p.counters.startWatch(&target, Liveness), p.knownPods)
	}
	if n := len(p.counters.probes); n >= maxEndedWatches {
		t.Errorf("%d counters of removed pods", n)
	}
}
