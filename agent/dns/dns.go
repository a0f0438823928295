// Package dns is the cluster DNS server on a node. It answers queries from the node's pods, even
// while no control plane is reachable, because it uses the node's own copy of the Services. It
// serves at the address of Service kube-system/kube-dns and at a link-local address. A Corefile
// configures it (package corefile). Package zone contains the names of the cluster; package forward
// queries other servers for all other names. A serverChain is an active Corefile and answers
// queries. The Server manages sockets, addresses, nftables rules, files, and changes of the
// cluster's objects.
//
// Goroutines: one per UDP socket, which immediately answers queries that are known locally; one per
// TCP connection; one per query that waits for another server, up to a limit; and one that follows
// the cluster's objects.
package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/dns/zone"
)

// LinkLocal is the link-local address of the DNS server on every node. The server also has the
// address of the DNS Service. LinkLocal is the usual address of node-local DNS caches.
var LinkLocal = netip.AddrFrom4([4]byte{169, 254, 20, 10})

// Config is the configuration of the DNS server of a node.
type Config struct {
	Node       string
	StateDir   string     // directory of the last valid Corefile
	RunDir     string     // directory of the record of addresses
	ResolvConf string     // the node's resolv.conf, which replaces /etc/resolv.conf in a Corefile
	Local      netip.Addr // address that is served in addition to the address of the Service; zero: none
	// ForeignNetwork reports whether a third-party network plugin attaches pods. Pod addresses may
	// then be outside the cluster's pod ranges.
	ForeignNetwork func() bool
	Log            *slog.Logger

	// Addresses and Port, if set, replace the Service's address, Local, and port 53. The loopback
	// device and nftables rules are then not changed. For tests and benchmarks.
	Addresses []netip.Addr
	Port      uint16
}

// Server is the cluster DNS server of a node.
type Server struct {
	cfg     Config
	index   *zone.Index
	chain   atomic.Pointer[serverChain]
	clients atomic.Pointer[allowedClients]
	waiting waitLimiter
	holder  addressHolder
	serverCounters

	listeners map[netip.Addr]*addressListener
	lastError string // the last logged error about addresses that are not served

	source chainSource // inputs of the current chain

	mu         sync.Mutex
	zoneCounts []*zoneCounters // counters of all zones that have ever been configured
}

// New returns a DNS server. It starts nothing and does not listen.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Port == 0 {
		cfg.Port = 53
	}
	s := &Server{cfg: cfg, index: zone.New(), listeners: map[netip.Addr]*addressListener{},
		waiting: waitLimiter{perClient: map[netip.Addr]int{}}}
	s.holder.file = filepath.Join(cfg.RunDir, "dns-addresses.json")
	s.clients.Store(&allowedClients{})
	return s
}

// checkInterval is the time between checks of files and rules that other programs may change.
const checkInterval = 10 * time.Second

// Run serves DNS until ctx ends or an error occurs. It starts to serve when the node's view of the
// cluster is complete, possibly from the checkpoint; earlier answers would be wrong. The addresses
// remain on the node when it returns.
func (s *Server) Run(ctx context.Context, objects agent.Objects, reports agent.Reporter) error {
	select {
	case <-objects.Synced():
	case <-ctx.Done():
		return ctx.Err()
	}
	defer s.closeAll()
	changes := objects.Follow(ctx, kindService, kindSlice, kindConfigMap)
	tick := time.NewTicker(checkInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			s.configure(objects, reports)
			if err := s.updateListeners(ctx, objects, true); err != nil {
				return err
			}
		case c, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
			if err := s.applyChanges(ctx, c, objects, reports); err != nil {
				return err
			}
		}
	}
}

// Kinds of the API objects that the DNS server follows.
const (
	kindService   = "Service"
	kindSlice     = "EndpointSlice"
	kindConfigMap = "ConfigMap"
)

// applyChanges updates the index of Services, the active Corefile and the listeners. c contains the
// objects that have changed.
func (s *Server) applyChanges(
	ctx context.Context, c agent.ObjectChanges, objects agent.Objects, reports agent.Reporter,
) error {
	var services, parts []zone.Key
	configured, addressed := c.All, c.All
	for k := range c.Keys {
		switch k.Kind {
		case kindService:
			services = append(services, zone.Key{Namespace: k.Namespace, Name: k.Name})
			addressed = addressed || k.Namespace == agent.DNSNamespace && k.Name == agent.DNSService
		case kindSlice:
			parts = append(parts, zone.Key{Namespace: k.Namespace, Name: k.Name})
		case kindConfigMap:
			configured = configured || k.Namespace == agent.DNSNamespace && k.Name == configMap
		}
	}
	if c.All {
		s.index.Sync(objects.Services(), objects.EndpointSlices())
	} else {
		s.index.Update(services, parts, objects)
	}
	if configured || addressed {
		s.configure(objects, reports)
	}
	if !addressed {
		s.updateHTTPServers(ctx)
		return nil
	}
	return s.updateListeners(ctx, objects, false)
}

// closeAll closes all listeners and the active chain, including its upstream connections.
func (s *Server) closeAll() {
	for a, f := range s.listeners {
		f.shutDown()
		delete(s.listeners, a)
	}
	if c := s.chain.Load(); c != nil {
		c.shutDown()
	}
}

