package webhooks

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// failurePeriod is the minimum interval between two log lines about a webhook's failures. A webhook
// that is down fails at each write.
const failurePeriod = time.Minute

// failureLog limits the log lines about the failures of one webhook.
type failureLog struct {
	mu       sync.Mutex
	loggedAt time.Time // time of the last log line
	count    int       // failures since the last log line
}

// countFailure counts a failure at currentTime. log reports whether this failure is to be logged;
// since is then the number of failures since the last log line.
func (f *failureLog) countFailure(currentTime time.Time) (log bool, since int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.loggedAt.IsZero() && currentTime.Sub(f.loggedAt) < failurePeriod {
		f.count++
		return false, 0
	}
	since, f.loggedAt, f.count = f.count, currentTime, 0
	return true, since
}

// resetFailures returns the number of failures since the last log line and sets it to 0. It is
// called after a successful call.
func (f *failureLog) resetFailures() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.count
	f.count = 0
	return n
}

// logFailure logs a failure unless another failure of the webhook was logged within failurePeriod.
// The metrics count every failure.
func (h *hook) logFailure(log *slog.Logger, subject string, err error) {
	if tell, since := h.failures.countFailure(time.Now()); tell {
		log.Warn(subject, "webhook", h.name, "err", err, "failures since the last log line", since)
	}
}

// logRecovery logs the number of failures that were not logged, after the webhook has responded
// again.
func (h *hook) logRecovery(ctx context.Context, log *slog.Logger) {
	if n := h.failures.resetFailures(); n > 0 {
		log.InfoContext(ctx, "admission webhook responds again", "webhook", h.name,
			"failures since the last log line", n)
	}
}
