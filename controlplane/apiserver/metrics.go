package apiserver

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
)

// requestMetrics counts requests under the metric names and labels of Kubernetes, so that
// dashboards and alerts for Kubernetes work.
type requestMetrics struct {
	total       *prometheus.CounterVec
	latency     *prometheus.HistogramVec
	sli         *prometheus.HistogramVec
	sizes       *prometheus.HistogramVec
	longRunning *prometheus.GaugeVec
	terminated  *prometheus.CounterVec
	watches     watchMetrics
	kinds       kindSeries
	handler     http.Handler
}

// watchMetrics are the events and the initial events of watches.
type watchMetrics struct {
	events  *prometheus.CounterVec
	sizes   *prometheus.HistogramVec
	initial *prometheus.HistogramVec
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
	reg *prometheus.Registry, kinds *api.Kinds, v version.Info, more ...prometheus.Collector,
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
		terminated: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_request_terminations_total",
			Help: "Requests that the server ended to protect itself: at a limit (429) or after their timeout.",
		}, append(slices.Clone(requestLabels), "code")),
		watches: watchMetrics{
			events: prometheus.NewCounterVec(prometheus.CounterOpts{
				Name: "apiserver_watch_events_total", Help: "Events sent to watches.",
			}, kindLabels),
			sizes: prometheus.NewHistogramVec(prometheus.HistogramOpts{
				Name: "apiserver_watch_events_sizes", Help: "Bytes of the events sent to watches.",
				Buckets: prometheus.ExponentialBuckets(1024, 2, 8),
			}, kindLabels),
			initial: prometheus.NewHistogramVec(prometheus.HistogramOpts{
				Name:    "apiserver_watch_list_duration_seconds",
				Help:    "Time from the start of a watch with initial events until all of them were sent.",
				Buckets: append(slices.Clone(slow), 90, 120, 180, 300),
			}, append(kindLabels, "scope")),
		},
	}
	m.kinds = kindSeries{kinds: kinds, deleteSeries: func(l prometheus.Labels) {
		for _, v := range []interface{ DeletePartialMatch(prometheus.Labels) int }{
			m.total, m.latency, m.sli, m.sizes, m.longRunning, m.terminated, m.watches.events, m.watches.sizes,
			m.watches.initial,
		} {
			v.DeletePartialMatch(l)
		}
	}}
	build := prometheus.NewGauge(prometheus.GaugeOpts{Name: "kubernetes_build_info",
		Help: "1, with the version that is served.", ConstLabels: prometheus.Labels{
			"major": v.Major, "minor": v.Minor, "git_version": v.GitVersion, "git_commit": v.GitCommit,
			"git_tree_state": v.GitTreeState, "build_date": v.BuildDate, "go_version": v.GoVersion,
			"compiler": v.Compiler, "platform": v.Platform,
		}})
	build.Set(1)
	reg.MustRegister(m.total, m.latency, m.sli, m.sizes, m.longRunning, m.terminated, m.watches.events,
		m.watches.sizes, m.watches.initial, build)
	reg.MustRegister(more...)
	m.handler = promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
	return m
}

// requestLabelValues returns the values of requestLabels for a request on a served resource.
func (m *requestMetrics) requestLabelValues(req *api.Request) []string {
	group, served, resource := m.kinds.kindLabels(req.Kind)
	sub := req.Subresource
	if resource == otherKinds {
		sub = ""
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
	return []string{verb, group, served, resource, sub, requestScope(req), component}
}

// requestScope returns the label value for the set of objects that a request is about.
func requestScope(req *api.Request) string {
	switch {
	case req.Name != "" || req.Verb == api.VerbCreate:
		return "resource"
	case req.Namespace != "":
		return "namespace"
	}
	return "cluster"
}

// observeRequest counts a finished request. req is nil for requests that are not about a served
// resource. All of these have the same label values, so that unauthenticated clients cannot create
// series.
func (m *requestMetrics) observeRequest(
	req *api.Request, r *http.Request, response *statusWriter, duration time.Duration,
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
	with, code := append([]string{dry}, labels...), strconv.Itoa(response.code)
	m.total.WithLabelValues(append([]string{code}, with...)...).Inc()
	if response.terminated {
		m.terminated.WithLabelValues(append(slices.Clone(labels), code)...).Inc()
	}
	if long {
		return
	}
	m.latency.WithLabelValues(with...).Observe(duration.Seconds())
	m.sli.WithLabelValues(labels...).Observe(duration.Seconds())
	if labels[0] == http.MethodGet || labels[0] == "LIST" {
		m.sizes.WithLabelValues(labels...).Observe(float64(response.sent))
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

// watchObserver implements endpoints.WatchMetrics for one watch.
type watchObserver struct {
	events  prometheus.Counter
	sizes   prometheus.Observer
	initial func() prometheus.Observer
}

// newWatchObserver returns the metrics of the watch that the request starts.
func (m *requestMetrics) newWatchObserver(req *api.Request) endpoints.WatchMetrics {
	group, served, resource := m.kinds.kindLabels(req.Kind)
	return watchObserver{events: m.watches.events.WithLabelValues(group, served, resource),
		sizes: m.watches.sizes.WithLabelValues(group, served, resource),
		initial: func() prometheus.Observer { // few watches have initial events
			return m.watches.initial.WithLabelValues(group, served, resource, requestScope(req))
		}}
}

// ObserveEvent implements endpoints.WatchMetrics.
func (o watchObserver) ObserveEvent(bytes int) {
	o.events.Inc()
	o.sizes.Observe(float64(bytes))
}

// ObserveInitialEvents implements endpoints.WatchMetrics.
func (o watchObserver) ObserveInitialEvents(d time.Duration) { o.initial().Observe(d.Seconds()) }

func methodLabel(m string) string {
	switch m {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete,
		http.MethodOptions:
		return m
	}
	return "OTHER"
}
