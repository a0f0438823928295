package proxy

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// Metrics are the proxy's metrics under kube-proxy's names, and the number of connections per
// Service. A nil *Metrics records nothing.
type Metrics struct {
	mu                              sync.Mutex
	all, full, partial, programming histogram
	lastSync                        time.Time
	failures                        uint64
	startedAt                       time.Time
}

// NewMetrics returns empty Metrics. The programming latency is measured only for changes that occur
// after this call.
func NewMetrics() *Metrics {
	syncBounds := exponentialBounds(0.001, 2, 15)
	programming := slices.Concat(linearBounds(0.25, 0.25, 2), linearBounds(1, 1, 59), linearBounds(60, 5, 12),
		linearBounds(120, 30, 7))
	return &Metrics{all: histogram{bounds: syncBounds}, full: histogram{bounds: syncBounds},
		partial:     histogram{bounds: syncBounds},
		programming: histogram{bounds: programming}, startedAt: time.Now()}
}

func exponentialBounds(start, factor float64, n int) (out []float64) {
	for range n {
		out = append(out, start)
		start *= factor
	}
	return out
}

func linearBounds(start, width float64, n int) (out []float64) {
	for i := range n {
		out = append(out, start+float64(i)*width)
	}
	return out
}

// countSync records a successful write of rules and its duration. full means that all rules were
// written, not only changes.
func (m *Metrics) countSync(duration time.Duration, full bool) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lastSync = time.Now()
	m.all.observeDuration(duration)
	if full {
		m.full.observeDuration(duration)
	} else {
		m.partial.observeDuration(duration)
	}
}

func (m *Metrics) countFailure() {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failures++
}

// observeProgramming records the latency of one change of a pod or Service. The change occurred at
// changedAt, and its rules were in the kernel at programmedAt. Changes before NewMetrics are
// ignored.
func (m *Metrics) observeProgramming(changedAt, programmedAt time.Time) {
	if m == nil || changedAt.Before(m.startedAt) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.programming.observeDuration(programmedAt.Sub(changedAt))
}

// histogram is a Prometheus histogram of durations in seconds.
type histogram struct {
	bounds []float64
	counts []uint64
	sum    float64
	n      uint64
}

func (h *histogram) observeDuration(d time.Duration) {
	if h.counts == nil {
		h.counts = make([]uint64, len(h.bounds))
	}
	v := d.Seconds()
	h.sum += v
	h.n++
	if at, _ := slices.BinarySearch(h.bounds, v); at < len(h.counts) {
		h.counts[at]++
	}
}

func (h *histogram) writePrometheus(w io.Writer, name, help string) {
	fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s histogram\n", name, help, name)
	var sum uint64
	for i, le := range h.bounds {
		if h.counts != nil {
			sum += h.counts[i]
		}
		fmt.Fprintf(w, "%s_bucket{le=\"%s\"} %d\n", name, strconv.FormatFloat(le, 'g', -1, 64), sum)
	}
	fmt.Fprintf(w, "%s_bucket{le=\"+Inf\"} %d\n%s_sum %g\n%s_count %d\n", name, h.n, name, h.sum, name, h.n)
}

// WriteMetrics writes the metrics of the Service proxy in the Prometheus text format.
func (p *Proxy) WriteMetrics(ctx context.Context, to io.Writer) error {
	w := bufio.NewWriter(to)
	if m := p.Metrics; m != nil {
		m.writePrometheus(w, p.Mode)
	}
	p.writeConnectionCounts(ctx, w)
	return w.Flush()
}

