// Package serve is the data plane of the proxy in front of Services: it listens, finds the rule of each request in the
// table that it was given last, and hands the request to an endpoint. Tables are swapped while requests run; none is
// disturbed by it. Whatever a client can make large or slow has a bound here (Limits).
package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"keelson.dev/keelson/ingressproxy/route"
	"keelson.dev/keelson/internal/connlimit"
)

// Limits bound what clients and backends may take. Zero values mean the defaults.
type Limits struct {
	Connections  connlimit.Limits // of each port; All defaults to an eighth of the files that the process may open
	Requests     int              // that run at one time; half of those files
	Upgrades     int              // connections that became WebSockets or the like; an eighth of those files
	Streams      int              // requests at one time on one connection of HTTP/2; 128
	Resets       int              // streams that a connection of HTTP/2 may reset at once, and a tenth of it each second; 1000
	HeaderBytes  int              // of a request's header; 64 KiB
	AnswerHeader int64            // bytes of an answer's header; 256 KiB
	Header       time.Duration    // from the first byte, or the end of TLS, to the end of the header, and for the TLS handshake; 10 s
	Idle         time.Duration    // between the requests of a connection; 75 s
	BodyIdle     time.Duration    // between two pieces of a body in HTTP/1.1, and for a dead peer of HTTP/2; 60 s
	Dial         time.Duration    // to connect to an endpoint; 3 s
	Drain        time.Duration    // for requests that run when the server ends; 25 s
	Mirrored     int              // copies that run at one time; 256
	MirrorBytes  int64            // of a body that is mirrored; 1 MiB. A request with a larger one has no copy
}

func (l Limits) complete() Limits {
	if l.Connections.Total == 0 {
		l.Connections.Total = connlimit.OpenFilesShare(1, 8)
	}
	set := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	last := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	set(&l.Requests, connlimit.OpenFilesShare(1, 2))
	set(&l.Upgrades, connlimit.OpenFilesShare(1, 8))
	set(&l.Streams, 128)
	set(&l.Resets, 1000)
	set(&l.HeaderBytes, 64<<10)
	set(&l.Mirrored, 256)
	last(&l.Header, 10*time.Second)
	last(&l.Idle, 75*time.Second)
	last(&l.BodyIdle, 60*time.Second)
	last(&l.Dial, 3*time.Second)
	last(&l.Drain, 25*time.Second)
	if l.AnswerHeader == 0 {
		l.AnswerHeader = 256 << 10
	}
	if l.MirrorBytes == 0 {
		l.MirrorBytes = 1 << 20
	}
	return l
}

// Options of a Server; Log is required.
type Options struct {
	Log    *slog.Logger
	Limits Limits
	// Listen opens a port; nil: on all addresses.
	Listen func(port uint16) (net.Listener, error)
	// Trusted are the proxies whose X-Forwarded-For is believed and prolonged. Everyone else's is thrown away.
	Trusted []netip.Prefix
	// Access gets a line for each request; nil: nobody does.
	Access *slog.Logger
	// Linger is how long connections are still taken after Run's context has ended, while load balancers
	// learn that this server goes; those that are there are told to go elsewhere after their next request.
	Linger time.Duration
}

// Server serves the table of the last Swap.
type Server struct {
	opts     Options
	limits   Limits
	now      atomic.Pointer[state]
	changed  chan struct{}
	metrics  *metrics
	buffers  buffers
	requests chan struct{}
	upgrades chan struct{}
	mirrors  chan struct{}
	hard     context.Context // ends when what still runs is cut off
	cut      context.CancelFunc

	swap       sync.Mutex // one Swap at a time
	transports transports

	mu    sync.Mutex
	ports map[uint16]*port
	ready bool
	going sync.WaitGroup // handlers, also of hijacked connections, and ports that end
}

// state is what one table became.
type state struct {
	index *route.Index
	pools map[string]*pool
}

type port struct {
	number   uint16
	protocol route.Protocol
	door     *connlimit.Limiter
	server   *http.Server
	ended    chan struct{}
}

// New makes a server that answers 404 until the first Swap.
func New(o Options) *Server {
	if o.Listen == nil {
		o.Listen = func(port uint16) (net.Listener, error) { return net.Listen("tcp", fmt.Sprintf(":%d", port)) }
	}
	s := &Server{opts: o, limits: o.Limits.complete(), changed: make(chan struct{}, 1), ports: map[uint16]*port{}}
	s.hard, s.cut = context.WithCancel(context.Background())
	s.requests = make(chan struct{}, s.limits.Requests)
	s.upgrades = make(chan struct{}, s.limits.Upgrades)
	s.mirrors = make(chan struct{}, s.limits.Mirrored)
	s.transports.limits = s.limits
	s.metrics = newMetrics(s)
	empty, _ := route.Compile(&route.Table{})
	s.now.Store(&state{index: empty, pools: map[string]*pool{}})
	return s
}

