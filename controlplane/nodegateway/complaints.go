package nodegateway

import (
	"log/slog"
	"sync"
	"time"

	"keelson.dev/keelson/controlplane/api"
)

const (
	complainAfter = 3                // failed attempts of one write before it is logged
	complainAgain = 10 * time.Minute // interval before the same error is logged again
	maxComplaints = 64               // distinct errors remembered; further ones are not logged
	maxComplaint  = 1024             // bytes of one logged error
)

// complaints logs writes that fail repeatedly, once per distinct error and bounded in number. An
// outage of the store of an hour results in a few lines.
type complaints struct {
	log *slog.Logger

	mu   sync.Mutex
	told map[string]time.Time // time of the last log line, by error text
}

// note records a failed attempt of the write with the given key; tries is the number of attempts.
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
