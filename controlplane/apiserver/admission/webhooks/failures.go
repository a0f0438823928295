package webhooks

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// failurePeriod is how often a webhook's failures are logged: one that is down fails with every write.
const failurePeriod = time.Minute

// failures are those of one webhook, as its log tells of them.
type failures struct {
	mu     sync.Mutex
	logged time.Time // the last line
	since  int       // failures of which no line has told
}

// failed says whether a failure is logged, and how many have not been since the last line.
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

// answered is how many failures no line has told of, now that there is an answer.
func (f *failures) answered() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	n := f.since
	f.since = 0
	return n
}

// logFailure tells of a failure, unless one of the same webhook was told of a moment ago. The metrics count each.
func (h *hook) logFailure(log *slog.Logger, what string, why error) {
	if tell, since := h.failures.failed(time.Now()); tell {
		log.Warn(what, "webhook", h.name, "err", why, "failures since the last line", since)
	}
}

// logAnswer tells of the failures of which nothing was said when the webhook answers again.
func (h *hook) logAnswer(ctx context.Context, log *slog.Logger) {
	if n := h.failures.answered(); n > 0 {
		log.InfoContext(ctx, "a webhook answers again", "webhook", h.name, "failures since the last line", n)
	}
}
