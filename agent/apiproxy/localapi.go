// Package apiproxy forwards connections from a loopback address of the node to a ready replica of
// the control plane. Programs on the node need neither a load balancer nor a list of replicas. TLS
// is end to end between the client and the replica; replica certificates include 127.0.0.1.
//
// The replicas come from the EndpointSlice of Service default/kubernetes in the agent's view of the
// cluster, which may come from the checkpoint on disk. For a short time, a replica that could not
// be reached is tried last. Connections to a replica that is no longer in the slice are closed
// after a delay, so that their clients reconnect to another replica.
package apiproxy

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wait"
)

const (
	// maxConns is the default limit of concurrent connections, each of which uses two file
	// descriptors.
	maxConns = 1024
	// dialTimeout is the timeout for connecting to one replica. Connecting takes far less time on
	// every link that is fast enough for a cluster.
	dialTimeout = time.Second
	// failedPenalty is the time during which a replica that could not be reached is tried last.
	failedPenalty = 5 * time.Second
	// defaultDrainTime is the default of Config.DrainTime.
	defaultDrainTime = 10 * time.Second
	// listenRetry is the delay before listening is tried again, if another program uses the
	// address.
	listenRetry = 10 * time.Second
	// userTimeout is the maximum time that data sent to a replica may remain unacknowledged.
	userTimeout = 10 * time.Second
)

// keepAlive are the TCP keep-alive settings that detect replicas on failed machines.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: time.Second, Count: 5}

// Config is the configuration of a Server.
type Config struct {
	Address netip.AddrPort // loopback address to listen on
	Log     *slog.Logger
	Limit   int // maximum number of concurrent connections; 0 = 1024
	// DrainTime is how long connections to a removed replica are kept; 0 = ten seconds.
	DrainTime time.Duration
}

// Server forwards connections from a loopback address to the API of a ready replica.
type Server struct {
	cfg Config

	mu      sync.Mutex
	next    int
	failed  map[netip.AddrPort]time.Time // key: replica that could not be reached; value: time of the failure
	open    map[*proxiedConn]struct{}
	refused bool // reaching the limit has been logged
}

// proxiedConn is one connection that is forwarded to a replica.
type proxiedConn struct {
	client, replica net.Conn
	replicaAddr     netip.AddrPort
}

func (c *proxiedConn) closeBoth() {
	c.client.Close()
	c.replica.Close()
}

// New returns a Server. It does not listen before Run.
func New(cfg Config) *Server {
	cfg.DrainTime, cfg.Limit = cmp.Or(cfg.DrainTime, defaultDrainTime), cmp.Or(cfg.Limit, maxConns)
	return &Server{cfg: cfg, failed: map[netip.AddrPort]time.Time{}, open: map[*proxiedConn]struct{}{}}
}

// Run forwards connections until ctx ends. If another program uses the address, it logs this once
// and retries.
func (s *Server) Run(ctx context.Context, objects agent.Objects, _ agent.Reporter) error {
	ln, err := s.waitForAddress(ctx)
	if err != nil {
		return err
	}
	return s.Serve(ctx, ln, objects)
}

// waitForAddress listens on the configured address and returns the listener. It retries while
// another program uses the address.
func (s *Server) waitForAddress(ctx context.Context) (net.Listener, error) {
	for told := false; ; {
		ln, err := new(net.ListenConfig).Listen(ctx, "tcp", s.cfg.Address.String())
		if err == nil {
			return ln, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, errors.Join(errors.New("listening for clients of the API on this node: --local-api-address"),
				err)
		}
		if !told {
			told = true
			s.cfg.Log.Warn("another program uses the address for clients of the API on this node: 'ss -ltnp' shows "+
				"which one; --local-api-address selects another address", "address", s.cfg.Address)
		}
		if err := wait.Delay(ctx, listenRetry); err != nil {
			return nil, err
		}
	}
}

// Serve forwards the connections that ln accepts. It closes ln.
func (s *Server) Serve(ctx context.Context, ln net.Listener, objects agent.Objects) error {
	var conns sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer conns.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		ln.Close()
		s.closeAll(func(*proxiedConn) bool { return true })
	})()
	conns.Go(func() { s.drainRemoved(ctx, objects) })
	slots := make(chan struct{}, s.cfg.Limit)
	for {
		client, err := ln.Accept()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		select {
		case slots <- struct{}{}:
			conns.Go(func() {
				defer func() { <-slots }()
				s.proxyConnection(ctx, client, objects)
			})
		default:
			client.Close()
			s.logRefused()
		}
	}
}

func (s *Server) logRefused() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.refused {
		s.refused = true
		s.cfg.Log.Warn("connections to the API on this node are refused: the limit is reached", "limit", s.cfg.Limit,
			"address", s.cfg.Address)
	}
}

// proxyConnection connects a client to a ready replica and forwards data in both directions. It
// returns when one of them closes the connection.
func (s *Server) proxyConnection(ctx context.Context, client net.Conn, objects agent.Objects) {
	defer client.Close()
	c := &proxiedConn{client: client}
	for _, to := range s.rotateReplicas(s.withoutSelf(readyReplicas(objects)), time.Now()) {
		d := net.Dialer{Timeout: dialTimeout, KeepAliveConfig: keepAlive, Control: configureSocket}
		replica, err := d.DialContext(ctx, "tcp", to.String())
		s.recordDial(to, err == nil)
		if err == nil {
			c.replica, c.replicaAddr = replica, to
			break
		}
	}
	if c.replica == nil {
		return // the client's connection is closed
	}
	s.mu.Lock()
	s.open[c] = struct{}{}
	s.mu.Unlock()
	defer func() {
		c.closeBoth()
		s.mu.Lock()
		delete(s.open, c)
		s.mu.Unlock()
	}()
	if ctx.Err() != nil {
		return // closeAll may already have run
	}
	copyBothWays(client, c.replica)
}

