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
)

// requestMetrics counts requests under the metric names and labels of Kubernetes, so that
// dashboards and alerts for Kubernetes work.
type requestMetrics struct {
	total       *prometheus.CounterVec
	latency     *prometheus.HistogramVec
	sli         *prometheus.HistogramVec
	sizes       *prometheus.HistogramVec
	longRunning *prometheus.GaugeVec
	events      *prometheus.CounterVec
	eventSizes  *prometheus.HistogramVec
	kinds       kindSeries
	handler     http.Handler
}

// Labels of a request, as in Kubernetes. component is always "apiserver".
var (
	requestLabels = []string{"verb", "group", "version", "resource", "subresource", "scope", "component"}
	dryRunLabels  = append([]string{"dry_run"}, requestLabels...)
	slow          = []float64{0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 45, 60}
)

const component = "apiserver"

// newRegistry returns a registry with the metrics of the Go runtime and of this process.
func newRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return reg
}

func newMetrics(
	reg *prometheus.Registry, kinds *api.Kinds, version string, more ...prometheus.Collector,
) *requestMetrics {
	if reg == nil {
		reg = newRegistry()
	}
	kindLabels := []string{"group", "version", "resource"}
	m := &requestMetrics{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_request_total", Help: "Requests by verb, resource and HTTP code.",
		}, append([]string{"code"}, dryRunLabels...)),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "apiserver_request_duration_seconds",
			Help:    "Time to answer requests, watches and byte streams excepted.",
			Buckets: append([]float64{0.001, 0.005, 0.025}, slow...),
		}, dryRunLabels),
		sli: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "apiserver_request_sli_duration_seconds", Buckets: slow,
			Help: "Time to answer requests, watches and byte streams excepted, as service levels are measured.",
		}, requestLabels),
		sizes: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "apiserver_response_sizes", Help: "Bytes of the answers to reads.",
			Buckets: prometheus.ExponentialBuckets(1000, 10, 7),
		}, requestLabels),
		longRunning: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "apiserver_longrunning_requests", Help: "Watches and byte streams that are under way.",
		}, requestLabels),
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_watch_events_total", Help: "Events sent to watches.",
		}, kindLabels),
		eventSizes: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "apiserver_watch_events_sizes", Help: "Bytes of the events sent to watches.",
			Buckets: prometheus.ExponentialBuckets(1024, 2, 8),
		}, kindLabels),
	}
	m.kinds = kindSeries{kinds: kinds, deleteSeries: func(l prometheus.Labels) {
		for _, v := range []interface{ DeletePartialMatch(prometheus.Labels) int }{
			m.total, m.latency, m.sli, m.sizes, m.longRunning, m.events, m.eventSizes,
		} {
			v.DeletePartialMatch(l)
		}
	}}
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "kubernetes_build_info",
		Help: "1, with the version that is served."},
		[]string{"git_version"})
	build.WithLabelValues(version).Set(1)
	reg.MustRegister(m.total, m.latency, m.sli, m.sizes, m.longRunning, m.events, m.eventSizes, build)
	reg.MustRegister(more...)
	m.handler = promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
	return m
}

// requestLabelValues returns the values of requestLabels for a request on a served resource.
func (m *requestMetrics) requestLabelValues(req *api.Request) []string {
	group, version, resource := m.kinds.kindLabels(req.Kind)
	sub := req.Subresource
	if resource == otherKinds {
		sub = ""
	}
	scope := "cluster"
	switch {
	case req.Name != "" || req.Verb == api.VerbCreate:
		scope = "resource"
	case req.Namespace != "":
		scope = "namespace"
	}
	verb := strings.ToUpper(string(req.Verb))
	switch req.Verb {
	case api.VerbCreate:
		verb = "POST"
	case api.VerbUpdate:
		verb = "PUT"
	case api.VerbPatch:
		if req.Patch.Type == applyPatch {
			verb = "APPLY"
		}
	}
	return []string{verb, group, version, resource, sub, scope, component}
}

// observeRequest counts a finished request. req is nil for requests that are not about a served
// resource. All of these have the same label values, so that unauthenticated clients cannot create
// series.
func (m *requestMetrics) observeRequest(
	req *api.Request, r *http.Request, code int, sent int64, duration time.Duration,
) {
	labels, dry := []string{methodLabel(r.Method), "", "", "", "", "", component}, ""
	long := false
	if req != nil {
		labels = m.requestLabelValues(req)
		long = req.Verb == api.VerbWatch || req.Verb == api.VerbConnect
		if len(req.Create.DryRun)+len(req.Update.DryRun)+len(req.Patch.Options.DryRun)+len(req.Delete.DryRun) > 0 {
			dry = "All"
		}
	}
	with := append([]string{dry}, labels...)
	m.total.WithLabelValues(append([]string{strconv.Itoa(code)}, with...)...).Inc()
	if long {
		return
	}
	m.latency.WithLabelValues(with...).Observe(duration.Seconds())
	m.sli.WithLabelValues(labels...).Observe(duration.Seconds())
	if labels[0] == http.MethodGet || labels[0] == "LIST" {
		m.sizes.WithLabelValues(labels...).Observe(float64(sent))
	}
}

// startLongRunning counts a watch or byte stream as long-running from now on. The caller must call
// ended when the request ends. Other requests are not counted.
func (m *requestMetrics) startLongRunning(req *api.Request) (ended func()) {
	if req.Verb != api.VerbWatch && req.Verb != api.VerbConnect {
		return func() {}
	}
	labels := m.requestLabelValues(req)
	m.longRunning.WithLabelValues(labels...).Inc()
	return func() {
		if m.kinds.isServed(req.Kind) || labels[3] == otherKinds { // the series of a removed kind are not created again
			m.longRunning.WithLabelValues(labels...).Dec()
		}
	}
}

// eventCounter returns a function that counts an event sent by a watch of kind k and its size.
func (m *requestMetrics) eventCounter(k *api.Kind) func(bytes int) {
	group, version, resource := m.kinds.kindLabels(k)
	events, sizes := m.events.WithLabelValues(group, version, resource),
		m.eventSizes.WithLabelValues(group, version, resource)
	return func(bytes int) {
		events.Inc()
		sizes.Observe(float64(bytes))
	}
}

func methodLabel(m string) string {
	switch m {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
		http.MethodOptions:
		return m
	}
	return "OTHER"
}
