// Package serve is the data plane of the ingress proxy. It accepts connections, finds the rule of
// each request in the current route.Table, and forwards the request to an endpoint. The table can
// be replaced without affecting running requests. Limits bounds the resources that clients and
// backends can use.
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
	"keelson.dev/keelson/internal/wakeup"
)

// Limits bounds the resources that clients and backends can use. A zero field means the default,
// which the comment of the field gives after the semicolon.
type Limits struct {
	Connections connlimit.Limits // per port; All is an eighth of the process's file limit
	Requests    int              // concurrent requests; half of the process's file limit
	Upgrades    int              // upgraded connections, such as WebSockets; an eighth of the process's file limit
	Streams     int              // concurrent streams of an HTTP/2 connection; 128
	// burst of stream resets of an HTTP/2 connection, refilled at a tenth per second; 1000
	Resets       int
	HeaderBytes  int           // bytes of a request header; 64 KiB
	AnswerHeader int64         // bytes of a response header; 256 KiB
	Header       time.Duration // time for a TLS handshake, and for receiving a request header; 10 s
	Idle         time.Duration // idle time between requests of a connection; 75 s
	BodyIdle     time.Duration // time between parts of an HTTP/1.1 body, and until an HTTP/2 peer is pinged; 60 s
	Dial         time.Duration // time for connecting to an endpoint; 3 s
	Drain        time.Duration // time for running requests to finish when the server stops; 25 s
	Mirrored     int           // concurrent copies of mirrored requests; 256
	MirrorBytes  int64         // body size up to which requests are mirrored; 1 MiB
}

func (l Limits) withDefaults() Limits {
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

// Options configures a Server; Log is required.
type Options struct {
	Log    *slog.Logger
	Limits Limits
	// Listen opens the listener of a port; nil means to listen on all addresses.
	Listen func(port uint16) (net.Listener, error)
	// Trusted are the addresses of proxies in front of this server. X-Forwarded-* headers of their
	// requests are kept and extended. They are removed from all other requests.
	Trusted []netip.Prefix
	// Access receives one line per request; nil disables the access log.
	Access *slog.Logger
	// Linger is how long connections are still accepted after Run's context is canceled. Load
	// balancers remove this server during this time. Keep-alive is then disabled.
	Linger time.Duration
}

// Server serves the route.Table that was last passed to Swap.
type Server struct {
	opts     Options
	limits   Limits
	current  atomic.Pointer[servedTable]
	changed  wakeup.Signal
	metrics  *metrics
	buffers  bufferPool
	slots    requestSlots
	abortCtx context.Context // canceled when requests that are still running must be aborted
	abort    context.CancelFunc

	swapMu     sync.Mutex // serializes Swap
	transports transportCache

	mu    sync.Mutex
	ports map[uint16]*port
	ready bool
	// running handlers, including those of hijacked connections, and ports that are shutting down
	running sync.WaitGroup
}

// requestSlots limits concurrent requests: each request holds a slot in a channel until it ends. A
// request for which the channel is full is refused.
type requestSlots struct {
	requests chan struct{}
	upgrades chan struct{}
	mirrors  chan struct{}
}

// servedTable is the compiled form of a route.Table, with the state of its endpoints.
type servedTable struct {
	index *route.Index
	pools map[string]*pool
}

type port struct {
	number   uint16
	protocol route.Protocol
	limiter  *connlimit.Limiter
	server   *http.Server
	stopped  chan struct{}
}

// New returns a server that responds with 404 until the first Swap.
func New(o Options) *Server {
	if o.Listen == nil {
		o.Listen = func(port uint16) (net.Listener, error) { return net.Listen("tcp", fmt.Sprintf(":%d", port)) }
	}
	s := &Server{opts: o, limits: o.Limits.withDefaults(), changed: wakeup.New(), ports: map[uint16]*port{}}
	s.abortCtx, s.abort = context.WithCancel(context.Background())
	s.slots.requests = make(chan struct{}, s.limits.Requests)
	s.slots.upgrades = make(chan struct{}, s.limits.Upgrades)
	s.slots.mirrors = make(chan struct{}, s.limits.Mirrored)
	s.transports.limits = s.limits
	s.metrics = newMetrics(s)
	empty, _ := route.Compile(&route.Table{})
	s.current.Store(&servedTable{index: empty, pools: map[string]*pool{}})
	return s
}

// Collector returns the collector of the server's Prometheus metrics.
func (s *Server) Collector() prometheus.Collector { return s.metrics }

// Swap replaces the table for all requests that arrive later. It returns the errors of
// route.Compile; the parts of the table without errors are served.
func (s *Server) Swap(t *route.Table) []error {
	s.swapMu.Lock()
	defer s.swapMu.Unlock()
	index, wrong := route.Compile(t)
	before := s.current.Load()
	next := &servedTable{index: index, pools: make(map[string]*pool, len(t.Pools))}
	for key, p := range t.Pools {
		next.pools[key] = before.pools[key].updatedPool(p, s.transports.transportFor(p))
	}
	s.current.Store(next)
	s.transports.closeUnused(next.pools)
	s.metrics.deleteRemovedRules(before.index.Table(), t)
	s.changed.Send()
	return wrong
}

// Ready reports whether the server listens on every port of the table. It is false before the first
// Swap and after Run's context was canceled.
func (s *Server) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ready
}

