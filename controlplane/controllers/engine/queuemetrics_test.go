package engine

import (
	"context"
	"errors"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"keelson.dev/keelson/internal/virtual"
)

// The queues' metrics have Kubernetes' names: waiting keys, keys in progress and their times,
// retries. An ended leadership leaves no waiting keys.
func TestQueueMetrics(t *testing.T) {
	m := NewQueueMetrics()
	var let chan struct{} // created in the bubble
	fail := true
	c := &Descriptor{Name: "endpointslice-controller", Lead: func(*Term) Reconcile {
		return func(ctx context.Context, _ Key) (time.Duration, error) {
			select {
			case <-let:
			case <-ctx.Done():
			}
			if fail {
				fail = false
				return 0, errors.New("no")
			}
			return 0, nil
		}
	}}
	reg := prometheus.NewRegistry()
	reg.MustRegister(m)
	shows := func(depth, seconds, adds, retries string) {
		t.Helper()
		w := httptest.NewRecorder()
		promhttp.HandlerFor(reg, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
		for name, value := range map[string]string{
			"workqueue_depth": depth, "workqueue_unfinished_work_seconds": seconds, "workqueue_adds_total": adds,
			"workqueue_longest_running_processor_seconds": seconds, "workqueue_retries_total": retries,
			"workqueue_queue_duration_seconds_count": "", "workqueue_work_duration_seconds_count": "",
		} {
			if want := "\n" + name + `{name="endpoint_slice"} ` + value; !strings.Contains(w.Body.String(), want) {
				t.Errorf("no %s in %s", want, w.Body)
			}
		}
	}
	run(t, Options{Metrics: m}, c, func(b *bench) {
		let = make(chan struct{})
		b.source.Add(object("a", "1"))
		b.source.Add(object("b", "1"))
		virtual.Wait()
		time.Sleep(3 * time.Second)
		shows("1", "3", "2", "0")
		let <- struct{}{} // the first fails
		virtual.Wait()
		time.Sleep(time.Second)
		shows("1", "1", "3", "1")
		b.stop()
		virtual.Wait()
		shows("0", "0", "3", "1")
		b.stop = func() {}
	})
}
