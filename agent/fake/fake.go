// Package fake is the agent's vocabulary in memory: a Runtime whose containers
// "run" until told to exit, Images, a Network, Volumes, and the view and reports
// of a session. One process can be a thousand nodes with it, and pod workers are
// tested without root.
//
// Time passes through Clock, so that delays can be virtual. Every call can be made
// to fail and is written to a journal.
package fake

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Clock is the time of a fake node. The zero value is real time.
type Clock struct {
	Now   func() time.Time                                 // nil: time.Now
	Sleep func(ctx context.Context, d time.Duration) error // nil: a timer
}

func (c Clock) now() time.Time {
	if c.Now == nil {
		return time.Now()
	}
	return c.Now()
}

func (c Clock) sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	if c.Sleep != nil {
		return c.Sleep(ctx, d)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// Script makes verbs slow or fail, and keeps the journal. Verbs are named like
// the methods: "RunPodSandbox", "PullImage", "MountAll". Safe for concurrent use; the zero value
// is quick and never fails.
type Script struct {
	mu      sync.Mutex
	delays  map[string]time.Duration
	fails   map[string][]error
	always  map[string]error
	journal []string
	limit   int
}

// Delay makes every call of verb take d.
func (s *Script) Delay(verb string, d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.delays == nil {
		s.delays = map[string]time.Duration{}
	}
	s.delays[verb] = d
}

// Fail makes the next calls of verb fail, one for each error. A nil error lets one call pass.
func (s *Script) Fail(verb string, errs ...error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fails == nil {
		s.fails = map[string][]error{}
	}
	s.fails[verb] = append(s.fails[verb], errs...)
}

// FailAlways makes every call of verb fail until it is called with nil.
func (s *Script) FailAlways(verb string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.always == nil {
		s.always = map[string]error{}
	}
	if err == nil {
		delete(s.always, verb)
		return
	}
	s.always[verb] = err
}

// Journal returns the calls so far, "VERB detail" each, the newest 4,096 of them.
func (s *Script) Journal() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.journal...)
}

// Count returns how many journal lines begin with prefix.
func (s *Script) Count(prefix string) int {
	n := 0
	for _, l := range s.Journal() {
		if strings.HasPrefix(l, prefix) {
			n++
		}
	}
	return n
}

const journalLimit = 4096

func (s *Script) enter(ctx context.Context, c Clock, verb, detail string) error {
	s.mu.Lock()
	if len(s.journal) >= journalLimit {
		s.journal = append(s.journal[:0], s.journal[journalLimit/2:]...)
	}
	s.journal = append(s.journal, strings.TrimSpace(fmt.Sprintf("%s %s", verb, detail)))
	d := s.delays[verb]
	err := s.always[verb]
	if q := s.fails[verb]; len(q) > 0 {
		err, s.fails[verb] = q[0], q[1:]
	}
	s.mu.Unlock()
	if serr := c.sleep(ctx, d); serr != nil {
		return serr
	}
	return err
}

// pause delays a verb that is not worth a line in the journal: what is returned is then as old as the delay.
func (s *Script) pause(ctx context.Context, c Clock, verb string) error {
	s.mu.Lock()
	d := s.delays[verb]
	s.mu.Unlock()
	return c.sleep(ctx, d)
}
