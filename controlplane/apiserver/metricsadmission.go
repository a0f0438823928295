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

// admissionMetrics measures the duration of each admission plugin and of each admission step
// (mutating, validating), with the metric names of Kubernetes.
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

// measurePlugins replaces the plugins of phases by plugins that also measure their duration.
func (m *admissionMetrics) measurePlugins(step string, phases []admission.Phase) {
	for i := range phases {
		phases[i].Plugins = slices.Clone(phases[i].Plugins) // the original slice belongs to the caller
		for j := range phases[i].Plugins {
			p := &phases[i].Plugins[j]
			p.Admit = measurePlugin(p.Admit,
				newDurationObservers(m.plugins.MustCurryWith(prometheus.Labels{"name": p.Name, "type": step})))
		}
	}
}

// measureStep returns a function that calls admit and measures its duration as the duration of a
// whole admission step.
func (m *admissionMetrics) measureStep(
	step string, admit func(context.Context, *admission.Attempt) error,
) func(context.Context, *admission.Attempt) error {
	return measurePlugin(admit, newDurationObservers(m.steps.MustCurryWith(prometheus.Labels{"type": step})))
}

// durationObservers caches the histograms of one plugin or step by operation and result, because
// plugins run for every write.
type durationObservers struct {
	vec    prometheus.ObserverVec
	cached [4][2]atomic.Pointer[prometheus.Observer]
}

func newDurationObservers(vec prometheus.ObserverVec) *durationObservers {
	return &durationObservers{vec: vec}
}

var operations = [4]api.Operation{api.Create, api.Update, api.Delete, api.Connect}

func (s *durationObservers) observeDuration(op api.Operation, rejected bool, duration time.Duration) {
	for i := range operations {
		if operations[i] != op {
			continue
		}
		no, label := 0, "false"
		if rejected {
			no, label = 1, "true"
		}
		o := s.cached[i][no].Load()
		if o == nil {
			made := s.vec.With(prometheus.Labels{"operation": string(op), "rejected": label})
			o = &made
			s.cached[i][no].Store(o)
		}
		(*o).Observe(duration.Seconds())
	}
}

func measurePlugin(
	admit func(context.Context, *admission.Attempt) error, s *durationObservers,
) func(context.Context, *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		began := time.Now()
		err := admit(ctx, a)
		s.observeDuration(a.Operation, err != nil, time.Since(began))
		return err
	}
}

// authenticationMetrics counts authentication attempts by result and measures their duration.
type authenticationMetrics struct {
	attempts *prometheus.CounterVec
	duration *prometheus.HistogramVec
	// expiration is the remaining lifetime of client certificates that authenticated a request
	expiration prometheus.Histogram
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
		expiration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "apiserver_client_certificate_expiration_seconds",
			Help: "Remaining lifetime in seconds of the client certificates that authenticated requests.",
			Buckets: []float64{0, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 345600, 604800, 2592000, 7776000,
				15552000, 31104000},
		}),
	}
}

// observeAttempt counts an authentication that ended with err. anonymous reports whether the
// request continues as anonymous.
func (m *authenticationMetrics) observeAttempt(err error, anonymous bool, duration time.Duration) {
	result := "success"
	switch {
	case err == authn.ErrNoCredentials && !anonymous:
		result = "failure"
	case err != nil && err != authn.ErrNoCredentials:
		result = "error"
	}
	m.attempts.WithLabelValues(result).Inc()
	m.duration.WithLabelValues(result).Observe(duration.Seconds())
}
