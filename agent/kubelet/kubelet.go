// Package kubelet serves the read-only part of kubelet's HTTPS API, for metrics-server, Prometheus,
// and the proxy subresource of Nodes. Clients authenticate with a client certificate of the cluster
// or a bearer token. The control plane authorizes them for the subresources of the Node, as it does
// for kubelet.
//
// The server is reachable for unauthenticated clients. It therefore limits connections, headers,
// time and concurrent requests. When the limit is reached, an unauthenticated connection is closed
// in favor of a new one.
package kubelet

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/promtext"
	"keelson.dev/keelson/internal/ttlcache"
)

// Limits of the node's HTTPS server.
const (
	requestTimeout    = 5 * time.Second  // for a handshake, a request's header, and a review
	responseTimeout   = 30 * time.Second // for a complete response
	idleTimeout       = 90 * time.Second // between two requests; longer than common scrape intervals
	maxHeader         = 16 << 10         // bytes; a token may have 4 KiB
	maxRequests       = 8                // concurrent requests
	maxReviews        = 4                // concurrent reviews
	decisionCacheSize = 256 << 10        // bytes of cached decisions
)

// Config is the configuration of a Server. Fields are required unless stated otherwise.
type Config struct {
	Listen      string // for example "10.0.0.7:10250" or ":10250"
	ServerTrust agent.ServerTrust
	// Resource, Cadvisor, Probes and Metrics write the responses of /metrics/resource,
	// /metrics/cadvisor, /metrics/probes and /metrics in the Prometheus text format. Summary writes
	// the response of /stats/summary as JSON.
	Resource, Cadvisor, Probes, Metrics func(context.Context, io.Writer) error
	Summary                             func(ctx context.Context, w io.Writer, cpuAndMemory bool) error
	// Configuration returns the fields of a KubeletConfiguration with the values of this agent. It
	// contains no secret. The server adds its own settings.
	Configuration func() map[string]any
	Pods          func() []*v1.Pod
	AgentLog      func() []byte // the last lines of the agent's log
	Settings      func() []byte // the agent's settings, one per line
	// Reach reports whether the node can reach a host name or an address.
	Reach func(ctx context.Context, host string) Reachability
	Log   *slog.Logger // may be nil

	connections connlimit.Limits // set by tests only
}

// Server is the HTTPS server of a node with the read-only part of the kubelet's API.
type Server struct {
	cfg          Config
	log          *slog.Logger
	decisions    *ttlcache.Cache[[32]byte, agent.AccessDecision]
	requestSlots chan struct{}
	reviewSlots  chan struct{}
}

// New returns a Server. It starts nothing.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.connections == (connlimit.Limits{}) {
		cfg.connections = connlimit.Limits{Total: 256, PerSource: 128, Unauthenticated: 64,
			UnauthenticatedPerSource: 32}
	}
	return &Server{cfg: cfg, log: cfg.Log, decisions: ttlcache.New[[32]byte, agent.AccessDecision](decisionCacheSize),
		requestSlots: make(chan struct{}, maxRequests), reviewSlots: make(chan struct{}, maxReviews)}
}

// Run serves until ctx ends. It returns an error if it cannot listen on the port.
func (s *Server) Run(ctx context.Context) error {
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", s.cfg.Listen)
	if err != nil {
		return fmt.Errorf("serving kubelet's API: %w: give another port with --kubelet-port, or 0 for none", err)
	}
	return s.Serve(ctx, ln)
}

// Serve serves like Run, on a listener that is already open. It closes the listener when it
// returns.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	front := connlimit.New(ln, s.cfg.connections)
	srv := &http.Server{
		Handler:           s,
		ReadHeaderTimeout: requestTimeout, ReadTimeout: responseTimeout, WriteTimeout: responseTimeout,
		IdleTimeout:    idleTimeout,
		MaxHeaderBytes: maxHeader,
		ErrorLog:       slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		// HTTP/1.1 only, so that each connection serves one request at a time
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, connlimit.FromConn(c))
		},
		BaseContext: func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { srv.Close() })
	defer stop()
	err := srv.Serve(tls.NewListener(front, &tls.Config{
		MinVersion: tls.VersionTLS12,
		// A certificate of another CA does not fail the handshake; the response is 401. See
		// identifyClient.
		ClientAuth: tls.RequestClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			return s.cfg.ServerTrust.ServingCertificate()
		},
	}))
	srv.Close()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("serving kubelet's API at %s: %w", ln.Addr(), err)
}

// connKey is the context key of the request's *connlimit.Conn.
type connKey struct{}

// ServeHTTP authorizes a request and serves it. It implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !s.authorizeRequest(w, r) {
		return
	}
	place, _ := r.Context().Value(connKey{}).(*connlimit.Conn)
	place.MarkAuthenticated()
	select {
	case s.requestSlots <- struct{}{}:
		defer func() { <-s.requestSlots }()
	default:
		w.Header().Set("Retry-After", "1")
		http.Error(w, "the node serves its maximum number of concurrent requests: try again",
			http.StatusTooManyRequests)
		return
	}
	s.serveRequest(w, r)
}

