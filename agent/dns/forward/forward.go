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

// Config is the configuration of a Forwarder.
type Config struct {
	Targets       []Target
	Policy        string        // random, round_robin or sequential
	MaxFails      int           // consecutive failures after which a server is considered down; 0 = never
	MaxConcurrent int64         // concurrent queries; 0 = 1000
	HealthEvery   time.Duration // interval of the probes of a server that is down
	TCP           bool
	Log           *slog.Logger
}

// askTimeout is the timeout for answering one question, including attempts at several servers.
const askTimeout = 5 * time.Second

// defaultConcurrent is the default and maximum of Config.MaxConcurrent. Each query requires a file
// descriptor and memory.
const defaultConcurrent = 1000

// ErrBusy is returned if too many queries are in progress.
var ErrBusy = errors.New("too many queries to other servers are in progress")

// Forwarder queries upstream servers. Its counters may be read at any time.
type Forwarder struct {
	cfg        Config
	servers    []*server
	rotation   atomic.Uint32
	busy       atomic.Int64
	probeCtx   context.Context // context of the probes
	stopProbes context.CancelFunc
	probes     sync.WaitGroup

	Refused atomic.Uint64 // questions rejected with ErrBusy
}

// server is an upstream server and its health.
type server struct {
	target  Target
	fails   atomic.Int32
	probing atomic.Bool // a probe is running

	requests, failures atomic.Uint64
}

// New returns a Forwarder. It starts nothing.
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
	f.probeCtx, f.stopProbes = context.WithCancel(context.Background())
	for _, t := range cfg.Targets {
		f.servers = append(f.servers, &server{target: t})
	}
	return f
}

// Close stops the health probes of servers and waits until they have ended.
func (f *Forwarder) Close() {
	f.stopProbes()
	f.probes.Wait()
}

// Ask asks the upstream servers a question and returns the first usable answer. NXDOMAIN is usable.
// SERVFAIL and REFUSED are returned only if no server has a better answer. It returns ErrBusy if
// too many questions are in progress.
func (f *Forwarder) Ask(ctx context.Context, q Question) (*dns.Msg, error) {
	if f.busy.Add(1) > f.cfg.MaxConcurrent {
		f.busy.Add(-1)
		f.Refused.Add(1)
		return nil, ErrBusy
	}
	defer f.busy.Add(-1)
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err := errors.New("no server to forward to is configured")
	var poor *dns.Msg
	for _, s := range f.serverOrder() {
		if ctx.Err() != nil {
			break
		}
		s.requests.Add(1)
		m, tried := exchangeOnce(ctx, s.target, q, f.cfg.TCP)
		if tried != nil {
			s.failures.Add(1)
			err = fmt.Errorf("server %s: %w", s.target, tried)
			f.countFailure(s)
			continue
		}
		s.fails.Store(0)
		RemoveUnrelated(m, q)
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

// serverOrder returns the servers in the order in which to try them. Servers that are down come
// last. They are not omitted, because all servers may be down.
func (f *Forwarder) serverOrder() []*server {
	n := len(f.servers)
	if n == 0 {
		return nil
	}
	first := 0
	switch f.cfg.Policy {
	case "sequential":
	case "round_robin":
		first = int(f.rotation.Add(1) % uint32(n))
	default:
		first = rand.IntN(n)
	}
	out, down := make([]*server, 0, n), []*server(nil)
	for i := range n {
		s := f.servers[(first+i)%n]
		if f.isDown(s) {
			down = append(down, s)
		} else {
			out = append(out, s)
		}
	}
	return append(out, down...)
}

func (f *Forwarder) isDown(s *server) bool {
	return f.cfg.MaxFails > 0 && int(s.fails.Load()) >= f.cfg.MaxFails
}

// countFailure counts a failed query to a server. If the server is then considered down, it is
// probed until it responds in any way.
func (f *Forwarder) countFailure(s *server) {
	s.fails.Add(1)
	if !f.isDown(s) || !s.probing.CompareAndSwap(false, true) {
		return
	}
	f.cfg.Log.Warn("an upstream DNS server does not respond", "server", s.target.String())
	f.probes.Add(1)
	go func() {
		defer f.probes.Done()
		defer s.probing.Store(false)
		for wait.Delay(f.probeCtx, f.cfg.HealthEvery) == nil {
			if _, err := exchangeOnce(f.probeCtx, s.target, Question{Name: ".", Type: dns.TypeNS}, f.cfg.TCP); err ==
				nil {
				s.fails.Store(0)
				f.cfg.Log.Info("an upstream DNS server responds again", "server", s.target.String())
				return
			}
		}
	}()
}

// ServerCounts are the counters of one upstream server.
type ServerCounts struct {
	To                 string
	Requests, Failures uint64
	Down               bool
}

// Counts returns the counters of each server.
func (f *Forwarder) Counts() []ServerCounts {
	out := make([]ServerCounts, 0, len(f.servers))
	for _, s := range f.servers {
		out = append(out, ServerCounts{s.target.String(), s.requests.Load(), s.failures.Load(), f.isDown(s)})
	}
	return out
}
