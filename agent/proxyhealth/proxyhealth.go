// Package proxyhealth serves the health endpoints of kube-proxy for load balancers in front of
// nodes. /healthz reports whether the node should receive new connections. /livez reports whether
// the node's Service rules are up to date.
package proxyhealth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/netutil"
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wait"
)

// taintToBeDeleted is the taint that the cluster autoscaler sets on a node before it removes the
// node.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// Limits of the server, which accepts unauthenticated clients.
const (
	maxConnections = 64 // concurrent connections
	requestTimeout = 5 * time.Second
	maxHeader      = 4 << 10
	// lateAfter is how long a change of Service rules may be pending while the node still counts as
	// healthy: twice the sync period of kube-proxy.
	lateAfter   = time.Minute
	listenRetry = 10 * time.Second // retry interval while another program uses the address
)

// Config is the configuration of a Server.
type Config struct {
	Address string // HOST:PORT; an empty host means all addresses of the node
	Log     *slog.Logger
}

// Server serves kube-proxy's health endpoints for the Service proxy, which reports its progress
// with Queued and Updated.
type Server struct {
	cfg Config

	mu      sync.Mutex
	updated time.Time // when the rules last included all changes; zero: never
	pending time.Time // when the oldest pending change was queued; zero: no change is pending
	codes   map[string]map[int]uint64
}

// New returns a Server. It does not listen before Run.
func New(c Config) *Server {
	return &Server{cfg: c, codes: map[string]map[int]uint64{pathHealthz: {}, pathLivez: {}}}
}

const (
	pathHealthz = "/healthz"
	pathLivez   = "/livez"
)

// Queued records that a change of Service rules is pending. A nil Server ignores the call.
func (s *Server) Queued() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending.IsZero() {
		s.pending = time.Now()
	}
}

// Updated records that the Service rules include all changes. A nil Server ignores the call.
func (s *Server) Updated() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.updated, s.pending = time.Now(), time.Time{}
}

// familyHealth is the part of a response for one address family.
type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// healthResponse is the JSON body of a response, as kube-proxy sends it.
type healthResponse struct {
	LastUpdated  time.Time                    `json:"lastUpdated"`
	CurrentTime  time.Time                    `json:"currentTime"`
	NodeEligible *bool                        `json:"nodeEligible,omitempty"`
	Healthy      bool                         `json:"healthy"`
	Status       map[v1.IPFamily]familyHealth `json:"status,omitempty"`
}

// computeHealth returns the response about the state of the Service rules. The rules of all address
// families are written at the same time, so they have the same state.
func (s *Server) computeHealth(cluster agent.Cluster) healthResponse {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	healthy := s.pending.IsZero() || now.Sub(s.pending) < lateAfter
	out := healthResponse{LastUpdated: s.updated, CurrentTime: now, Healthy: healthy,
		Status: map[v1.IPFamily]familyHealth{}}
	if s.updated.IsZero() {
		return out
	}
	for _, p := range cluster.ServicePrefixes() {
		family := v1.IPv4Protocol
		if p.Addr().Is6() {
			family = v1.IPv6Protocol
		}
		out.Status[family] = familyHealth{LastUpdated: s.updated, Healthy: healthy}
	}
	return out
}

// isNodeEligible reports whether load balancers should send new connections to the node: the node
// exists and is not being removed.
func isNodeEligible(node *v1.Node) bool {
	if node == nil || !node.DeletionTimestamp.IsZero() {
		return false
	}
	for _, t := range node.Spec.Taints {
		if t.Key == taintToBeDeleted {
			return false
		}
	}
	return true
}

// newHandler returns the HTTP handler of /healthz and /livez.
func (s *Server) newHandler(objects agent.Objects) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(pathHealthz, func(w http.ResponseWriter, _ *http.Request) {
		h := s.computeHealth(objects.Cluster())
		node, _ := objects.Node()
		ok := isNodeEligible(node)
		h.NodeEligible = &ok
		s.writeResponse(w, pathHealthz, h, h.Healthy && ok)
	})
	mux.HandleFunc(pathLivez, func(w http.ResponseWriter, _ *http.Request) {
		h := s.computeHealth(objects.Cluster())
		s.writeResponse(w, pathLivez, h, h.Healthy)
	})
	return mux
}

func (s *Server) writeResponse(w http.ResponseWriter, path string, h healthResponse, ok bool) {
	code := http.StatusServiceUnavailable
	if ok {
		// While the proxy is healthy, lastUpdated is the time of the response, as in kube-proxy.
		code, h.LastUpdated = http.StatusOK, h.CurrentTime
	}
	s.mu.Lock()
	s.codes[path][code]++
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	raw, err := json.Marshal(h)
	if err == nil {
		_, _ = w.Write(raw) // an error means that the client has disconnected
	}
}

// Run serves the health endpoints until ctx ends. If another program uses the address, it logs this
// once and retries.
func (s *Server) Run(ctx context.Context, objects agent.Objects, _ agent.Reporter) error {
	ln, err := s.waitForAddress(ctx)
	if err != nil {
		return err
	}
	return s.serveHealth(ctx, ln, objects)
}

func (s *Server) waitForAddress(ctx context.Context) (net.Listener, error) {
	for logged := false; ; {
		ln, err := new(net.ListenConfig).Listen(ctx, "tcp", s.cfg.Address)
		if err == nil {
			return ln, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("listening for load balancers in front of nodes: --proxy-healthz-address: %w", err)
		}
		if !logged {
			logged = true
			s.cfg.Log.Warn("another program uses the address at which the agent answers load balancers in "+
				"front of nodes: "+
				"'ss -ltnp' shows which one; --proxy-healthz-address moves the agent's", "address", s.cfg.Address)
		}
		if err := wait.Delay(ctx, listenRetry); err != nil {
			return nil, err
		}
	}
}

// serveHealth serves the connections that ln accepts. It closes ln.
func (s *Server) serveHealth(ctx context.Context, ln net.Listener, objects agent.Objects) error {
	server := &http.Server{Handler: s.newHandler(objects), ReadTimeout: requestTimeout, WriteTimeout: requestTimeout,
		IdleTimeout: requestTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(netutil.LimitListener(ln, maxConnections)) }()
	select {
	case err := <-ended:
		return fmt.Errorf("answering load balancers in front of nodes: %w", err)
	case <-ctx.Done():
		_ = server.Close() // requests are short, and their clients retry
		<-ended
		return ctx.Err()
	}
}

// WriteMetrics writes the number of requests by status code, under kube-proxy's metric names.
func (s *Server) WriteMetrics(w io.Writer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, m := range []struct{ path, name, help string }{
		{pathHealthz, "kubeproxy_proxy_healthz_total", "Cumulative proxy healthz HTTP status"},
		{pathLivez, "kubeproxy_proxy_livez_total", "Cumulative proxy livez HTTP status"},
	} {
		_, err := fmt.Fprintf(w, "# HELP %s %s\n# TYPE %s counter\n", m.name, m.help, m.name)
		errs = append(errs, err)
		for _, code := range []int{http.StatusOK, http.StatusServiceUnavailable} {
			if n := s.codes[m.path][code]; n > 0 {
				_, err := fmt.Fprintf(w, "%s{code=\"%d\"} %d\n", m.name, code, n)
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
