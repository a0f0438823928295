package audit

import (
	"sync"
	"time"
)

// strangers bounds how much of the log those can fill who have proved to be
// nobody: the file is of bounded size, and a flood of refusals must not push out
// the records of what was done. Each source has so many records at once and so
// many a second; the next one after that says how many refusals it stands for.
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
	strangerRate   = 10 // a second
	strangersKnown = 1024
)

// admit says whether a refusal of the source has a record of its own, and for how many before it the record stands as
// well.
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
			address = "" // more sources at once than can be told apart share one budget
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

// forget drops the sources that have all of their budget again and nothing left to say. The lock is held.
func (s *strangers) forget(now time.Time) {
	for address, one := range s.sources {
		if one.skipped == 0 && one.tokens+now.Sub(one.at).Seconds()*strangerRate >= strangerBurst {
			delete(s.sources, address)
		}
	}
}