// configureSocket sets, on a connection to a replica, the packet mark that exempts it from Service
// rules, and the timeout for unacknowledged data.
func configureSocket(network, address string, raw syscall.RawConn) error {
	err := agent.MarkReplicaConn(network, address, raw)
	if err != nil {
		return err
	}
	return errors.Join(raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
	}), err)
}

// copyBothWays copies data between two connections in both directions, until both directions have
// ended or one has failed.
func copyBothWays(a, b net.Conn) {
	var both sync.WaitGroup
	one := func(to, from net.Conn) {
		if _, err := io.Copy(to, from); err != nil {
			a.Close()
			b.Close()
			return
		}
		if c, ok := to.(interface{ CloseWrite() error }); ok {
			c.CloseWrite()
		}
	}
	both.Go(func() { one(a, b) })
	both.Go(func() { one(b, a) })
	both.Wait()
}

// readyReplicas returns the addresses of the ready replicas, in the order of the EndpointSlice of
// default/kubernetes.
func readyReplicas(objects agent.Objects) []netip.AddrPort {
	slice, ok := objects.EndpointSlice("default", "kubernetes")
	if !ok || len(slice.Ports) == 0 || slice.Ports[0].Port == nil {
		return nil
	}
	var out []netip.AddrPort
	for _, e := range slice.Endpoints {
		if e.Conditions.Ready != nil && !*e.Conditions.Ready {
			continue
		}
		for _, a := range e.Addresses {
			if ip, err := netip.ParseAddr(a); err == nil {
				out = append(out, netip.AddrPortFrom(ip, uint16(*slice.Ports[0].Port)))
			}
		}
	}
	return out
}

// withoutSelf returns the replica addresses without the address of this server. A replica that
// advertises this address would otherwise cause a loop.
func (s *Server) withoutSelf(replicas []netip.AddrPort) []netip.AddrPort {
	return slices.DeleteFunc(replicas, func(a netip.AddrPort) bool { return a == s.cfg.Address })
}

// rotateReplicas returns the replica addresses in the order in which to try them. Each call starts
// with a different replica. Replicas that recently could not be reached come last.
func (s *Server) rotateReplicas(replicas []netip.AddrPort, now time.Time) []netip.AddrPort {
	if len(replicas) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	at := s.next % len(replicas)
	out := slices.Concat(replicas[at:], replicas[:at])
	slices.SortStableFunc(out, func(a, b netip.AddrPort) int {
		return cmp.Compare(s.failurePenalty(a, now), s.failurePenalty(b, now))
	})
	return out
}

func (s *Server) failurePenalty(a netip.AddrPort, now time.Time) int {
	if at, ok := s.failed[a]; ok && now.Sub(at) < failedPenalty {
		return 1
	}
	return 0
}

// recordDial records whether connecting to the replica with this address succeeded.
func (s *Server) recordDial(replica netip.AddrPort, succeeded bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.failed, replica); !succeeded {
		s.failed[replica] = time.Now()
	}
}

// drainRemoved closes connections to replicas that have been missing in the list of replicas for
// DrainTime. It runs until ctx ends.
func (s *Server) drainRemoved(ctx context.Context, objects agent.Objects) {
	changes := objects.Follow(ctx, "EndpointSlice")
	gone := map[netip.AddrPort]time.Time{} // replica → when it was removed from the list
	due := time.NewTimer(time.Hour)
	defer due.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case c, ok := <-changes:
			if !ok {
				return
			}
			if _, ours := c.Keys[agent.ObjectKey{Kind: "EndpointSlice", Namespace: "default",
				Name: "kubernetes"}]; !c.All && !ours {
				continue
			}
		case <-due.C:
		}
		due.Reset(s.closeDrained(readyReplicas(objects), gone, time.Now()))
	}
}

// closeDrained closes the connections to replicas that have been missing in listed for DrainTime.
// It returns the delay after which it must be called again. If listed is empty, the list itself is
// missing, and no connection is closed. gone maps missing replicas to the time of removal.
func (s *Server) closeDrained(listed []netip.AddrPort, gone map[netip.AddrPort]time.Time, now time.Time) time.Duration {
	next := time.Hour
	for _, a := range listed {
		delete(gone, a)
	}
	if len(listed) == 0 {
		return next
	}
	s.mu.Lock()
	used := map[netip.AddrPort]bool{}
	for c := range s.open {
		used[c.replicaAddr] = true
	}
	for a := range s.failed {
		if !slices.Contains(listed, a) {
			delete(s.failed, a)
		}
	}
	s.mu.Unlock()
	for a := range gone {
		if !used[a] {
			delete(gone, a)
		}
	}
	for a := range used {
		if slices.Contains(listed, a) {
			continue
		}
		since, known := gone[a]
		if !known {
			since, gone[a] = now, now
		}
		if left := s.cfg.DrainTime - now.Sub(since); left > 0 {
			next = min(next, left)
			continue
		}
		s.cfg.Log.Info("closing the connections to a replica that is no longer ready", "replica", a)
		s.closeAll(func(c *proxiedConn) bool { return c.replicaAddr == a })
		delete(gone, a)
	}
	return next
}

func (s *Server) closeAll(which func(*proxiedConn) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		if which(c) {
			c.closeBoth()
		}
	}
}