// Collector has the server's metrics.
func (s *Server) Collector() prometheus.Collector { return s.metrics }

// Swap serves a table from the next request on. The errors are those of route.Compile; all else of the table is served.
func (s *Server) Swap(t *route.Table) []error {
	s.swap.Lock()
	defer s.swap.Unlock()
	index, wrong := route.Compile(t)
	before := s.now.Load()
	next := &state{index: index, pools: make(map[string]*pool, len(t.Pools))}
	for key, p := range t.Pools {
		next.pools[key] = before.pools[key].renewed(p, s.transports.of(p))
	}
	s.now.Store(next)
	s.transports.keep(next.pools)
	s.metrics.forget(before.index.Table(), t)
	select {
	case s.changed <- struct{}{}:
	default:
	}
	return wrong
}

// Ready says whether every port of the table is listened on, after the first Swap and before the end.
func (s *Server) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ready
}

// Run listens where the table says until ctx ends, and then until running requests have ended or Limits.Drain is over.
func (s *Server) Run(ctx context.Context) error {
	defer s.cut()
	defer s.transports.keep(nil)
	for {
		var again <-chan time.Time
		if !s.open() {
			again = time.After(time.Second)
		}
		select {
		case <-ctx.Done():
			s.drain()
			return ctx.Err()
		case <-s.changed:
		case <-again:
		}
	}
}

// open makes the ports those of the table; ok is false when one could not be opened.
func (s *Server) open() (ok bool) {
	wanted := s.now.Load().index.Ports()
	s.mu.Lock()
	defer s.mu.Unlock()
	for number, p := range s.ports {
		if wanted[number] != p.protocol {
			delete(s.ports, number)
			p.door.Close()
			s.going.Go(func() { s.end(p) })
		}
	}
	ok = true
	for number, protocol := range wanted {
		if s.ports[number] != nil {
			continue
		}
		l, err := s.opts.Listen(number)
		if err != nil {
			s.opts.Log.Error("a port cannot be listened on", "port", number, "err", err)
			ok = false
			continue
		}
		s.ports[number] = s.listen(number, protocol, l)
	}
	s.ready = ok && len(wanted) > 0
	return ok
}

// listen serves a port.
func (s *Server) listen(number uint16, protocol route.Protocol, l net.Listener) *port {
	p := &port{number: number, protocol: protocol, door: connlimit.New(l, s.limits.Connections), ended: make(chan struct{})}
	p.server = &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.serve(number, w, r) }),
		ReadHeaderTimeout: s.limits.Header,
		IdleTimeout:       s.limits.Idle,
		MaxHeaderBytes:    s.limits.HeaderBytes,
		Protocols:         new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: s.limits.Streams, SendPingTimeout: s.limits.BodyIdle, PingTimeout: 15 * time.Second, WriteByteTimeout: s.limits.BodyIdle,
		},
		// What clients do wrong is counted, and is no news to who reads the log.
		ErrorLog: log.New(io.Discard, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, doorKey{}, connlimit.FromConn(c))
		},
	}
	p.server.Protocols.SetHTTP1(true)
	serve := func() error { return p.server.Serve(p.door) }
	if protocol == route.HTTPS {
		p.server.Protocols.SetHTTP2(true)
		p.server.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if c := s.now.Load().index.Certificate(number, hello.ServerName); c != nil {
				return c, nil
			}
			return nil, fmt.Errorf("no certificate for %q", hello.ServerName)
		}}
		serve = func() error { return p.server.ServeTLS(p.door, "", "") }
	} else {
		p.server.Protocols.SetUnencryptedHTTP2(true)
	}
	limited := limitResets(p.server, s.limits.Resets)
	go func() {
		defer close(p.ended)
		if limited != nil {
			s.opts.Log.Error("a port is not served", "port", number, "err", limited)
			return
		}
		if err := serve(); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			s.opts.Log.Error("a port is not served any more", "port", number, "err", err)
		}
	}()
	return p
}

type doorKey struct{}

// end lets a port's requests finish while there is time, and cuts off the others.
func (s *Server) end(p *port) {
	ctx, cancel := context.WithTimeout(s.hard, s.limits.Drain)
	defer cancel()
	if err := p.server.Shutdown(ctx); err != nil {
		p.server.Close()
	}
	<-p.ended
}

func (s *Server) drain() {
	s.mu.Lock()
	s.ready = false
	ports := s.ports
	s.ports = map[uint16]*port{}
	s.mu.Unlock()
	for _, p := range ports {
		p.server.SetKeepAlivesEnabled(s.opts.Linger == 0)
	}
	if s.opts.Linger > 0 {
		<-time.After(s.opts.Linger)
	}
	timer := time.AfterFunc(s.limits.Drain, s.cut)
	defer timer.Stop()
	var ending sync.WaitGroup
	for _, p := range ports {
		ending.Go(func() { s.end(p) })
	}
	ending.Wait()
	s.going.Wait()
}
