package nodegateway

import (
	"log/slog"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

const (
	complainAfter = 3                // tries of one write
	complainAgain = 10 * time.Minute // until the same error is worth another line
	maxComplaints = 64               // distinct errors remembered; more of them are not told
	maxComplaint  = 1024             // bytes of one
)

// complaints tells of writes that fail again and again: once per distinct error, and of a bounded number of them, so
// that a store that is away for an hour costs a few lines.
type complaints struct {
	log *slog.Logger

	mu   sync.Mutex
	told map[string]time.Time // by the error's words
}

// note takes one failed try of the write that key names.
func (c *complaints) note(key string, tries int, err error, now time.Time) {
	if tries < complainAfter {
		return
	}
	words := api.Clip(err.Error(), maxComplaint)
	c.mu.Lock()
	defer c.mu.Unlock()
	if at, ok := c.told[words]; ok && now.Sub(at) < complainAgain {
		return
	}
	if len(c.told) >= maxComplaints {
		for w, at := range c.told {
			if now.Sub(at) >= complainAgain {
				delete(c.told, w)
			}
		}
		if len(c.told) >= maxComplaints {
			return
		}
	}
	if c.told == nil {
		c.told = make(map[string]time.Time)
	}
	c.told[words] = now
	c.log.Warn("a write keeps failing; it is tried on", "what", api.Clip(key, maxComplaint), "tries", tries, "err", words)
}