// agentLog is the URL path at which the last lines of the agent's log are served. It is below the
// path of the kubelet's node logs.
const agentLog = "/logs/keelson-agent.log"

// agentSettings is the URL path at which the agent's settings are served. Reading it requires the
// same permission as the log.
const agentSettings = "/logs/keelson-agent-settings.txt"

// servedPaths is the error message for an unknown URL path. It lists the served paths.
const servedPaths = "this node serves /healthz, /metrics, /metrics/resource, /metrics/cadvisor, /metrics/probes, " +
	"/stats/summary, /pods, " + configzPath + ", " + reachPath + ", " + agentLog + " and " + agentSettings + "; " +
	"logs of containers, exec, attach and port-forward go through the API server"

func (s *Server) serveRequest(w http.ResponseWriter, r *http.Request) {
	prometheus := func(write func(context.Context, io.Writer) error) {
		w.Header().Set("Content-Type", promtext.ContentType)
		s.logUnfinished(r, write(r.Context(), w))
	}
	var serve func()
	switch r.URL.Path {
	case "/healthz", "/healthz/ping":
		serve = func() { s.writeText(w, r, []byte("ok")) }
	case "/metrics/resource":
		serve = func() { prometheus(s.cfg.Resource) }
	case "/metrics/cadvisor":
		serve = func() { prometheus(s.cfg.Cadvisor) }
	case "/metrics/probes":
		serve = func() { prometheus(s.cfg.Probes) }
	case "/metrics":
		serve = func() { prometheus(s.cfg.Metrics) }
	case "/stats/summary", "/stats/summary/":
		serve = func() { s.serveSummary(w, r) }
	case "/pods", "/pods/", "/runningpods", "/runningpods/":
		serve = func() { s.servePods(w, r) }
	case agentLog:
		serve = func() { s.writeText(w, r, s.cfg.AgentLog()) }
	case configzPath:
		serve = func() { s.serveConfigz(w, r) }
	case reachPath:
		serve = func() { s.serveReach(w, r) }
	case agentSettings:
		serve = func() { s.writeText(w, r, s.cfg.Settings()) }
	default:
		http.Error(w, "404 page not found: "+servedPaths, http.StatusNotFound)
		return
	}
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "this node serves GET and HEAD requests only", http.StatusMethodNotAllowed)
		return
	}
	serve()
}

func (s *Server) writeText(w http.ResponseWriter, r *http.Request, content []byte) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, err := w.Write(content)
	s.logUnfinished(r, err)
}

// logUnfinished logs a response that could not be completed, usually because the client has
// disconnected.
func (s *Server) logUnfinished(r *http.Request, err error) {
	if err != nil {
		s.log.Debug("a response was not completed", "path", r.URL.Path, "source", r.RemoteAddr, "err", err)
	}
}

func (s *Server) serveSummary(w http.ResponseWriter, r *http.Request) {
	only := false
	if v := r.URL.Query().Get("only_cpu_and_memory"); v != "" {
		var err error
		if only, err = strconv.ParseBool(v); err != nil {
			http.Error(w, fmt.Sprintf("only_cpu_and_memory=%.20q: want true or false", v), http.StatusBadRequest)
			return
		}
	}
	w.Header().Set("Content-Type", "application/json")
	out := &trackedWriter{ResponseWriter: w}
	if err := s.cfg.Summary(r.Context(), out, only); err != nil && !out.written {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	} else {
		s.logUnfinished(r, err)
	}
}

// trackedWriter is an http.ResponseWriter that records whether anything was written.
type trackedWriter struct {
	http.ResponseWriter
	written bool
}

func (l *trackedWriter) Write(p []byte) (int, error) {
	l.written = true
	return l.ResponseWriter.Write(p)
}

// servePods writes the list of the node's pods as JSON. It encodes one pod at a time to save
// memory.
func (s *Server) servePods(w http.ResponseWriter, r *http.Request) {
	running := r.URL.Path == "/runningpods" || r.URL.Path == "/runningpods/"
	w.Header().Set("Content-Type", "application/json")
	_, err := io.WriteString(w, `{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[`)
	sep := ""
	for _, p := range s.cfg.Pods() {
		if running && p.Status.Phase != v1.PodRunning {
			continue
		}
		one, merr := json.Marshal(p)
		if err = errors.Join(err, merr); err != nil {
			break
		}
		_, err = io.WriteString(w, sep)
		if err == nil {
			_, err = w.Write(one)
		}
		sep = ","
	}
	if err == nil {
		_, err = io.WriteString(w, "]}\n")
	}
	s.logUnfinished(r, err)
}