// Run serves the ports of the current table until ctx is canceled. It then still accepts
// connections for Options.Linger. After that, it closes the listeners, waits at most Limits.Drain
// for the running requests, aborts the remaining requests, and returns the error of ctx.
func (s *Server) Run(ctx context.Context) error {
	defer s.abort()
	defer s.transports.closeUnused(nil)
	for {
		var again <-chan time.Time
		if !s.reconcilePorts() {
			again = time.After(time.Second)
		}
		select {
		case <-ctx.Done():
			s.drainPorts()
			return ctx.Err()
		case <-s.changed:
		case <-again:
		}
	}
}

// reconcilePorts opens and closes listeners so that they match the ports of the table. ok is false
// if a port could not be opened.
func (s *Server) reconcilePorts() (ok bool) {
	wanted := s.current.Load().index.Ports()
	s.mu.Lock()
	defer s.mu.Unlock()
	for number, p := range s.ports {
		if wanted[number] != p.protocol {
			delete(s.ports, number)
			p.limiter.Close()
			s.running.Go(func() { s.shutdownPort(p) })
		}
	}
	ok = true
	for number, protocol := range wanted {
		if s.ports[number] != nil {
			continue
		}
		l, err := s.opts.Listen(number)
		if err != nil {
			s.opts.Log.Error("listening on a port failed", "port", number, "err", err)
			ok = false
			continue
		}
		s.ports[number] = s.servePort(number, protocol, l)
	}
	s.ready = ok && len(wanted) > 0
	return ok
}

// servePort starts to serve a port of the table: it handles the requests on the connections that l
// accepts. It does not block.
func (s *Server) servePort(number uint16, protocol route.Protocol, l net.Listener) *port {
	p := &port{number: number, protocol: protocol, limiter: connlimit.New(l, s.limits.Connections),
		stopped: make(chan struct{})}
	p.server = &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s.handleRequest(number, w, r)
		}),
		ReadHeaderTimeout: s.limits.Header,
		IdleTimeout:       s.limits.Idle,
		MaxHeaderBytes:    s.limits.HeaderBytes,
		Protocols:         new(http.Protocols),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: s.limits.Streams, SendPingTimeout: s.limits.BodyIdle, PingTimeout: 15 * time.Second,
			WriteByteTimeout: s.limits.BodyIdle,
		},
		// Errors of clients are counted in metrics and not logged.
		ErrorLog: log.New(io.Discard, "", 0),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, connlimit.FromConn(c))
		},
	}
	p.server.Protocols.SetHTTP1(true)
	serve := func() error { return p.server.Serve(p.limiter) }
	if protocol == route.HTTPS {
		p.server.Protocols.SetHTTP2(true)
		p.server.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12,
			GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
				if c := s.current.Load().index.Certificate(number, hello.ServerName); c != nil {
					return c, nil
				}
				return nil, fmt.Errorf("no certificate for %q", hello.ServerName)
			}}
		serve = func() error { return p.server.ServeTLS(p.limiter, "", "") }
	} else {
		p.server.Protocols.SetUnencryptedHTTP2(true)
	}
	limited := limitResets(p.server, s.limits.Resets)
	go func() {
		defer close(p.stopped)
		if limited != nil {
			s.opts.Log.Error("a port is not served", "port", number, "err", limited)
			return
		}
		if err := serve(); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			s.opts.Log.Error("serving a port failed", "port", number, "err", err)
		}
	}()
	return p
}

type connKey struct{}

// shutdownPort closes the listener of port p, waits at most Limits.Drain for its requests, and
// aborts the remaining requests.
func (s *Server) shutdownPort(p *port) {
	ctx, cancel := context.WithTimeout(s.abortCtx, s.limits.Drain)
	defer cancel()
	if err := p.server.Shutdown(ctx); err != nil {
		p.server.Close()
	}
	<-p.stopped
}

func (s *Server) drainPorts() {
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
	timer := time.AfterFunc(s.limits.Drain, s.abort)
	defer timer.Stop()
	var ending sync.WaitGroup
	for _, p := range ports {
		ending.Go(func() { s.shutdownPort(p) })
	}
	ending.Wait()
	s.running.Wait()
}
