package stats

import (
	"context"
	"io"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/promtext"
)

// family is a metric family of /metrics/resource. Names and help texts are those of Kubernetes.
type family struct {
	name, kind, help string
	untimed          bool // without a timestamp, because the value is constant
	value            func(u *agent.Usage, started time.Time) (float64, bool)
}

func cpuSeconds(u *agent.Usage, _ time.Time) (float64, bool) { return float64(u.CPU) / 1e9, u.HasCPU }
func workingSet(u *agent.Usage, _ time.Time) (float64, bool) {
	return float64(u.WorkingSet), u.HasMemory
}
func swapUsed(u *agent.Usage, _ time.Time) (float64, bool) { return float64(u.Swap), u.HasSwap }
func swapLimit(u *agent.Usage, _ time.Time) (float64, bool) {
	return float64(u.SwapLimit), u.HasSwap && u.HasSwapLimit
}
func startSeconds(_ *agent.Usage, at time.Time) (float64, bool) {
	return float64(at.UnixNano()) / 1e9, at.Unix() > 0
}

const linuxOnlyHelp = ". Reported only on non-windows systems"

// Metric families of /metrics/resource. Each group is sorted by name.
var (
	containerFamilies = []family{
		{name: "container_cpu_usage_seconds_total", kind: promtext.Counter, value: cpuSeconds,
			help: "[STABLE] Cumulative cpu time consumed by the container in core-seconds"},
		{name: "container_memory_working_set_bytes", kind: promtext.Gauge, value: workingSet,
			help: "[STABLE] Current working set of the container in bytes"},
		{name: "container_start_time_seconds", kind: promtext.Gauge, value: startSeconds, untimed: true,
			help: "[STABLE] Start time of the container since unix epoch in seconds"},
		{name: "container_swap_limit_bytes", kind: promtext.Gauge, value: swapLimit,
			help: "[ALPHA] Current amount of the container swap limit in bytes" + linuxOnlyHelp},
		{name: "container_swap_usage_bytes", kind: promtext.Gauge, value: swapUsed,
			help: "[ALPHA] Current amount of the container swap usage in bytes" + linuxOnlyHelp},
	}
	nodeFamilies = []family{
		{name: "node_cpu_usage_seconds_total", kind: promtext.Counter, value: cpuSeconds,
			help: "[STABLE] Cumulative cpu time consumed by the node in core-seconds"},
		{name: "node_memory_working_set_bytes", kind: promtext.Gauge, value: workingSet,
			help: "[STABLE] Current working set of the node in bytes"},
		{name: "node_swap_usage_bytes", kind: promtext.Gauge, value: swapUsed,
			help: "[ALPHA] Current swap usage of the node in bytes" + linuxOnlyHelp},
	}
	podFamilies = []family{
		{name: "pod_cpu_usage_seconds_total", kind: promtext.Counter, value: cpuSeconds,
			help: "[STABLE] Cumulative cpu time consumed by the pod in core-seconds"},
		{name: "pod_memory_working_set_bytes", kind: promtext.Gauge, value: workingSet,
			help: "[STABLE] Current working set of the pod in bytes"},
		{name: "pod_swap_usage_bytes", kind: promtext.Gauge, value: swapUsed,
			help: "[ALPHA] Current amount of the pod swap usage in bytes" + linuxOnlyHelp},
	}
)

// Resource writes the response of /metrics/resource to output. As in the kubelet, a failed
// measurement is reported in the metric resource_scrape_error. The returned error is a write error.
func (s *Source) Resource(ctx context.Context, output io.Writer) error {
	sample, err := s.Sample(ctx)
	w := promtext.NewWriter(output)
	if sample != nil {
		writeResource(w, sample)
	}
	failed := 0.0
	if err != nil {
		failed = 1
	}
	const help = "1 if there was an error while getting container metrics, 0 otherwise"
	writeGauge(w, "resource_scrape_error", "[STABLE] "+help, failed)
	writeGauge(w, "scrape_error", "[ALPHA] (Deprecated since 1.29.0) "+help, failed)
	return w.Flush()
}

// writeGauge writes a gauge without a timestamp. labels are alternating names and values.
func writeGauge(w *promtext.Writer, name, help string, value float64, labels ...string) {
	w.StartFamily(name, promtext.Gauge, help)
	w.WriteSample(value, time.Time{}, "", labels...)
}

func writeResource(w *promtext.Writer, s *Sample) {
	for i := range containerFamilies {
		f := startFamily(w, &containerFamilies[i])
		for j := range s.Pods {
			p := &s.Pods[j]
			for k := range p.Containers {
				c := &p.Containers[k]
				f.writeUsage(w, &c.Usage, c.Started, "container", c.Name, "namespace", p.Namespace, "pod", p.Name)
			}
		}
	}
	for i := range nodeFamilies {
		startFamily(w, &nodeFamilies[i]).writeUsage(w, &s.Node, time.Time{})
	}
	for i := range podFamilies {
		f := startFamily(w, &podFamilies[i])
		for j := range s.Pods {
			p := &s.Pods[j]
			f.writeUsage(w, &p.Usage, p.Started, "namespace", p.Namespace, "pod", p.Name)
		}
	}
}

func startFamily(w *promtext.Writer, f *family) *family {
	w.StartFamily(f.name, f.kind, f.help)
	return f
}

// writeUsage writes one line of the metric family with its value in u. It writes nothing if u does
// not have the value.
func (f *family) writeUsage(w *promtext.Writer, u *agent.Usage, started time.Time, labels ...string) {
	v, ok := f.value(u, started)
	if !ok {
		return
	}
	at := u.At
	if f.untimed {
		at = time.Time{}
	}
	w.WriteSample(v, at, "", labels...)
}
