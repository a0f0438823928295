package serve

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/ingressproxy/route"
)

// metrics of a server; those by rule go with the rule.
type metrics struct {
	server     *Server
	requests   *prometheus.CounterVec
	seconds    *prometheus.HistogramVec
	refused    prometheus.Counter
	again      prometheus.Counter
	unmirrored prometheus.Counter
	open       *prometheus.Desc
	shed       *prometheus.Desc
	running    *prometheus.Desc
	upgraded   *prometheus.Desc
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
			Name: "keelson_entry_requests_total", Help: "Requests that were answered, by rule (empty: none matched) and status; 499: the client left.",
		}, []string{"rule", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "keelson_entry_request_seconds", Help: "From a request's header to the end of its answer.", Buckets: prometheus.ExponentialBuckets(0.001, 4, 8),
		}, []string{"rule"}),
		refused:    counter("keelson_entry_refused_connections_total", "Connections that endpoints did not take; such an endpoint is passed over for 0.5 to 30 s."),
		again:      counter("keelson_entry_retries_total", "Requests that were offered to another endpoint."),
		unmirrored: counter("keelson_entry_mirrors_lost_total", "Copies that were not sent, or not answered."),
		open:       desc("keelson_entry_connections", "Connections of clients.", "port"),
		shed:       desc("keelson_entry_connections_shed_total", "Connections that were closed or not taken because there were too many.", "port"),
		running:    desc("keelson_entry_requests_running", "Requests that run."),
		upgraded:   desc("keelson_entry_upgraded_connections", "Connections that became WebSockets or the like."),
	}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(out chan<- *prometheus.Desc) {
	for _, c := range []prometheus.Collector{m.requests, m.seconds, m.refused, m.again, m.unmirrored} {
		c.Describe(out)
	}
	for _, d := range []*prometheus.Desc{m.open, m.shed, m.running, m.upgraded} {
		out <- d
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	for _, c := range []prometheus.Collector{m.requests, m.seconds, m.refused, m.again, m.unmirrored} {
		c.Collect(out)
	}
	s := m.server
	out <- prometheus.MustNewConstMetric(m.running, prometheus.GaugeValue, float64(len(s.requests)))
	out <- prometheus.MustNewConstMetric(m.upgraded, prometheus.GaugeValue, float64(len(s.upgrades)))
	s.mu.Lock()
	defer s.mu.Unlock()
	for number, p := range s.ports {
		label := strconv.Itoa(int(number))
		all, _ := p.door.Len()
		out <- prometheus.MustNewConstMetric(m.open, prometheus.GaugeValue, float64(all), label)
		out <- prometheus.MustNewConstMetric(m.shed, prometheus.CounterValue, float64(p.door.Shed()), label)
	}
}

func (m *metrics) note(rule string, code int, took time.Duration) {
	m.requests.WithLabelValues(rule, strconv.Itoa(code)).Inc()
	if code != 101 {
		m.seconds.WithLabelValues(rule).Observe(took.Seconds())
	}
}

// forget drops what is known of rules that are no more.
func (m *metrics) forget(before, now *route.Table) {
	there := map[string]bool{}
	for _, l := range now.Listeners {
		for _, r := range l.Rules {
			there[r.Name] = true
		}
	}
	for _, l := range before.Listeners {
		for _, r := range l.Rules {
			if !there[r.Name] {
				m.requests.DeletePartialMatch(prometheus.Labels{"rule": r.Name})
				m.seconds.DeletePartialMatch(prometheus.Labels{"rule": r.Name})
				there[r.Name] = true
			}
		}
	}
}
