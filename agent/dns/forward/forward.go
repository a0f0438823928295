package forward

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"

	"keelson.dev/keelson/internal/wait"
)

// Config of a Forwarder.
type Config struct {
	Targets       []Target
	Policy        string        // random, round_robin, sequential
	MaxFails      int           // failures in a row after which a server is left out; 0 = never
	MaxConcurrent int64         // questions at once; 0 = 1000
	HealthEvery   time.Duration // between two looks at a server that is left out
	TCP           bool
	Log           *slog.Logger
}

// wholeTime is what one question may take with all servers that are tried.
const wholeTime = 5 * time.Second

// defaultConcurrent is how many questions one Forwarder has on their way at most: each takes a file and some memory.
const defaultConcurrent = 1000

// ErrBusy says that too many questions are on their way.
var ErrBusy = errors.New("too many questions are on their way to other servers")

// Forwarder asks servers. Its counters may be read at any time.
type Forwarder struct {
	cfg     Config
	servers []*server
	turn    atomic.Uint32
	busy    atomic.Int64
	life    context.Context // of looks at servers that are left out
	end     context.CancelFunc
	looks   sync.WaitGroup

	Refused atomic.Uint64 // questions that found too many on their way
}

// server is one target with what is known of its health.
type server struct {
	target Target
	fails  atomic.Int32
	looked atomic.Bool // somebody looks whether it is back

	requests, failures atomic.Uint64
}

// New starts nothing.
func New(cfg Config) *Forwarder {
	if cfg.MaxConcurrent <= 0 || cfg.MaxConcurrent > defaultConcurrent {
		cfg.MaxConcurrent = defaultConcurrent
	}
	if cfg.HealthEvery <= 0 {
		cfg.HealthEvery = 500 * time.Millisecond
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	f := &Forwarder{cfg: cfg}
	f.life, f.end = context.WithCancel(context.Background())
	for _, t := range cfg.Targets {
		f.servers = append(f.servers, &server{target: t})
	}
	return f
}

// Close ends what looks after servers and waits for it.
func (f *Forwarder) Close() {
	f.end()
	f.looks.Wait()
}

// Ask returns the first answer that any server gives. That a server does not know is an answer, that it fails is one
// only when no other does better.
func (f *Forwarder) Ask(ctx context.Context, q Question) (*dns.Msg, error) {
	if f.busy.Add(1) > f.cfg.MaxConcurrent {
		f.busy.Add(-1)
		f.Refused.Add(1)
		return nil, ErrBusy
	}
	defer f.busy.Add(-1)
	ctx, cancel := context.WithTimeout(ctx, wholeTime)
	defer cancel()
	err := errors.New("no server to forward to is configured")
	var poor *dns.Msg
	for _, s := range f.order() {
		if ctx.Err() != nil {
			break
		}
		s.requests.Add(1)
		m, tried := exchange(ctx, s.target, q, f.cfg.TCP)
		if tried != nil {
			s.failures.Add(1)
			err = fmt.Errorf("server %s: %w", s.target, tried)
			f.failed(s)
			continue
		}
		s.fails.Store(0)
		Clean(m, q)
		if m.Rcode == dns.RcodeServerFailure || m.Rcode == dns.RcodeRefused {
			poor = m
			continue
		}
		return m, nil
	}
	if poor != nil {
		return poor, nil
	}
	return nil, err
}

// order is in which order servers are tried: those that count as down come last, for all may only seem to be.
func (f *Forwarder) order() []*server {
	n := len(f.servers)
	if n == 0 {
		return nil
	}
	first := 0
	switch f.cfg.Policy {
	case "sequential":
	case "round_robin":
		first = int(f.turn.Add(1) % uint32(n))
	default:
		first = rand.IntN(n)
	}
	out, down := make([]*server, 0, n), []*server(nil)
	for i := range n {
		s := f.servers[(first+i)%n]
		if f.down(s) {
			down = append(down, s)
		} else {
			out = append(out, s)
		}
	}
	return append(out, down...)
}

func (f *Forwarder) down(s *server) bool {
	return f.cfg.MaxFails > 0 && int(s.fails.Load()) >= f.cfg.MaxFails
}

// failed counts a failure. A server that is left out from now on is looked at until it answers, whatever its answer.
func (f *Forwarder) failed(s *server) {
	s.fails.Add(1)
	if !f.down(s) || !s.looked.CompareAndSwap(false, true) {
		return
	}
	f.cfg.Log.Warn("a DNS server that questions are forwarded to does not answer", "server", s.target.String())
	f.looks.Add(1)
	go func() {
		defer f.looks.Done()
		defer s.looked.Store(false)
		for wait.Delay(f.life, f.cfg.HealthEvery) == nil {
			if _, err := exchange(f.life, s.target, Question{Name: ".", Type: dns.TypeNS}, f.cfg.TCP); err == nil {
				s.fails.Store(0)
				f.cfg.Log.Info("a DNS server that questions are forwarded to answers again", "server", s.target.String())
				return
			}
		}
	}()
}

// ServerCounts is what was asked of one server.
type ServerCounts struct {
	To                 string
	Requests, Failures uint64
	Down               bool
}

// Counts tells what was asked of each server.
func (f *Forwarder) Counts() []ServerCounts {
	out := make([]ServerCounts, 0, len(f.servers))
	for _, s := range f.servers {
		out = append(out, ServerCounts{s.target.String(), s.requests.Load(), s.failures.Load(), f.down(s)})
	}
	return out
}
