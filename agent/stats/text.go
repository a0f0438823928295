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

// family is a metric of /metrics/resource. The names and the help are an interface of Kubernetes.
type family struct {
	name, kind, help string
	untimed          bool // the time of the reading does not belong to it: it does not change
	value            func(u *agent.Usage, started time.Time) (float64, bool)
}

func seconds(u *agent.Usage, _ time.Time) (float64, bool) { return float64(u.CPU) / 1e9, u.HasCPU }
func workingSet(u *agent.Usage, _ time.Time) (float64, bool) {
	return float64(u.WorkingSet), u.HasMemory
}
func swapUsed(u *agent.Usage, _ time.Time) (float64, bool) { return float64(u.Swap), u.HasSwap }
func swapLimit(u *agent.Usage, _ time.Time) (float64, bool) {
	return float64(u.SwapLimit), u.HasSwap && u.HasSwapLimit
}
func started(_ *agent.Usage, at time.Time) (float64, bool) {
	return float64(at.UnixNano()) / 1e9, at.Unix() > 0
}

const linux = ". Reported only on non-windows systems"

// Each group is in the order of names.
var (
	containerFamilies = []family{
		{name: "container_cpu_usage_seconds_total", kind: "counter", value: seconds,
			help: "[STABLE] Cumulative cpu time consumed by the container in core-seconds"},
		{name: "container_memory_working_set_bytes", kind: "gauge", value: workingSet,
			help: "[STABLE] Current working set of the container in bytes"},
		{name: "container_start_time_seconds", kind: "gauge", value: started, untimed: true,
			help: "[STABLE] Start time of the container since unix epoch in seconds"},
		{name: "container_swap_limit_bytes", kind: "gauge", value: swapLimit,
			help: "[ALPHA] Current amount of the container swap limit in bytes" + linux},
		{name: "container_swap_usage_bytes", kind: "gauge", value: swapUsed,
			help: "[ALPHA] Current amount of the container swap usage in bytes" + linux},
	}
	nodeFamilies = []family{
		{name: "node_cpu_usage_seconds_total", kind: "counter", value: seconds,
			help: "[STABLE] Cumulative cpu time consumed by the node in core-seconds"},
		{name: "node_memory_working_set_bytes", kind: "gauge", value: workingSet,
			help: "[STABLE] Current working set of the node in bytes"},
		{name: "node_swap_usage_bytes", kind: "gauge", value: swapUsed,
			help: "[ALPHA] Current swap usage of the node in bytes" + linux},
	}
	podFamilies = []family{
		{name: "pod_cpu_usage_seconds_total", kind: "counter", value: seconds,
			help: "[STABLE] Cumulative cpu time consumed by the pod in core-seconds"},
		{name: "pod_memory_working_set_bytes", kind: "gauge", value: workingSet,
			help: "[STABLE] Current working set of the pod in bytes"},
		{name: "pod_swap_usage_bytes", kind: "gauge", value: swapUsed,
			help: "[ALPHA] Current amount of the pod swap usage in bytes" + linux},
	}
)

// Resource writes /metrics/resource. What cannot be measured is told in resource_scrape_error, as kubelet does: the
// error returned is one of writing.
func (s *Source) Resource(ctx context.Context, to io.Writer) error {
	sample, err := s.Sample(ctx)
	t := &text{w: bufio.NewWriter(to)}
	if sample != nil {
		t.sample(sample)
	}
	failed := 0.0
	if err != nil {
		failed = 1
	}
	const help = "1 if there was an error while getting container metrics, 0 otherwise"
	t.begin(&family{name: "resource_scrape_error", kind: "gauge", help: "[STABLE] " + help})
	t.number(failed, time.Time{})
	t.begin(&family{name: "scrape_error", kind: "gauge", help: "[ALPHA] (Deprecated since 1.29.0) " + help})
	t.number(failed, time.Time{})
	return t.w.Flush()
}

// text writes the exposition format, a line at a time. A write that fails is told by Flush.
type text struct {
	w    *bufio.Writer
	f    *family
	told bool // the head of f is written
	line []byte
}

func (t *text) begin(f *family) { t.f, t.told = f, false }

func (t *text) sample(s *Sample) {
	for i := range containerFamilies {
		t.begin(&containerFamilies[i])
		for j := range s.Pods {
			p := &s.Pods[j]
			for k := range p.Containers {
				c := &p.Containers[k]
				t.value(&c.Usage, c.Started, "container", c.Name, "namespace", p.Namespace, "pod", p.Name)
			}
		}
	}
	for i := range nodeFamilies {
		t.begin(&nodeFamilies[i])
		t.value(&s.Node, time.Time{})
	}
	for i := range podFamilies {
		t.begin(&podFamilies[i])
		for j := range s.Pods {
			p := &s.Pods[j]
			t.value(&p.Usage, p.Started, "namespace", p.Namespace, "pod", p.Name)
		}
	}
}

// value writes what u has of the family, if it has it.
func (t *text) value(u *agent.Usage, started time.Time, labels ...string) {
	v, ok := t.f.value(u, started)
	if !ok {
		return
	}
	at := u.At
	if t.f.untimed {
		at = time.Time{}
	}
	t.number(v, at, labels...)
}

var escape = strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)

// number writes one line; labels are names and values in turn, and the zero time is left out.
func (t *text) number(v float64, at time.Time, labels ...string) {
	if !t.told {
		t.told = true
		for _, part := range []string{"# HELP ", t.f.name, " ", t.f.help, "\n# TYPE ", t.f.name, " ", t.f.kind, "\n"} {
			_, _ = t.w.WriteString(part)
		}
	}
	b := append(t.line[:0], t.f.name...)
	for i := 0; i+1 < len(labels); i += 2 {
		sep := byte(',')
		if i == 0 {
			sep = '{'
		}
		b = append(append(b, sep), labels[i]...)
		b = append(append(append(b, `="`...), escape.Replace(labels[i+1])...), '"')
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
