// Package fake implements the interfaces of package agent in memory: a Runtime with simulated
// containers, Images, a Network, Volumes, Devices, and the objects and reports of a session. A
// process can simulate a thousand nodes with it, and tests of pod workers need no root.
//
// Clock provides the time, so that delays can be virtual. Every call can be made to fail, and is
// recorded in a journal.
package fake

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Clock is the clock of a fake node. The zero value is the real clock.
type Clock struct {
	Now   func() time.Time                                 // nil: time.Now
	Sleep func(ctx context.Context, d time.Duration) error // nil: a timer
}

func (c Clock) nowOrReal() time.Time {
	if c.Now == nil {
		return time.Now()
	}
	return c.Now()
}

func (c Clock) sleepFor(ctx context.Context, d time.Duration) error {
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

// Script delays calls of the fakes or makes them fail, and records them in a journal. A verb is the
// name of a method: "RunPodSandbox", "PullImage", "MountAll". It is safe for concurrent use. The
// zero value neither delays calls nor makes them fail.
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

// Fail sets the results of the next calls of verb, one call per error. A nil error lets a call
// succeed.
func (s *Script) Fail(verb string, errs ...error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fails == nil {
		s.fails = map[string][]error{}
	}
	s.fails[verb] = append(s.fails[verb], errs...)
}

// FailAlways makes every call of verb fail until FailAlways is called with nil.
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

// Journal returns the newest 4,096 recorded calls, each as "VERB detail".
func (s *Script) Journal() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.journal...)
}

// Count returns the number of lines of the journal that start with prefix.
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

func (s *Script) enterVerb(ctx context.Context, c Clock, verb, detail string) error {
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
	if serr := c.sleepFor(ctx, d); serr != nil {
		return serr
	}
	return err
}

// pauseVerb waits for the delay of a verb and adds no line to the journal. A method that waits
// after it has computed its result returns a result that is as old as the delay.
func (s *Script) pauseVerb(ctx context.Context, c Clock, verb string) error {
	s.mu.Lock()
	d := s.delays[verb]
	s.mu.Unlock()
	return c.sleepFor(ctx, d)
}
