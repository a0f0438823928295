package audit

import (
	"sync"
	"time"
)

// sourceLimiter limits the rate of audit events for rejected requests of unauthenticated clients,
// by source address. The log is of limited size, and a flood of rejected requests must not displace
// the records of writes. Each source has a token bucket. The next event after skipped events
// contains their number.
type sourceLimiter struct {
	mu      sync.Mutex
	sources map[string]*source
}

type source struct {
	tokens    float64
	updatedAt time.Time
	skipped   int
}

const (
	sourceBurst = 100
	sourceRate  = 10 // per second
	maxSources  = 1024
)

// allowEvent reports whether an audit event is recorded for a request from the address. skipped is
// the number of events that were not recorded since the previous recorded event.
func (s *sourceLimiter) allowEvent(address string, currentTime time.Time) (ok bool, skipped int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sources == nil {
		s.sources = map[string]*source{}
	}
	one := s.sources[address]
	if one == nil {
		if len(s.sources) >= maxSources {
			s.removeIdle(currentTime)
		}
		if len(s.sources) >= maxSources {
			address = "" // sources beyond the limit share one budget
			one = s.sources[address]
		}
		if one == nil {
			one = &source{tokens: sourceBurst, updatedAt: currentTime}
			s.sources[address] = one
		}
	}
	one.tokens = min(sourceBurst, one.tokens+currentTime.Sub(one.updatedAt).Seconds()*sourceRate)
	one.updatedAt = currentTime
	if one.tokens < 1 {
		one.skipped++
		return false, 0
	}
	one.tokens--
	skipped, one.skipped = one.skipped, 0
	return true, skipped
}

// removeIdle removes the sources that have a full token bucket and no skipped events to report. The
// lock must be held.
func (s *sourceLimiter) removeIdle(currentTime time.Time) {
	for address, one := range s.sources {
		if one.skipped == 0 && one.tokens+currentTime.Sub(one.updatedAt).Seconds()*sourceRate >= sourceBurst {
			delete(s.sources, address)
		}
	}
}