// wantedAddresses returns the addresses at which DNS must be served.
func (s *Server) wantedAddresses(objects agent.Objects) []netip.Addr {
	if s.cfg.Addresses != nil {
		return s.cfg.Addresses
	}
	var out []netip.Addr
	if s.cfg.Local.IsValid() {
		out = append(out, s.cfg.Local)
	}
	svc, ok := objects.Service(agent.DNSNamespace, agent.DNSService)
	if !ok || !agent.AgentsServeDNS(svc) {
		return out
	}
	for _, text := range append([]string{svc.Spec.ClusterIP}, svc.Spec.ClusterIPs...) {
		if a, err := netip.ParseAddr(text); err == nil && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// updateListeners opens and closes listeners so that the server listens on the wanted addresses and
// no others. It also sets these addresses on the loopback device, with their nftables rules. If
// checkRules is true, it writes rules that no longer exist again. If listening on an address fails,
// the other addresses are served, and the next call tries again.
func (s *Server) updateListeners(ctx context.Context, objects agent.Objects, checkRules bool) error {
	want := s.wantedAddresses(objects)
	if s.cfg.Addresses == nil && (!slices.Equal(want, s.holder.have) || checkRules && !s.holder.hasRules(ctx)) {
		limit, cancel := context.WithTimeout(ctx, 30*time.Second)
		err := s.holder.setAddresses(limit, want)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
	}
	s.clients.Store(s.permittedClients(objects))
	for a, f := range s.listeners {
		if !slices.Contains(want, a) {
			f.shutDown()
			delete(s.listeners, a)
		}
	}
	var errs []error
	for _, a := range want {
		if s.listeners[a] != nil {
			continue
		}
		f, err := listenAt(ctx, netip.AddrPortFrom(a, s.cfg.Port))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.listeners[a] = f
		s.startServing(ctx, f)
	}
	s.updateHTTPServers(ctx)
	if err := errors.Join(errs...); err != nil && err.Error() != s.lastError {
		s.lastError = err.Error()
		s.cfg.Log.Error("DNS is not served at all addresses", "err", err)
	} else if err == nil {
		s.lastError = ""
	}
	if len(s.listeners) == 0 && len(want) > 0 {
		return fmt.Errorf("no address to serve DNS at: %w", errors.Join(errs...))
	}
	return nil
}

// permittedClients returns the clients that the DNS server answers: the pods of this node and the
// node itself.
func (s *Server) permittedClients(objects agent.Objects) *allowedClients {
	c := &allowedClients{local: map[netip.Addr]struct{}{}}
	c.prefixes = append(c.prefixes, objects.Cluster().ClusterPrefixes()...)
	if s.cfg.ForeignNetwork != nil && s.cfg.ForeignNetwork() {
		for _, p := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"} {
			c.prefixes = append(c.prefixes, netip.MustParsePrefix(p))
		}
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		s.cfg.Log.Warn("the node's own addresses cannot be listed", "err", err)
	}
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				c.local[ip.Unmap()] = struct{}{}
			}
		}
	}
	return c
}

// Ports of the HTTP endpoints of CoreDNS, which a Corefile enables.
const (
	healthPort  = 8080
	readyPort   = 8181
	metricsPort = 9153
)

// updateHTTPServers serves the health, ready and metrics endpoints that the Corefile enables, at
// each address, to DNS clients only. The ports of disabled endpoints remain free for pods on the
// host network, because a listener at one address prevents others from listening on all addresses.
// If a port is already in use, DNS is served nevertheless.
func (s *Server) updateHTTPServers(ctx context.Context) {
	c := s.chain.Load()
	if s.cfg.Port != 53 || c == nil {
		return
	}
	ok := func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("OK")) }
	for a, f := range s.listeners {
		for _, p := range []struct {
			on   bool
			port uint16
			path string
			show http.HandlerFunc
		}{
			{c.health, healthPort, "/health", ok}, {c.ready, readyPort, "/ready", ok},
			{c.prometheus, metricsPort, "/metrics", s.metricsPage},
		} {
			switch have := f.httpServers[p.port]; {
			case !p.on && have != nil:
				have.Close()
				delete(f.httpServers, p.port)
			case p.on && have == nil:
				var lc net.ListenConfig
				l, err := lc.Listen(ctx, "tcp", netip.AddrPortFrom(a, p.port).String())
				if err != nil {
					s.cfg.Log.Warn("an HTTP endpoint of the DNS server is not served", "path", p.path, "err", err)
					continue
				}
				f.serveHTTPPath(ctx, l, p.port, p.path, s.onlyClients(p.show))
			}
		}
	}
}

func (s *Server) metricsPage(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_ = s.Metrics(w) // an error means that the client has disconnected
}

// onlyClients returns a handler that calls h for permitted DNS clients and rejects requests from
// all others.
func (s *Server) onlyClients(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		at, err := netip.ParseAddrPort(r.RemoteAddr)
		if err != nil || !s.clients.Load().isAllowed(at.Addr().Unmap()) {
			http.Error(w, "this client is not served", http.StatusForbidden)
			return
		}
		h(w, r)
	}
}

// allZoneCounts returns the counters of all zones that have been configured since the server was
// created.
func (s *Server) allZoneCounts() []*zoneCounters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.zoneCounts)
}

// zoneCountsOf returns the counters of a zone, and creates them if necessary. The counters remain
// when the zone's server block is removed. logErrors sets whether failures in the zone are logged.
func (s *Server) zoneCountsOf(zoneName string, logErrors bool) *zoneCounters {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.zoneCounts {
		if c.zone == zoneName {
			c.mu.Lock()
			c.logErrors = logErrors
			c.mu.Unlock()
			return c
		}
	}
	c := newCounts(zoneName, s.cfg.Log)
	c.logErrors = logErrors
	if len(s.zoneCounts) < maxCountedZones {
		s.zoneCounts = append(s.zoneCounts, c)
	}
	return c
}

// maxCountedZones is the maximum number of zones with counters.
const maxCountedZones = 256