func (m *Metrics) writePrometheus(w io.Writer, mode Mode) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.programming.writePrometheus(w, "kubeproxy_network_programming_duration_seconds",
		"In Cluster Network Programming Latency in seconds")
	m.full.writePrometheus(w, "kubeproxy_sync_full_proxy_rules_duration_seconds",
		"SyncProxyRules latency in seconds for full resyncs")
	m.partial.writePrometheus(w, "kubeproxy_sync_partial_proxy_rules_duration_seconds",
		"SyncProxyRules latency in seconds for partial syncs")
	m.all.writePrometheus(w, "kubeproxy_sync_proxy_rules_duration_seconds", "SyncProxyRules latency in seconds")
	const last = "kubeproxy_sync_proxy_rules_last_timestamp_seconds"
	at := 0.0
	if !m.lastSync.IsZero() {
		at = float64(m.lastSync.UnixNano()) / 1e9
	}
	fmt.Fprintf(w, "# HELP %s The last time proxy rules were successfully synced\n# TYPE %s gauge\n%s %f\n", last,
		last, last, at)
	failures := "kubeproxy_sync_proxy_rules_nftables_sync_failures_total"
	if mode == ModeIPTables {
		failures = "kubeproxy_sync_proxy_rules_iptables_restore_failures_total"
	}
	fmt.Fprintf(w, "# HELP %s Cumulative proxy rules that could not be written\n# TYPE %s counter\n%s %d\n", failures,
		failures, failures, m.failures)
}

// writeConnectionCounts writes two counters per Service port, read from the kernel on each call.
// They count the connections for which an endpoint was selected, and the packets that found no
// endpoint. It writes nothing while the rules are not in the kernel.
func (p *Proxy) writeConnectionCounts(ctx context.Context, w io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == nil || !p.current.built {
		return
	}
	counts, err := p.current.writer.Counts(ctx)
	if err != nil {
		p.Log.Debug("the connection counters of Services cannot be read", "err", err)
		return
	}
	for _, m := range []struct {
		name, help string
		counts     map[servicemodel.Frontend]uint64
	}{{MetricConnections, "Connections for which this node selected an endpoint, by frontend", counts.Connections},
		{MetricUnserved, "Packets to a Service without a usable endpoint, by frontend", counts.Unserved}} {
		fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s counter\n", m.name, m.help, m.name)
		by := countsByPort(p.current.model.Ports(), m.counts)
		for _, l := range slices.SortedFunc(maps.Keys(by), func(a, b countLabels) int {
			return cmp.Or(cmp.Compare(a.port, b.port), cmp.Compare(a.proto, b.proto), cmp.Compare(a.from, b.from))
		}) {
			ns, rest, _ := strings.Cut(l.port, "/")
			svc, port, _ := strings.Cut(rest, ":")
			fmt.Fprintf(w, "%s{namespace=%q,service=%q,port=%q,protocol=%q,from=%q} %d\n", m.name, ns, svc, port,
				l.proto, l.from, by[l])
		}
	}
}

// Names of the connection metrics per Service.
const (
	MetricConnections = "keelson_service_connections_total"
	MetricUnserved    = "keelson_service_unserved_packets_total"
)

type countLabels struct{ port, proto, from string }

// countsByPort adds up the counters of all frontends of each Service port. Cluster IPs and external
// frontends are separate sums. It is pure.
func countsByPort(ports map[string]*servicemodel.Port, counts map[servicemodel.Frontend]uint64) map[countLabels]uint64 {
	out := map[countLabels]uint64{}
	nodePorts := map[servicemodel.Frontend]countLabels{}
	for _, p := range ports {
		for _, f := range p.Internal {
			if n := counts[f]; n > 0 {
				out[countLabels{p.Name, p.Proto, "cluster"}] += n
			}
		}
		for _, f := range p.External {
			if f.IsNodePort() {
				nodePorts[f] = countLabels{p.Name, p.Proto, "outside"}
			}
			if n := counts[f]; n > 0 {
				out[countLabels{p.Name, p.Proto, "outside"}] += n
			}
		}
	}
	for f, n := range counts { // node ports are counted at the node's addresses
		if f.IsNodePort() {
			continue
		}
		if l, ok := nodePorts[f.NodePortFrontend()]; ok {
			out[l] += n
		}
	}
	return out
}
