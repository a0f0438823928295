package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/net/netutil"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/agent"
)

// HealthChecks answers load balancers at the health check node ports of Services with externalTrafficPolicy Local:
// whether this node has ready endpoints, since it sends their traffic to no other.
type HealthChecks struct {
	Node string
	Log  *slog.Logger // may be nil

	listen func(port int32) (net.Listener, error) // nil: on all addresses of the node
}

// The bounds of what strangers can take of a node here.
const (
	healthConnections = 64 // at once, per port
	healthTimeout     = 5 * time.Second
	healthRetry       = 10 * time.Second // after a port could not be had
)

// health is what is said of a Service at its port.
type health struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints int `json:"localEndpoints"`
}

// healthOf says what to answer at which port. Pure.
func healthOf(services []*v1.Service, parts []*discoveryv1.EndpointSlice, node string) map[int32]health {
	out := map[int32]health{}
	for _, s := range services {
		port := s.Spec.HealthCheckNodePort
		if port == 0 || s.Spec.Type != v1.ServiceTypeLoadBalancer ||
			s.Spec.ExternalTrafficPolicy != v1.ServiceExternalTrafficPolicyLocal {
			continue
		}
		var h health
		h.Service.Namespace, h.Service.Name = s.Namespace, s.Name
		local := map[string]bool{}
		for _, p := range parts {
			if p.Namespace != s.Namespace || p.Labels[discoveryv1.LabelServiceName] != s.Name ||
				p.AddressType != discoveryv1.AddressTypeIPv4 {
				continue
			}
			for _, e := range p.Endpoints {
				if e.NodeName != nil && *e.NodeName == node && (e.Conditions.Ready == nil || *e.Conditions.Ready) &&
					len(e.Addresses) > 0 {
					local[e.Addresses[0]] = true
				}
			}
		}
		h.LocalEndpoints = len(local)
		out[port] = h
	}
	return out
}

// Run answers until ctx ends.
func (c *HealthChecks) Run(ctx context.Context, objects agent.Objects, _ agent.Reporter) error {
	open := map[int32]*healthPort{}
	defer func() {
		for _, p := range open {
			p.close()
		}
	}()
	changes := objects.Changes(ctx)
	select {
	case <-objects.Synced():
	case <-ctx.Done():
		return ctx.Err()
	}
	retry := time.NewTicker(healthRetry)
	defer retry.Stop()
	for {
		c.follow(open, healthOf(objects.Services(), objects.EndpointSlices(), c.Node))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-retry.C:
		case _, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
		}
	}
}

// follow opens and closes ports and changes what they say.
func (c *HealthChecks) follow(open map[int32]*healthPort, want map[int32]health) {
	for port, p := range open {
		if _, ok := want[port]; !ok {
			p.close()
			delete(open, port)
		}
	}
	for port, h := range want {
		p := open[port]
		if p == nil {
			var err error
			if p, err = c.open(port); err != nil {
				if c.Log != nil {
					c.Log.Warn("the health check node port of a Service cannot be opened", "service",
						h.Service.Namespace+"/"+h.Service.Name, "port", port, "err", err)
				}
				continue
			}
			open[port] = p
		}
		p.says.Store(&h)
	}
}

// healthPort is one open port.
type healthPort struct {
	says   atomic.Pointer[health]
	server *http.Server
	done   chan struct{}
}

func (c *HealthChecks) open(port int32) (*healthPort, error) {
	listen := c.listen
	if listen == nil {
		listen = func(port int32) (net.Listener, error) { return net.Listen("tcp4", fmt.Sprintf("0.0.0.0:%d", port)) }
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
			c.Log.Warn("a health check node port ended", "port", port, "err", err)
		}
	}()
	return p, nil
}

func (p *healthPort) close() {
	_ = p.server.Close() // nothing is to be saved
	<-p.done
}

// ServeHTTP says how many ready endpoints this node has: 200 for some, 503 for none.
func (p *healthPort) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	h := p.says.Load()
	if h == nil {
		h = &health{}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(h.LocalEndpoints))
	if h.LocalEndpoints == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(h) // the asker is gone, then
}
