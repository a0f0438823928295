package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/internal/wakeup"
)

// HealthChecks serves the health check node ports of Services with externalTrafficPolicy Local.
// This node forwards traffic for such Services only to its own endpoints. The health check tells a
// load balancer whether this node has ready endpoints.
type HealthChecks struct {
	Log *slog.Logger // may be nil

	mu      sync.Mutex
	wanted  map[int32]servicemodel.ServiceHealth
	changed wakeup.Signal
	listen  func(port int32) (net.Listener, error) // nil: listen on all addresses of the node
}

// NewHealthChecks returns HealthChecks that serve no port yet. log may be nil.
func NewHealthChecks(log *slog.Logger) *HealthChecks {
	return &HealthChecks{Log: log, changed: wakeup.New()}
}

// Limits for unauthenticated clients of the health check ports.
const (
	healthConnections = 64 // concurrent connections per port
	healthTimeout     = 5 * time.Second
	healthRetry       = 10 * time.Second // delay before a failed listen call is retried
)

// setHealth replaces the health check responses of all Services. If two Services have the same
// health check port, the response of the first Service by namespace and name is used.
func (c *HealthChecks) setHealth(responses map[types.NamespacedName]servicemodel.ServiceHealth) {
	want := make(map[int32]servicemodel.ServiceHealth, len(responses))
	for _, h := range responses {
		if have, ok := want[h.Port]; !ok || h.Service.Namespace+"/"+h.Service.Name <
			have.Service.Namespace+"/"+have.Service.Name {
			want[h.Port] = h
		}
	}
	c.mu.Lock()
	same := maps.Equal(c.wanted, want)
	c.wanted = want
	c.mu.Unlock()
	if same {
		return
	}
	c.changed.Send()
}

// Run serves the health check node ports of the Services until ctx ends.
func (c *HealthChecks) Run(ctx context.Context) error {
	open := map[int32]*healthPort{}
	defer func() {
		for _, p := range open {
			p.shutDown()
		}
	}()
	retry := time.NewTicker(healthRetry)
	defer retry.Stop()
	for {
		c.mu.Lock()
		want := maps.Clone(c.wanted)
		c.mu.Unlock()
		c.syncPorts(open, want)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-retry.C:
		case <-c.changed:
		}
	}
}

// syncPorts opens and closes health check servers so that there is one for each port in want, and
// updates the response of every server. servers contains the open servers by port. A port that
// cannot be opened is logged and omitted.
func (c *HealthChecks) syncPorts(servers map[int32]*healthPort, want map[int32]servicemodel.ServiceHealth) {
	for port, p := range servers {
		if _, ok := want[port]; !ok {
			p.shutDown()
			delete(servers, port)
		}
	}
	for port, h := range want {
		p := servers[port]
		if p == nil {
			var err error
			if p, err = c.openPort(port); err != nil {
				if c.Log != nil {
					c.Log.Warn("the health check node port of a Service cannot be opened", "service",
						h.Service.Namespace+"/"+h.Service.Name, "port", port, "err", err)
				}
				continue
			}
			servers[port] = p
		}
		p.health.Store(&h)
	}
}

// healthPort is an HTTP server at the health check node port of one Service.
type healthPort struct {
	health atomic.Pointer[servicemodel.ServiceHealth]
	server *http.Server
	done   chan struct{}
}

func (c *HealthChecks) openPort(port int32) (*healthPort, error) {
	listen := c.listen
	if listen == nil {
		listen = func(port int32) (net.Listener, error) { return net.Listen("tcp", fmt.Sprintf(":%d", port)) }
	}
	ln, err := listen(port)
	if err != nil {
		return nil, err
	}
	p := &healthPort{done: make(chan struct{})}
	p.server = &http.Server{Handler: p, ReadTimeout: healthTimeout, WriteTimeout: healthTimeout,
		IdleTimeout: healthTimeout, MaxHeaderBytes: 4 << 10,
		ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	go func() {
		defer close(p.done)
		err := p.server.Serve(netutil.LimitListener(ln, healthConnections))
		if !errors.Is(err, http.ErrServerClosed) && c.Log != nil {
			c.Log.Warn("serving a health check node port failed", "port", port, "err", err)
		}
	}()
	return p, nil
}

func (p *healthPort) shutDown() {
	_ = p.server.Close() // there is no state to save
	<-p.done
}

// ServeHTTP responds with the number of ready endpoints on this node. The status is 200 if the
// number is not 0, and 503 otherwise.
func (p *healthPort) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	h := p.health.Load()
	if h == nil {
		h = &servicemodel.ServiceHealth{}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(h.LocalEndpoints))
	if h.LocalEndpoints == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(h) // an error means that the client has disconnected
}
