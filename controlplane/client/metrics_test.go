package client

import (
	"context"
	"errors"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
)

// failing is a backend that returns an error for every request; nil = success.
type failing struct{ err error }

// Do implements api.Backend.
func (f failing) Do(context.Context, *api.Request) (runtime.Object, error) { return nil, f.err }

// Watch implements api.Backend.
func (f failing) Watch(context.Context, *api.Request) (watch.Interface, error) { return nil, f.err }

// F133: requests in the process are counted by the method and code that they would have over HTTP,
// under the names of client-go. A code beyond HTTP's makes no series.
func TestRequestMetrics(t *testing.T) {
	m := NewRequestMetrics("10.0.0.1:6443")
	notFound := apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "a")
	odd := &apierrors.StatusError{ErrStatus: metav1.Status{Code: 60000}}
	for _, c := range []struct {
		verb api.Verb
		err  error
	}{{api.VerbGet, nil}, {api.VerbGet, notFound}, {api.VerbList, nil}, {api.VerbCreate, nil}, {api.VerbUpdate, nil},
		{api.VerbPatch, nil}, {api.VerbDelete, nil}, {api.VerbDeleteCollection, nil}, {api.VerbUpdate, odd},
		{api.VerbUpdate, errors.New("broken")}} {
		_, err := m.MeasureBackend(failing{c.err}).Do(t.Context(), &api.Request{Verb: c.verb})
		if !errors.Is(err, c.err) {
			t.Errorf("%s: %v, want %v", c.verb, err, c.err)
		}
	}
	_, _ = m.MeasureBackend(failing{}).Watch(t.Context(), &api.Request{Verb: api.VerbWatch})
	reg := prometheus.NewRegistry()
	reg.MustRegister(m)
	w := httptest.NewRecorder()
	promhttp.HandlerFor(reg, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	for _, want := range []string{
		`rest_client_requests_total{code="200",host="10.0.0.1:6443",method="GET"} 3`,
		`rest_client_requests_total{code="404",host="10.0.0.1:6443",method="GET"} 1`,
		`rest_client_requests_total{code="201",host="10.0.0.1:6443",method="POST"} 1`,
		`rest_client_requests_total{code="200",host="10.0.0.1:6443",method="PUT"} 1`,
		`rest_client_requests_total{code="<error>",host="10.0.0.1:6443",method="PUT"} 2`,
		`rest_client_requests_total{code="200",host="10.0.0.1:6443",method="PATCH"} 1`,
		`rest_client_requests_total{code="200",host="10.0.0.1:6443",method="DELETE"} 2`,
		`rest_client_request_duration_seconds_bucket{host="10.0.0.1:6443",verb="GET",le="60"} 4`,
		`rest_client_request_duration_seconds_count{host="10.0.0.1:6443",verb="PUT"} 3`,
	} {
		if !strings.Contains(w.Body.String(), "\n"+want+"\n") {
			t.Errorf("no %s in\n%s", want, w.Body)
		}
	}
	if n := strings.Count(w.Body.String(), "\nrest_client_requests_total{"); n != 7 {
		t.Errorf("%d series of requests, want 7", n)
	}
}

// BenchmarkRequestMetrics measures the cost of the metrics for one request.
func BenchmarkRequestMetrics(b *testing.B) {
	backend := NewRequestMetrics("10.0.0.1:6443").MeasureBackend(failing{})
	r := &api.Request{Verb: api.VerbGet}
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			_, _ = backend.Do(context.Background(), r)
		}
	})
}
