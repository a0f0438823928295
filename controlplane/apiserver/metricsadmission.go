package apiserver

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/authn"
)

// admissionMetrics measures the duration of each admission plugin and of each admission step, with
// the metrics of Kubernetes.
type admissionMetrics struct {
	plugins, steps *prometheus.HistogramVec
}

// Label values of the admission steps, and the histogram buckets.
const (
	stepMutating   = "admit"
	stepValidating = "validate"
)

var admissionBuckets = []float64{0.005, 0.025, 0.1, 0.5, 1.0, 2.5}

func newAdmissionMetrics() *admissionMetrics {
	return &admissionMetrics{
		plugins: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "apiserver_admission_controller_admission_duration_seconds", Buckets: admissionBuckets,
			Help: "Time that admission plugins took, by name, operation, step and whether they rejected.",
		}, []string{"name", "type", "operation", "rejected"}),
		steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "apiserver_admission_step_admission_duration_seconds", Buckets: admissionBuckets,
			Help: "Time that a step of admission took, by operation, step and whether it rejected.",
		}, []string{"type", "operation", "rejected"}),
	}
}

// measured replaces the plugins of phases by plugins that also measure their duration.
func (m *admissionMetrics) measured(step string, phases []admission.Phase) {
	for i := range phases {
		phases[i].Plugins = slices.Clone(phases[i].Plugins) // the original slice belongs to the caller
		for j := range phases[i].Plugins {
			p := &phases[i].Plugins[j]
			p.Admit = timed(p.Admit, newSpans(m.plugins.MustCurryWith(prometheus.Labels{"name": p.Name, "type": step})))
		}
	}
}

// step returns admit with a measurement of its duration as a whole step.
func (m *admissionMetrics) step(step string, admit func(context.Context, *admission.Attempt) error) func(context.Context, *admission.Attempt) error {
	return timed(admit, newSpans(m.steps.MustCurryWith(prometheus.Labels{"type": step})))
}

// spans caches the histograms of one plugin or step by operation and result, because plugins run
// for every write.
type spans struct {
	of    prometheus.ObserverVec
	found [4][2]atomic.Pointer[prometheus.Observer]
}

func newSpans(of prometheus.ObserverVec) *spans { return &spans{of: of} }

var operations = [4]api.Operation{api.Create, api.Update, api.Delete, api.Connect}

func (s *spans) observe(op api.Operation, rejected bool, took time.Duration) {
	for i := range operations {
		if operations[i] != op {
			continue
		}
		no, label := 0, "false"
		if rejected {
			no, label = 1, "true"
		}
		o := s.found[i][no].Load()
		if o == nil {
			made := s.of.With(prometheus.Labels{"operation": string(op), "rejected": label})
			o = &made
			s.found[i][no].Store(o)
		}
		(*o).Observe(took.Seconds())
	}
}

func timed(admit func(context.Context, *admission.Attempt) error, s *spans) func(context.Context, *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		began := time.Now()
		err := admit(ctx, a)
		s.observe(a.Operation, err != nil, time.Since(began))
		return err
	}
}

// authenticationMetrics counts authentication attempts by result and measures their duration.
type authenticationMetrics struct {
	attempts *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

func newAuthenticationMetrics() *authenticationMetrics {
	labels := []string{"result"}
	return &authenticationMetrics{
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "authentication_attempts", Help: "Requests by whether who sent them was made out.",
		}, labels),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "authentication_duration_seconds", Help: "Time to make out who sent a request.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2, 15),
		}, labels),
	}
}

// observe counts an authentication that ended with err. anonymous reports whether the request
// continues as anonymous.
func (m *authenticationMetrics) observe(err error, anonymous bool, took time.Duration) {
	result := "success"
	switch {
	case err == authn.ErrNobody && !anonymous:
		result = "failure"
	case err != nil && err != authn.ErrNobody:
		result = "error"
	}
	m.attempts.WithLabelValues(result).Inc()
	m.duration.WithLabelValues(result).Observe(took.Seconds())
}
