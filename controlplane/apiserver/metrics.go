package apiserver

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry"
)

// metrics counts requests under Kubernetes' names, so that its dashboards show them.
type metrics struct {
	total   *prometheus.CounterVec
	latency *prometheus.HistogramVec
	handler http.Handler
}

func newMetrics(reg *prometheus.Registry, more ...prometheus.Collector) *metrics {
	if reg == nil {
		reg = prometheus.NewRegistry()
		reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	}
	m := &metrics{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_request_total", Help: "Requests by verb, resource and HTTP code.",
		}, []string{"verb", "group", "version", "resource", "subresource", "code"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "apiserver_request_duration_seconds", Help: "Time to answer requests, watches and byte streams excepted.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"verb", "group", "version", "resource", "subresource"}),
	}
	reg.MustRegister(m.total, m.latency)
	reg.MustRegister(more...)
	m.handler = promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
	return m
}

// observe counts a request. What names nothing that is served is counted together: strangers must not make series.
func (m *metrics) observe(req *api.Request, r *http.Request, code int, took time.Duration) {
	verb, group, version, resource, sub := method(r.Method), "", "", "", ""
	if req != nil {
		verb, group, version = strings.ToUpper(string(req.Verb)), req.Kind.GVK.Group, req.Kind.GVK.Version
		resource, sub = req.Kind.Resource, req.Subresource
	}
	m.total.WithLabelValues(verb, group, version, resource, sub, strconv.Itoa(code)).Inc()
	if req == nil || req.Verb != api.VerbWatch && req.Verb != api.VerbConnect {
		m.latency.WithLabelValues(verb, group, version, resource, sub).Observe(took.Seconds())
	}
}

func method(m string) string {
	switch m {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return m
	}
	return "OTHER"
}

// undecodable shows what the registry cannot read: how many objects per resource, and the first ones by name.
type undecodable struct{ objects *registry.Registry }

// undecodableNamed bounds the series with a name in them.
const undecodableNamed = 100

var (
	undecodableCount = prometheus.NewDesc("keelson_undecodable_objects", "Stored objects that cannot be read.", []string{"group", "resource"}, nil)
	undecodableName  = prometheus.NewDesc("keelson_undecodable_object", "1 for each stored object that cannot be read, the first 100 of them.",
		[]string{"group", "resource", "namespace", "name"}, nil)
)

// Describe implements prometheus.Collector.
func (u undecodable) Describe(ch chan<- *prometheus.Desc) {
	ch <- undecodableCount
	ch <- undecodableName
}

// Collect implements prometheus.Collector.
func (u undecodable) Collect(ch chan<- prometheus.Metric) {
	count := map[*api.Kind]int{}
	for i, o := range u.objects.Unreadable() {
		count[o.Kind]++
		if i < undecodableNamed {
			ch <- prometheus.MustNewConstMetric(undecodableName, prometheus.GaugeValue, 1, o.Kind.GVK.Group, o.Kind.Resource,
				strings.ToValidUTF8(o.Namespace, "?"), strings.ToValidUTF8(o.Name, "?"))
		}
	}
	for k, n := range count {
		ch <- prometheus.MustNewConstMetric(undecodableCount, prometheus.GaugeValue, float64(n), k.GVK.Group, k.Resource)
	}
}
