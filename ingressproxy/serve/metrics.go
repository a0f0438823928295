package serve

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/ingressproxy/route"
)

// metrics holds the Prometheus metrics of a Server. The time series of a rule are deleted when the
// table no longer has the rule.
type metrics struct {
	server             *Server
	requests           *prometheus.CounterVec
	seconds            *prometheus.HistogramVec
	refusedConnections prometheus.Counter
	retries            prometheus.Counter
	mirrorsLost        prometheus.Counter
	open               *prometheus.Desc
	shed               *prometheus.Desc
	running            *prometheus.Desc
	upgraded           *prometheus.Desc
}

func newMetrics(s *Server) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return &metrics{
		server: s,
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "keelson_entry_requests_total", Help: "Handled requests, by rule (empty: none matched) and status " +
				"code; 499: the client closed the connection.",
		}, []string{"rule", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "keelson_entry_request_seconds", Help: "Time from a request's header to the end of its response.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}, []string{"rule"}),
		refusedConnections: counter("keelson_entry_refused_connections_total",
			"Connections refused by endpoints; such an endpoint is avoided for 0.5 to 30 s."),
		retries: counter("keelson_entry_retries_total", "Requests retried on another endpoint."),
		mirrorsLost: counter("keelson_entry_mirrors_lost_total",
			"Mirrored copies that were not sent or got no response."),
		open: desc("keelson_entry_connections", "Open client connections.", "port"),
		shed: desc("keelson_entry_connections_shed_total",
			"Connections closed or refused because there were too many.", "port"),
		running:  desc("keelson_entry_requests_running", "Requests in progress."),
		upgraded: desc("keelson_entry_upgraded_connections", "Upgraded connections, such as WebSockets."),
	}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(out chan<- *prometheus.Desc) {
	for _, c := range []prometheus.Collector{m.requests, m.seconds, m.refusedConnections, m.retries, m.mirrorsLost} {
		c.Describe(out)
	}
	for _, d := range []*prometheus.Desc{m.open, m.shed, m.running, m.upgraded} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	for _, c := range []prometheus.Collector{m.requests, m.seconds, m.refusedConnections, m.retries, m.mirrorsLost} {
		c.Collect(out)
	}
	s := m.server
	out <- prometheus.MustNewConstMetric(m.running, prometheus.GaugeValue, float64(len(s.slots.requests)))
	out <- prometheus.MustNewConstMetric(m.upgraded, prometheus.GaugeValue, float64(len(s.slots.upgrades)))
	s.mu.Lock()
	defer s.mu.Unlock()
	for number, p := range s.ports {
		label := strconv.Itoa(int(number))
		all, _ := p.limiter.Len()
		out <- prometheus.MustNewConstMetric(m.open, prometheus.GaugeValue, float64(all), label)
		out <- prometheus.MustNewConstMetric(m.shed, prometheus.CounterValue, float64(p.limiter.Shed()), label)
	}
}

func (m *metrics) observeRequest(rule string, code int, took time.Duration) {
	m.requests.WithLabelValues(rule, strconv.Itoa(code)).Inc()
	if code != 101 {
		m.seconds.WithLabelValues(rule).Observe(took.Seconds())
	}
}

// deleteRemovedRules deletes the time series of rules that are in oldTable and not in newTable.
func (m *metrics) deleteRemovedRules(oldTable, newTable *route.Table) {
	there := map[string]bool{}
	for _, l := range newTable.Listeners {
		for _, r := range l.Rules {
			there[r.Name] = true
		}
	}
	for _, l := range oldTable.Listeners {
		for _, r := range l.Rules {
			if !there[r.Name] {
				m.requests.DeletePartialMatch(prometheus.Labels{"rule": r.Name})
				m.seconds.DeletePartialMatch(prometheus.Labels{"rule": r.Name})
				there[r.Name] = true
			}
		}
	}
}
