package webhooks

import (
	"bytes"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	arv1 "k8s.io/api/admissionregistration/v1"
)

// A webhook that is down does not fill the log. The first failure is logged at once. The next line,
// after a minute or when the webhook responds again, contains the number of failures. All failures
// are counted in the metrics.
func TestFailuresAreLoggedOnceInAWhile(t *testing.T) {
	var down atomic.Bool
	ca := newAuthority(t)
	fine := says(t, admissionv1.AdmissionResponse{Allowed: true})
	srv := ca.server(t, func(w http.ResponseWriter, r *http.Request) {
		if down.Load() {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		fine(w, r)
	})
	var out bytes.Buffer
	w := newWebhooks(t)
	w.cfg.Log = slog.New(slog.NewTextHandler(&out, nil))
	reg := prometheus.NewRegistry()
	w.metrics = newMetrics(reg)
	h := hookAt("a.example.com", srv.URL, ca.pem)
	h.FailurePolicy = new(arv1.Ignore)
	w.Validating().Set(validating("c", h))
	ask := func(times int) {
		for range times {
			if err := w.Validate(t.Context(), podAttempt()); err != nil {
				t.Fatal(err)
			}
		}
	}
	down.Store(true)
	ask(50)
	if lines := strings.Count(out.String(), "\n"); lines != 1 || !strings.Contains(out.String(), "failing open") {
		t.Errorf("%d lines after 50 failures:\n%s", lines, out.String())
	}
	counted, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range counted {
		if n := family.GetMetric()[0].GetCounter().GetValue(); family.GetName() ==
			"apiserver_admission_webhook_fail_open_count" && n != 50 {
			t.Errorf("%v failures are counted", n)
		}
	}
	down.Store(false)
	ask(3)
	if lines := strings.Count(out.String(), "\n"); lines != 2 ||
		!strings.Contains(out.String(), `responds again" webhook=a.example.com "failures since the last log line"=49`) {
		t.Errorf("%d lines when it answers again:\n%s", lines, out.String())
	}
}

func TestFailuresAreToldOfAgain(t *testing.T) {
	var f failureLog
	now := time.Unix(1e9, 0)
	for i, c := range []struct {
		after time.Duration
		log   bool
		since int
	}{{0, true, 0}, {time.Second, false, 0}, {failurePeriod - time.Second - 1, false, 0}, {1, true, 2},
		{failurePeriod, true, 0}} {
		now = now.Add(c.after)
		if log, since := f.countFailure(now); log != c.log || since != c.since {
			t.Errorf("%d: %v, %d", i, log, since)
		}
	}
}
