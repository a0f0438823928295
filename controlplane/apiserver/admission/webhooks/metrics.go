package webhooks

import (
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Values of the metric label type.
const (
	typeMutating   = "admit"
	typeValidating = "validating"
)

// Values of the metric label error_type.
const (
	errorCalling  = "calling_webhook_error"
	errorInternal = "apiserver_internal_error"
	errorNone     = "no_error"
)

// metrics counts webhook calls, with the metric names of Kubernetes.
type metrics struct {
	duration *prometheus.HistogramVec
	total    *prometheus.CounterVec
	rejected *prometheus.CounterVec
	failOpen *prometheus.CounterVec

	mu    sync.Mutex
	names map[string]bool // of the webhooks that may have series
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "apiserver_admission_webhook_admission_duration_seconds",
			Help:    "Time that admission webhooks took, by name, type, operation and whether they rejected.",
			Buckets: []float64{0.005, 0.025, 0.1, 0.5, 1.0, 2.5, 10, 25},
		}, []string{"name", "type", "operation", "rejected"}),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_admission_webhook_request_total",
			Help: "Questions to admission webhooks by name, type, operation, code and whether they rejected.",
		}, []string{"name", "type", "operation", "code", "rejected"}),
		rejected: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_admission_webhook_rejection_count",
			Help: "Rejections by admission webhook, with their reason and code.",
		}, []string{"name", "type", "operation", "error_type", "rejection_code"}),
		failOpen: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_admission_webhook_fail_open_count",
			Help: "Failures of admission webhooks that were ignored.",
		}, []string{"name", "type"}),
	}
	if reg != nil {
		reg.MustRegister(m.duration, m.total, m.rejected, m.failOpen)
	}
	return m
}

// maxCode is the maximum response code in metrics. It limits the number of series, because webhooks
// choose the code.
const maxCode = 600

func (m *metrics) observeResponse(h *hook, kind, operation string, code int, rejected bool, duration time.Duration) {
	code = min(code, maxCode)
	r := strconv.FormatBool(rejected)
	m.duration.WithLabelValues(h.name, kind, operation, r).Observe(duration.Seconds())
	m.total.WithLabelValues(h.name, kind, operation, strconv.Itoa(code), r).Inc()
}

func (m *metrics) countRejection(h *hook, kind, operation, reason string, code int) {
	m.rejected.WithLabelValues(h.name, kind, operation, reason, strconv.Itoa(min(code, maxCode))).Inc()
}

func (m *metrics) countFailOpen(h *hook, kind string) { m.failOpen.WithLabelValues(h.name, kind).Inc() }

// retainSeries deletes the metric series of all webhooks that are not in names.
func (m *metrics) retainSeries(names map[string]bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for name := range m.names {
		if !names[name] {
			gone := prometheus.Labels{"name": name}
			m.duration.DeletePartialMatch(gone)
			m.total.DeletePartialMatch(gone)
			m.rejected.DeletePartialMatch(gone)
			m.failOpen.DeletePartialMatch(gone)
		}
	}
	m.names = names
}
