package stats

import (
	"bufio"
	"context"
	"io"
	"strconv"
	"strings"
	"time"

	"keelson.dev/keelson/agent"
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
		{name: "container_cpu_usage_seconds_total", kind: "counter", value: cpuSeconds,
			help: "[STABLE] Cumulative cpu time consumed by the container in core-seconds"},
		{name: "container_memory_working_set_bytes", kind: "gauge", value: workingSet,
			help: "[STABLE] Current working set of the container in bytes"},
		{name: "container_start_time_seconds", kind: "gauge", value: startSeconds, untimed: true,
			help: "[STABLE] Start time of the container since unix epoch in seconds"},
		{name: "container_swap_limit_bytes", kind: "gauge", value: swapLimit,
			help: "[ALPHA] Current amount of the container swap limit in bytes" + linuxOnlyHelp},
		{name: "container_swap_usage_bytes", kind: "gauge", value: swapUsed,
			help: "[ALPHA] Current amount of the container swap usage in bytes" + linuxOnlyHelp},
	}
	nodeFamilies = []family{
		{name: "node_cpu_usage_seconds_total", kind: "counter", value: cpuSeconds,
			help: "[STABLE] Cumulative cpu time consumed by the node in core-seconds"},
		{name: "node_memory_working_set_bytes", kind: "gauge", value: workingSet,
			help: "[STABLE] Current working set of the node in bytes"},
		{name: "node_swap_usage_bytes", kind: "gauge", value: swapUsed,
			help: "[ALPHA] Current swap usage of the node in bytes" + linuxOnlyHelp},
	}
	podFamilies = []family{
		{name: "pod_cpu_usage_seconds_total", kind: "counter", value: cpuSeconds,
			help: "[STABLE] Cumulative cpu time consumed by the pod in core-seconds"},
		{name: "pod_memory_working_set_bytes", kind: "gauge", value: workingSet,
			help: "[STABLE] Current working set of the pod in bytes"},
		{name: "pod_swap_usage_bytes", kind: "gauge", value: swapUsed,
			help: "[ALPHA] Current amount of the pod swap usage in bytes" + linuxOnlyHelp},
	}
)

// Resource writes the response of /metrics/resource to output. As in the kubelet, a failed
// measurement is reported in the metric resource_scrape_error. The returned error is a write error.
func (s *Source) Resource(ctx context.Context, output io.Writer) error {
	sample, err := s.Sample(ctx)
	t := &textWriter{w: bufio.NewWriter(output)}
	if sample != nil {
		t.writeSample(sample)
	}
	failed := 0.0
	if err != nil {
		failed = 1
	}
	const help = "1 if there was an error while getting container metrics, 0 otherwise"
	t.startFamily(&family{name: "resource_scrape_error", kind: "gauge", help: "[STABLE] " + help})
	t.writeNumber(failed, time.Time{})
	t.startFamily(&family{name: "scrape_error", kind: "gauge", help: "[ALPHA] (Deprecated since 1.29.0) " + help})
	t.writeNumber(failed, time.Time{})
	return t.w.Flush()
}

// textWriter writes the Prometheus text format line by line. Its Flush method returns write errors.
type textWriter struct {
	w           *bufio.Writer
	family      *family
	headWritten bool // the HELP and TYPE lines of the family are written
	line        []byte
}

func (t *textWriter) startFamily(f *family) { t.family, t.headWritten = f, false }

func (t *textWriter) writeSample(s *Sample) {
	for i := range containerFamilies {
		t.startFamily(&containerFamilies[i])
		for j := range s.Pods {
			p := &s.Pods[j]
			for k := range p.Containers {
				c := &p.Containers[k]
				t.writeUsage(&c.Usage, c.Started, "container", c.Name, "namespace", p.Namespace, "pod", p.Name)
			}
		}
	}
	for i := range nodeFamilies {
		t.startFamily(&nodeFamilies[i])
		t.writeUsage(&s.Node, time.Time{})
	}
	for i := range podFamilies {
		t.startFamily(&podFamilies[i])
		for j := range s.Pods {
			p := &s.Pods[j]
			t.writeUsage(&p.Usage, p.Started, "namespace", p.Namespace, "pod", p.Name)
		}
	}
}

// writeUsage writes one line of the current metric family with its value in u. It writes nothing if
// u does not have the value.
func (t *textWriter) writeUsage(u *agent.Usage, started time.Time, labels ...string) {
	v, ok := t.family.value(u, started)
	if !ok {
		return
	}
	at := u.At
	if t.family.untimed {
		at = time.Time{}
	}
	t.writeNumber(v, at, labels...)
}

var labelEscaper = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// writeNumber writes one line of a metric. labels are alternating names and values. at is the
// line's timestamp; a zero time is omitted.
func (t *textWriter) writeNumber(v float64, at time.Time, labels ...string) {
	if !t.headWritten {
		t.headWritten = true
		for _, part := range []string{"# HELP ", t.family.name, " ", t.family.help, "\n# TYPE ", t.family.name, " ",
			t.family.kind, "\n"} {
			_, _ = t.w.WriteString(part)
		}
	}
	b := append(t.line[:0], t.family.name...)
	for i := 0; i+1 < len(labels); i += 2 {
		sep := byte(',')
		if i == 0 {
			sep = '{'
		}
		b = append(append(b, sep), labels[i]...)
		b = append(append(append(b, `="`...), labelEscaper.Replace(labels[i+1])...), '"')
	}
	if len(labels) > 0 {
		b = append(b, '}')
	}
	b = strconv.AppendFloat(append(b, ' '), v, 'g', -1, 64)
	if !at.IsZero() {
		b = strconv.AppendInt(append(b, ' '), at.UnixMilli(), 10)
	}
	t.line = append(b, '\n')
	_, _ = t.w.Write(t.line)
}
