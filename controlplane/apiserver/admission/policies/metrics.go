package policies

import (
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// metrics counts evaluations, with the metric names of Kubernetes.
type metrics struct {
	validating, mutating checkMetrics

	mu    sync.Mutex
	names map[string]bool
}

type checkMetrics struct {
	total    *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

func newCheckMetrics(subsystem, what string) checkMetrics {
	labels := []string{"policy", "policy_binding", "error_type", "enforcement_action"}
	if what == "Mutation" {
		labels = labels[:3]
	}
	return checkMetrics{
		prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_" + subsystem + "_check_total",
			Help: what + "s of admission policies, by policy and binding.",
		}, labels),
		prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "apiserver_" + subsystem + "_check_duration_seconds", Help: what + " latency of single expressions.",
			Buckets: []float64{0.0000005, 0.001, 0.01, 0.1, 1.0},
		}, labels),
	}
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		validating: newCheckMetrics("validating_admission_policy", "Check"),
		mutating:   newCheckMetrics("mutating_admission_policy", "Mutation"),
	}
	if reg != nil {
		reg.MustRegister(m.validating.total, m.validating.duration, m.mutating.total, m.mutating.duration)
	}
	return m
}

func (c checkMetrics) observeCheck(duration time.Duration, labels ...string) {
	c.total.WithLabelValues(labels...).Inc()
	c.duration.WithLabelValues(labels...).Observe(duration.Seconds())
}

// errorTypeLabel returns the error_type label for the error of an expression.
func errorTypeLabel(err error) string {
	switch {
	case err == nil:
		return "no_error"
	case errors.Is(err, cel.ErrBudget):
		return "out_of_budget"
	case strings.HasPrefix(err.Error(), "compilation error: "):
		return "compile_error"
	}
	return "invalid_error"
}

// retainSeries deletes the metric series of all policies except those in the given maps, by name.
func (m *metrics) retainSeries(policies ...map[string]any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	names := map[string]bool{}
	for _, of := range policies {
		for name := range of {
			names[name] = true
		}
	}
	for name := range m.names {
		if !names[name] {
			for _, c := range []checkMetrics{m.validating, m.mutating} {
				c.total.DeletePartialMatch(prometheus.Labels{"policy": name})
				c.duration.DeletePartialMatch(prometheus.Labels{"policy": name})
			}
		}
	}
	m.names = names
}
