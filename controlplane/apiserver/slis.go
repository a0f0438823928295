package apiserver

import (
	"context"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// pathSLIs is the path of the results of health checks, with the metric names of Kubernetes'
// component SLIs.
const pathSLIs = "/metrics/slis"

// The health endpoints, as the label "type" of the metrics of health checks names them.
const (
	healthzEndpoint = "healthz"
	livezEndpoint   = "livez"
	readyzEndpoint  = "readyz"
)

// healthMetrics counts the results of health checks by check and endpoint. Both are of a fixed set.
type healthMetrics struct {
	current *prometheus.GaugeVec   // 1 if the last run of the check succeeded
	total   *prometheus.CounterVec // also by status
	handler http.Handler
}

func newHealthMetrics(startedAt time.Time) *healthMetrics {
	m := &healthMetrics{
		current: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "kubernetes_healthcheck",
			Help: "1 if the last run of a health check succeeded, otherwise 0."}, []string{"name", "type"}),
		total: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "kubernetes_healthchecks_total",
			Help: "Number of runs of a health check, by result."}, []string{"name", "type", "status"}),
	}
	start := prometheus.NewGauge(prometheus.GaugeOpts{Name: "process_start_time_seconds",
		Help: "Start time of the server, in seconds since 1970."})
	start.Set(float64(startedAt.UnixMilli()) / 1000)
	reg := prometheus.NewRegistry()
	reg.MustRegister(m.current, m.total, start)
	m.handler = promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
	return m
}

// observeCheck records the result of a health check that a request to an endpoint has run.
func (m *healthMetrics) observeCheck(check, endpoint string, err error) {
	value, status := 1.0, "success"
	if err != nil {
		value, status = 0, "error"
	}
	m.current.WithLabelValues(check, endpoint).Set(value)
	m.total.WithLabelValues(check, endpoint, status).Inc()
}

// runCheck runs a check for a request to an endpoint, and records the result.
func (h healthChecks) runCheck(ctx context.Context, endpoint string, c healthCheck) error {
	err := c.run(ctx)
	h.server.metrics.health.observeCheck(c.name, endpoint, err)
	return err
}

// serveSLIs serves the results of health checks. A request runs all checks, so that the results are
// current even if no load balancer requests the health endpoints.
func (h healthChecks) serveSLIs(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
	defer cancel()
	checks := map[string][]healthCheck{healthzEndpoint: h.livenessChecks(), livezEndpoint: h.livenessChecks(),
		readyzEndpoint: h.readinessChecks()}
	for _, c := range h.kubernetesChecks() {
		if c.name == storeCheck {
			checks[readyzEndpoint] = append(checks[readyzEndpoint], c)
		}
	}
	for endpoint, list := range checks {
		for _, c := range list {
			_ = h.runCheck(ctx, endpoint, c) // the metrics contain the result
		}
	}
	h.server.metrics.health.handler.ServeHTTP(w, r)
}
