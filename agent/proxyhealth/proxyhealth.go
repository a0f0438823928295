// Package proxyhealth answers load balancers in front of nodes as kube-proxy does at its health port. /healthz reports
// whether the node should get new connections, /livez whether its Service rules are up to date.
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

// taintToBeDeleted is the taint by which the cluster autoscaler announces that it removes a node.
const taintToBeDeleted = "ToBeDeletedByClusterAutoscaler"

// The bounds of the server. Anybody who reaches the node may ask it.
const (
	connections    = 64 // at once
	requestTimeout = 5 * time.Second
	maxHeader      = 4 << 10
	// lateAfter is how long a change may wait for its rules: twice the sync period of kube-proxy.
	lateAfter   = time.Minute
	listenAgain = 10 * time.Second // after the address was another program's
)

// Config is what a Server is made of.
type Config struct {
	Address string // HOST:PORT; an empty host is all addresses of the node
	Log     *slog.Logger
}

// Server answers for the proxy that reports to it.
type Server struct {
	cfg Config

	mu      sync.Mutex
	updated time.Time // when rules were last complete; zero: never
	pending time.Time // since when a change waits for its rules; zero: none does
	codes   map[string]map[int]uint64
}

// New returns a Server. It listens when it runs.
func New(c Config) *Server {
	return &Server{cfg: c, codes: map[string]map[int]uint64{pathHealthz: {}, pathLivez: {}}}
}

const (
	pathHealthz = "/healthz"
	pathLivez   = "/livez"
)

// Queued reports that a change waits for its rules. A nil Server ignores it.
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

// Updated reports that the rules show all changes. A nil Server ignores it.
func (s *Server) Updated() {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.updated, s.pending = time.Now(), time.Time{}
}

// familyHealth is the part of a response about one address family.
type familyHealth struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// response is what kube-proxy answers.
type response struct {
	LastUpdated  time.Time                    `json:"lastUpdated"`
	CurrentTime  time.Time                    `json:"currentTime"`
	NodeEligible *bool                        `json:"nodeEligible,omitempty"`
	Healthy      bool                         `json:"healthy"`
	Status       map[v1.IPFamily]familyHealth `json:"status,omitempty"`
}

// health returns the state of the rules, which are written for all families of the cluster at once.
func (s *Server) health(cluster agent.Cluster) response {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	healthy := s.pending.IsZero() || now.Sub(s.pending) < lateAfter
	out := response{LastUpdated: s.updated, CurrentTime: now, Healthy: healthy, Status: map[v1.IPFamily]familyHealth{}}
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

// eligible reports whether load balancers should send new connections to the node: it is known, and nobody removes it.
func eligible(node *v1.Node) bool {
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

// handler answers both paths.
func (s *Server) handler(objects agent.Objects) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(pathHealthz, func(w http.ResponseWriter, _ *http.Request) {
		h := s.health(objects.Cluster())
		node, _ := objects.Node()
		ok := eligible(node)
		h.NodeEligible = &ok
		s.answer(w, pathHealthz, h, h.Healthy && ok)
	})
	mux.HandleFunc(pathLivez, func(w http.ResponseWriter, _ *http.Request) {
		h := s.health(objects.Cluster())
		s.answer(w, pathLivez, h, h.Healthy)
	})
	return mux
}

func (s *Server) answer(w http.ResponseWriter, path string, h response, ok bool) {
	code := http.StatusServiceUnavailable
	if ok {
		// While all is well, clients read the time of the response here, as kube-proxy tells it.
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
		_, _ = w.Write(raw) // the client is gone, then
	}
}

// Run answers until ctx ends. An address that another program has is logged once and tried again.
func (s *Server) Run(ctx context.Context, objects agent.Objects, _ agent.Reporter) error {
	ln, err := s.listen(ctx)
	if err != nil {
		return err
	}
	return s.serve(ctx, ln, objects)
}

func (s *Server) listen(ctx context.Context) (net.Listener, error) {
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
			s.cfg.Log.Warn("another program uses the address at which the agent answers load balancers in front of nodes: "+
				"'ss -ltnp' shows which one; --proxy-healthz-address moves the agent's", "address", s.cfg.Address)
		}
		if err := wait.Delay(ctx, listenAgain); err != nil {
			return nil, err
		}
	}
}

// serve answers connections to ln, which it closes.
func (s *Server) serve(ctx context.Context, ln net.Listener, objects agent.Objects) error {
	server := &http.Server{Handler: s.handler(objects), ReadTimeout: requestTimeout, WriteTimeout: requestTimeout,
		IdleTimeout: requestTimeout, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(netutil.LimitListener(ln, connections)) }()
	select {
	case err := <-ended:
		return fmt.Errorf("answering load balancers in front of nodes: %w", err)
	case <-ctx.Done():
		_ = server.Close() // requests are short, and their clients ask again
		<-ended
		return ctx.Err()
	}
}

// WriteMetrics writes how many requests got which status, under kube-proxy's names.
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
