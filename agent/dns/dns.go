// Package dns is the cluster's DNS on a node: it answers the node's pods from the node's own view, at the address of
// Service kube-system/kube-dns and at a link-local one, also while no control plane answers. How it is configured is a
// Corefile (package corefile); which names there are says package zone; what it does not know it asks others for
// (package forward). A chain is a Corefile in force and answers questions; the Server is the shell around: sockets,
// addresses and rules, files, and the cluster's objects.
//
// Goroutines: one for each UDP socket, which answers what is known at once; one for each TCP connection, and for each
// question that waits for another server, within bounds; one that follows the cluster.
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

// LinkLocal is where every node serves besides the address of the Service, as node-local caches do.
var LinkLocal = netip.AddrFrom4([4]byte{169, 254, 20, 10})

// Config of a Server.
type Config struct {
	Node       string
	StateDir   string     // holds the last Corefile that was good
	RunDir     string     // holds the record of addresses
	ResolvConf string     // of the node: what /etc/resolv.conf in a Corefile means
	Local      netip.Addr // where it is served besides the address of the Service; the zero one: nowhere
	// Foreign says that pods are attached by a network product, and may have addresses outside of the cluster's range.
	Foreign func() bool
	Log     *slog.Logger

	// Addresses are served instead of the Service's and Local, at Port instead of 53, and nothing is done to devices and
	// rules: for tests and benchmarks on loopback. nil and 0: as on a node.
	Addresses []netip.Addr
	Port      uint16
}

// Server answers DNS on a node.
type Server struct {
	cfg     Config
	index   *zone.Index
	chain   atomic.Pointer[chain]
	clients atomic.Pointer[clients]
	waiting waiting
	holder  holder
	counters

	fronts map[netip.Addr]*front
	told   string // what was last said of addresses that are not served

	source source // what the chain was made of

	mu   sync.Mutex
	kept []*counts // of every zone that ever was
}

// New starts nothing.
func New(cfg Config) *Server {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Port == 0 {
		cfg.Port = 53
	}
	s := &Server{cfg: cfg, index: zone.New(), fronts: map[netip.Addr]*front{}, waiting: waiting{of: map[netip.Addr]int{}}}
	s.holder.file = filepath.Join(cfg.RunDir, "dns-addresses.json")
	s.clients.Store(&clients{})
	return s
}

// tendEvery is the time between two looks at files and rules that others may change.
const tendEvery = 10 * time.Second

// Run serves until ctx ends. It begins when the node knows the cluster, be it from its checkpoint: before, questions
// would be answered wrongly. Addresses stay on the node when it ends.
func (s *Server) Run(ctx context.Context, objects agent.Objects, reports agent.Reporter) error {
	select {
	case <-objects.Synced():
	case <-ctx.Done():
		return ctx.Err()
	}
	defer s.stop()
	changes := objects.Follow(ctx, kindService, kindSlice, kindConfigMap)
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			s.configure(objects, reports)
			if err := s.serve(ctx, objects, true); err != nil {
				return err
			}
		case c, ok := <-changes:
			if !ok {
				return ctx.Err()
			}
			if err := s.follow(ctx, c, objects, reports); err != nil {
				return err
			}
		}
	}
}

// The kinds that are followed.
const (
	kindService   = "Service"
	kindSlice     = "EndpointSlice"
	kindConfigMap = "ConfigMap"
)

// follow takes up what has changed.
func (s *Server) follow(ctx context.Context, c agent.Changed, objects agent.Objects, reports agent.Reporter) error {
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
		s.pages(ctx)
		return nil
	}
	return s.serve(ctx, objects, false)
}

// stop ends what serves.
func (s *Server) stop() {
	for a, f := range s.fronts {
		f.close()
		delete(s.fronts, a)
	}
	if c := s.chain.Load(); c != nil {
		c.close()
	}
}

// wanted are the addresses to serve at.
func (s *Server) wanted(objects agent.Objects) []netip.Addr {
	if s.cfg.Addresses != nil {
		return s.cfg.Addresses
	}
	var out []netip.Addr
	if s.cfg.Local.IsValid() {
		out = append(out, s.cfg.Local)
	}
	svc, ok := objects.Service(agent.DNSNamespace, agent.DNSService)
	if !ok || !agent.ServesDNS(svc) {
		return out
	}
	for _, text := range append([]string{svc.Spec.ClusterIP}, svc.Spec.ClusterIPs...) {
		if a, err := netip.ParseAddr(text); err == nil && !slices.Contains(out, a) {
			out = append(out, a)
		}
	}
	return out
}

