package audit

import (
	"sync"
	"time"
)

// strangers limits the number of audit events of unauthenticated clients by source address. The log
// is of limited size, and a flood of rejected requests must not displace the records of changes.
// Each source has a token bucket. The next event after skipped ones contains their number.
type strangers struct {
	mu      sync.Mutex
	sources map[string]*source
}

type source struct {
	tokens  float64
	at      time.Time
	skipped int
}

const (
	strangerBurst  = 100
	strangerRate   = 10 // per second
	strangersKnown = 1024
)

// admit reports whether a rejected request from the address gets an event, and how many earlier
// requests without an event it also represents.
func (s *strangers) admit(address string, now time.Time) (ok bool, skipped int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sources == nil {
		s.sources = map[string]*source{}
	}
	one := s.sources[address]
	if one == nil {
		if len(s.sources) >= strangersKnown {
			s.forget(now)
		}
		if len(s.sources) >= strangersKnown {
			address = "" // sources beyond the limit share one budget
			one = s.sources[address]
		}
		if one == nil {
			one = &source{tokens: strangerBurst, at: now}
			s.sources[address] = one
		}
	}
	one.tokens = min(strangerBurst, one.tokens+now.Sub(one.at).Seconds()*strangerRate)
	one.at = now
	if one.tokens < 1 {
		one.skipped++
		return false, 0
	}
	one.tokens--
	skipped, one.skipped = one.skipped, 0
	return true, skipped
}

// forget removes the sources with a full budget and without skipped events to report. The lock must
// be held.
func (s *strangers) forget(now time.Time) {
	for address, one := range s.sources {
		if one.skipped == 0 && one.tokens+now.Sub(one.at).Seconds()*strangerRate >= strangerBurst {
			delete(s.sources, address)
		}
	}
}
