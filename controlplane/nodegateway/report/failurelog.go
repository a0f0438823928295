package report

import (
	"log/slog"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

const (
	logAfterTries     = 3                // number of failed attempts of a write before it is logged
	logAgainAfter     = 10 * time.Minute // pause before the same error is logged again
	maxLoggedFailures = 64               // number of remembered errors; further ones are not logged
	maxLoggedBytes    = 1024             // maximum length of a logged error in bytes
)

// failureLog logs writes that fail repeatedly, once for each different error. The number of log
// lines is limited: an hour without the store results in a few lines.
type failureLog struct {
	log *slog.Logger

	mu     sync.Mutex
	logged map[string]time.Time // time of the last log line, by error text
}

// recordFailure records a failed attempt of the write with a key. tries is the number of its
// attempts so far.
func (c *failureLog) recordFailure(key string, tries int, err error, now time.Time) {
	if tries < logAfterTries {
		return
	}
	words := api.Truncate(err.Error(), maxLoggedBytes)
	c.mu.Lock()
	defer c.mu.Unlock()
	if at, ok := c.logged[words]; ok && now.Sub(at) < logAgainAfter {
		return
	}
	if len(c.logged) >= maxLoggedFailures {
		for w, at := range c.logged {
			if now.Sub(at) >= logAgainAfter {
				delete(c.logged, w)
			}
		}
		if len(c.logged) >= maxLoggedFailures {
			return
		}
	}
	if c.logged == nil {
		c.logged = make(map[string]time.Time)
	}
	c.logged[words] = now
	c.log.Warn("a write keeps failing and is retried", "what", api.Truncate(key, maxLoggedBytes), "tries", tries, "err",
		words)
}