// serve brings what is served to the addresses that are wanted. One that cannot be had keeps the others from nothing:
// it is tried again with the next tick.
func (s *Server) serve(ctx context.Context, objects agent.Objects, tended bool) error {
	want := s.wanted(objects)
	if s.cfg.Addresses == nil && (!slices.Equal(want, s.holder.have) || tended && !s.holder.intact(ctx)) {
		limit, cancel := context.WithTimeout(ctx, 30*time.Second)
		err := s.holder.hold(limit, want)
		cancel()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
	}
	s.clients.Store(s.permitted(objects))
	for a, f := range s.fronts {
		if !slices.Contains(want, a) {
			f.close()
			delete(s.fronts, a)
		}
	}
	var errs []error
	for _, a := range want {
		if s.fronts[a] != nil {
			continue
		}
		f, err := listen(ctx, netip.AddrPortFrom(a, s.cfg.Port))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.fronts[a] = f
		s.start(ctx, f)
	}
	s.pages(ctx)
	if err := errors.Join(errs...); err != nil && err.Error() != s.told {
		s.told = err.Error()
		s.cfg.Log.Error("DNS is not served everywhere", "err", err)
	} else if err == nil {
		s.told = ""
	}
	if len(s.fronts) == 0 && len(want) > 0 {
		return fmt.Errorf("no address to serve DNS at: %w", errors.Join(errs...))
	}
	return nil
}

// permitted says who may ask: pods, and the node itself.
func (s *Server) permitted(objects agent.Objects) *clients {
	c := &clients{local: map[netip.Addr]struct{}{}}
	c.prefixes = append(c.prefixes, objects.Cluster().ClusterPrefixes()...)
	if s.cfg.Foreign != nil && s.cfg.Foreign() {
		for _, p := range []string{"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"} {
			c.prefixes = append(c.prefixes, netip.MustParsePrefix(p))
		}
	}
	all, err := net.InterfaceAddrs()
	if err != nil {
		s.cfg.Log.Warn("the node's own addresses are not known", "err", err)
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

// The ports of CoreDNS' pages, which a Corefile turns on.
const (
	healthPort  = 8080
	readyPort   = 8181
	metricsPort = 9153
)

// pages serves what the Corefile turns on of health, ready and metrics at each address, to whom DNS is served to. The ports
// of other pages are left to the pods in the node's network: who listens at one address of a node takes a port from all who
// want it at any. A port that is taken is no reason to serve no DNS.
func (s *Server) pages(ctx context.Context) {
	c := s.chain.Load()
	if s.cfg.Port != 53 || c == nil {
		return
	}
	ok := func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("OK")) }
	for a, f := range s.fronts {
		for _, p := range []struct {
			on   bool
			port uint16
			path string
			show http.HandlerFunc
		}{
			{c.health, healthPort, "/health", ok}, {c.ready, readyPort, "/ready", ok}, {c.prom, metricsPort, "/metrics", s.metricsPage},
		} {
			switch have := f.pages[p.port]; {
			case !p.on && have != nil:
				have.Close()
				delete(f.pages, p.port)
			case p.on && have == nil:
				var lc net.ListenConfig
				l, err := lc.Listen(ctx, "tcp", netip.AddrPortFrom(a, p.port).String())
				if err != nil {
					s.cfg.Log.Warn("a page of the DNS server is not served", "path", p.path, "err", err)
					continue
				}
				f.page(ctx, l, p.port, p.path, s.onlyClients(p.show))
			}
		}
	}
}

func (s *Server) metricsPage(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
	_ = s.Metrics(w) // who went away in the middle misses the rest
}

// onlyClients refuses those whom DNS is not served to.
func (s *Server) onlyClients(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		at, err := netip.ParseAddrPort(r.RemoteAddr)
		if err != nil || !s.clients.Load().permits(at.Addr().Unmap()) {
			http.Error(w, "not for you", http.StatusForbidden)
			return
		}
		h(w, r)
	}
}

// allCounts are the figures of all zones.
func (s *Server) allCounts() []*counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.kept)
}

// countsOf are the figures of a zone, which outlive the server block.
func (s *Server) countsOf(name string, errs bool) *counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.kept {
		if c.zone == name {
			c.mu.Lock()
			c.errs = errs
			c.mu.Unlock()
			return c
		}
	}
	c := newCounts(name, s.cfg.Log)
	c.errs = errs
	if len(s.kept) < maxCounted {
		s.kept = append(s.kept, c)
	}
	return c
}

// maxCounted bounds the zones that figures are kept of.
const maxCounted = 256
