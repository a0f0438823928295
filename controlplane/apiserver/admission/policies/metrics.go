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
	validating, mutating checks

	mu    sync.Mutex
	names map[string]bool
}

type checks struct {
	total *prometheus.CounterVec
	took  *prometheus.HistogramVec
}

func newChecks(subsystem, what string) checks {
	labels := []string{"policy", "policy_binding", "error_type", "enforcement_action"}
	if what == "Mutation" {
		labels = labels[:3]
	}
	return checks{
		prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "apiserver_" + subsystem + "_check_total", Help: what + "s of admission policies, by policy and binding.",
		}, labels),
		prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "apiserver_" + subsystem + "_check_duration_seconds", Help: what + " latency of single expressions.",
			Buckets: []float64{0.0000005, 0.001, 0.01, 0.1, 1.0},
		}, labels),
	}
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		validating: newChecks("validating_admission_policy", "Check"),
		mutating:   newChecks("mutating_admission_policy", "Mutation"),
	}
	if reg != nil {
		reg.MustRegister(m.validating.total, m.validating.took, m.mutating.total, m.mutating.took)
	}
	return m
}

func (c checks) observe(took time.Duration, labels ...string) {
	c.total.WithLabelValues(labels...).Inc()
	c.took.WithLabelValues(labels...).Observe(took.Seconds())
}

// errorType returns the error_type label for the error of an expression.
func errorType(err error) string {
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

// keep deletes the series of all policies other than the given ones.
func (m *metrics) keep(policies ...map[string]any) {
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
			for _, c := range []checks{m.validating, m.mutating} {
				c.total.DeletePartialMatch(prometheus.Labels{"policy": name})
				c.took.DeletePartialMatch(prometheus.Labels{"policy": name})
			}
		}
	}
	m.names = names
}
