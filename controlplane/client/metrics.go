package client

import (
	"context"
	"errors"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
)

// RequestMetrics counts the API requests that components of this process make without HTTP. Names,
// labels and buckets are those of client-go in the components of Kubernetes. It is safe for
// concurrent use.
type RequestMetrics struct {
	host     string
	total    *prometheus.CounterVec
	duration *prometheus.HistogramVec

	durations [numMethods]prometheus.Observer
	// counters of total by method and code, created when they are first used; 0 is noCode
	counters [numMethods][maxCode + 1]atomic.Pointer[prometheus.Counter]
}

// requestMethod is the HTTP method that a request of an in-process component would have.
type requestMethod uint8

const (
	methodGet requestMethod = iota
	methodPost
	methodPut
	methodPatch
	methodDelete
	numMethods
)

// String returns the name of the method.
func (m requestMethod) String() string {
	return [numMethods]string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete}[m]
}

// maxCode is the highest code with a series of its own. noCode is the label value of requests that
// ended without an API status, as in client-go.
const (
	maxCode = 599
	noCode  = "<error>"
)

// NewRequestMetrics returns metrics that the caller must register. host is the address of the API
// server that performs the requests.
func NewRequestMetrics(host string) *RequestMetrics {
	m := &RequestMetrics{
		host: host,
		total: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "rest_client_requests_total",
			Help: "Number of API requests of the components of this process, which make them without HTTP."},
			[]string{"code", "method", "host"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "rest_client_request_duration_seconds",
			Help:    "Time in seconds of the API requests of the components of this process.",
			Buckets: []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60}}, []string{"verb", "host"}),
	}
	for method := range numMethods {
		m.durations[method] = m.duration.WithLabelValues(method.String(), host)
	}
	return m
}

// Describe implements prometheus.Collector.
func (m *RequestMetrics) Describe(ch chan<- *prometheus.Desc) {
	m.total.Describe(ch)
	m.duration.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *RequestMetrics) Collect(ch chan<- prometheus.Metric) {
	m.total.Collect(ch)
	m.duration.Collect(ch)
}

// MeasureBackend returns a backend that passes all requests to b and counts them.
func (m *RequestMetrics) MeasureBackend(b api.Backend) api.Backend { return measuredBackend{b, m} }

type measuredBackend struct {
	backend api.Backend
	metrics *RequestMetrics
}

// Do implements api.Backend.
func (b measuredBackend) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	started := time.Now()
	out, err := b.backend.Do(ctx, r)
	b.metrics.observeRequest(r.Verb, err, time.Since(started))
	return out, err
}

// Watch implements api.Backend. The duration is that of starting the watch.
func (b measuredBackend) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	started := time.Now()
	w, err := b.backend.Watch(ctx, r)
	b.metrics.observeRequest(r.Verb, err, time.Since(started))
	return w, err
}

func (m *RequestMetrics) observeRequest(verb api.Verb, err error, d time.Duration) {
	method, code := methodAndCode(verb, err)
	m.durations[method].Observe(d.Seconds())
	counter := m.counters[method][code].Load()
	if counter == nil {
		label := noCode
		if code != 0 {
			label = strconv.Itoa(code)
		}
		made := m.total.WithLabelValues(label, method.String(), m.host)
		counter = &made
		m.counters[method][code].Store(counter)
	}
	(*counter).Inc()
}

// methodAndCode returns the method and the status code that a request with the given result would
// have over HTTP. The code is 0 if there is no status, or a status with a code beyond HTTP's.
func methodAndCode(verb api.Verb, err error) (method requestMethod, code int) {
	code = http.StatusOK
	switch verb {
	case api.VerbCreate:
		method, code = methodPost, http.StatusCreated
	case api.VerbUpdate:
		method = methodPut
	case api.VerbPatch:
		method = methodPatch
	case api.VerbDelete, api.VerbDeleteCollection:
		method = methodDelete
	}
	if err == nil {
		return method, code
	}
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return method, 0
	}
	if code = int(status.Status().Code); code < http.StatusContinue || code > maxCode {
		return method, 0
	}
	return method, code
}
