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
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"
)

// HealthChecks serves the health check node ports of Services with externalTrafficPolicy Local. A
// load balancer learns there whether this node has ready endpoints, because this node forwards
// their traffic to no other node.
type HealthChecks struct {
	Log *slog.Logger // may be nil

	mu      sync.Mutex
	wanted  map[int32]serviceHealth
	changed chan struct{}
	listen  func(port int32) (net.Listener, error) // nil: listen on all addresses of the node
}

// NewHealthChecks returns HealthChecks that serve no port yet. log may be nil.
func NewHealthChecks(log *slog.Logger) *HealthChecks {
	return &HealthChecks{Log: log, changed: make(chan struct{}, 1)}
}

// Limits for unauthenticated clients of the health check ports.
const (
	healthConnections = 64 // concurrent connections per port
	healthTimeout     = 5 * time.Second
	healthRetry       = 10 * time.Second // delay before a failed listen is retried
)

// serviceHealth is the JSON response at the health check node port of a Service.
type serviceHealth struct {
	port    int32
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints int `json:"localEndpoints"`
}

// computeHealth returns the health check response of the Service s on this node. parts are its
// EndpointSlices. ok is false if the Service has no health check node port.
func computeHealth(s *v1.Service, parts map[string]*discoveryv1.EndpointSlice, node string) (h serviceHealth, ok bool) {
	h.port = s.Spec.HealthCheckNodePort
	if h.port == 0 || s.Spec.Type != v1.ServiceTypeLoadBalancer ||
		s.Spec.ExternalTrafficPolicy != v1.ServiceExternalTrafficPolicyLocal {
		return h, false
	}
	h.Service.Namespace, h.Service.Name = s.Namespace, s.Name
	local := map[discoveryv1.AddressType]map[string]bool{}
	for _, p := range parts {
		if local[p.AddressType] == nil {
			local[p.AddressType] = map[string]bool{}
		}
		for _, e := range p.Endpoints {
			if e.NodeName != nil && *e.NodeName == node && (e.Conditions.Ready == nil || *e.Conditions.Ready) &&
				len(e.Addresses) > 0 {
				local[p.AddressType][e.Addresses[0]] = true
			}
		}
	}
	// The slices of both address families list the same pods.
	h.LocalEndpoints = max(len(local[discoveryv1.AddressTypeIPv4]), len(local[discoveryv1.AddressTypeIPv6]))
	return h, true
}

// setHealth replaces the health check responses of all Services. If two Services have the same
// health check port, the first Service by namespace and name is served.
func (c *HealthChecks) setHealth(of map[types.NamespacedName]serviceHealth) {
	want := make(map[int32]serviceHealth, len(of))
	for _, h := range of {
		if have, ok := want[h.port]; !ok || h.Service.Namespace+"/"+h.Service.Name < have.Service.Namespace+"/"+have.Service.Name {
			want[h.port] = h
		}
	}
	c.mu.Lock()
	same := maps.Equal(c.wanted, want)
	c.wanted = want
	c.mu.Unlock()
	if same {
		return
	}
	select {
	case c.changed <- struct{}{}:
	default:
	}
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

// syncPorts makes open the health check ports in want: it opens and closes listeners and updates
// their responses.
func (c *HealthChecks) syncPorts(open map[int32]*healthPort, want map[int32]serviceHealth) {
	for port, p := range open {
		if _, ok := want[port]; !ok {
			p.shutDown()
			delete(open, port)
		}
	}
	for port, h := range want {
		p := open[port]
		if p == nil {
			var err error
			if p, err = c.openPort(port); err != nil {
				if c.Log != nil {
					c.Log.Warn("the health check node port of a Service cannot be opened", "service",
						h.Service.Namespace+"/"+h.Service.Name, "port", port, "err", err)
				}
				continue
			}
			open[port] = p
		}
		p.health.Store(&h)
	}
}

// healthPort is an HTTP server at the health check node port of one Service.
type healthPort struct {
	health atomic.Pointer[serviceHealth]
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

// ServeHTTP responds with the number of ready endpoints on this node. The status is 200 if there
// are any and 503 otherwise.
func (p *healthPort) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	h := p.health.Load()
	if h == nil {
		h = &serviceHealth{}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(h.LocalEndpoints))
	if h.LocalEndpoints == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(h) // an error means that the client has disconnected
}
