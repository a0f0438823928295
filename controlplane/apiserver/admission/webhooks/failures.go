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

// failures limits the log lines about the failures of one webhook.
type failures struct {
	mu     sync.Mutex
	logged time.Time // time of the last log line
	since  int       // failures since the last log line
}

// failed reports whether a failure is to be logged, and returns the number of failures since the
// last line.
func (f *failures) failed(now time.Time) (log bool, since int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.logged.IsZero() && now.Sub(f.logged) < failurePeriod {
		f.since++
		return false, 0
	}
	since, f.logged, f.since = f.since, now, 0
	return true, since
}

// answered returns the number of failures since the last log line and resets it, after a successful
// call.
func (f *failures) answered() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.since
	f.since = 0
	return n
}

// logFailure logs a failure unless another failure of the webhook was logged within failurePeriod.
// The metrics count every failure.
func (h *hook) logFailure(log *slog.Logger, what string, why error) {
	if tell, since := h.failures.failed(time.Now()); tell {
		log.Warn(what, "webhook", h.name, "err", why, "failures since the last line", since)
	}
}

// logAnswer logs the number of unlogged failures after the webhook responds again.
func (h *hook) logAnswer(ctx context.Context, log *slog.Logger) {
	if n := h.failures.answered(); n > 0 {
		log.InfoContext(ctx, "a webhook answers again", "webhook", h.name, "failures since the last line", n)
	}
}
