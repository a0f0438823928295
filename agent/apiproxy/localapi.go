// Package apiproxy leads connections to an address of the node's loopback on to a replica of the control plane that is
// ready, whichever that is: who runs on the node needs no load balancer and no list of replicas. TLS is between the
// client and the replica, whose certificate names 127.0.0.1.
//
// Replicas are taken from the EndpointSlice of Service default/kubernetes, as the agent knows it: from its checkpoint
// while no replica has answered yet. One that cannot be reached is left out for a moment. A connection to a replica that
// has been out of the slice for a while is closed, so that its client, a watch perhaps, goes on elsewhere.
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
	// maxConns is how many connections are led on at a time, of two files each.
	maxConns = 1024
	// dialTimeout is how long one replica may take to answer a dial: on a link that a cluster lives on, it takes far less.
	dialTimeout = time.Second
	// shunned is how long a replica that did not answer is asked last.
	shunned = 5 * time.Second
	// parting is how long the requests of a replica that is no longer listed have to end by themselves.
	parting = 10 * time.Second
	// listenAgain is when an address that another program has is asked for again.
	listenAgain = 10 * time.Second
	// unacknowledged is how long what was sent to a replica may wait for its acknowledgement.
	unacknowledged = 10 * time.Second
)

// vanished has the kernel find replicas whose machine is gone without a word.
var vanished = net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: time.Second, Count: 5}

// Config is what a Server is made of.
type Config struct {
	Address netip.AddrPort // where it listens, on loopback
	Log     *slog.Logger
	Limit   int // connections at a time; 0: 1024
	// Parting is how long connections outlive the listing of their replica; 0: ten seconds.
	Parting time.Duration
}

// Server leads connections on.
type Server struct {
	cfg Config

	mu      sync.Mutex
	next    int
	failed  map[netip.AddrPort]time.Time // replicas that did not answer, and when
	open    map[*conn]struct{}
	refused bool // that there are too many was told
}

// conn is one connection that is led on.
type conn struct {
	client, replica net.Conn
	to              netip.AddrPort
}

func (c *conn) close() {
	c.client.Close()
	c.replica.Close()
}

// New makes a Server; it listens when it runs.
func New(cfg Config) *Server {
	cfg.Parting, cfg.Limit = cmp.Or(cfg.Parting, parting), cmp.Or(cfg.Limit, maxConns)
	return &Server{cfg: cfg, failed: map[netip.AddrPort]time.Time{}, open: map[*conn]struct{}{}}
}

// Run leads connections on until ctx ends. An address that another program has is told once and asked for again.
func (s *Server) Run(ctx context.Context, objects agent.Objects, _ agent.Reporter) error {
	ln, err := s.listen(ctx)
	if err != nil {
		return err
	}
	return s.Serve(ctx, ln, objects)
}

// listen waits for the address.
func (s *Server) listen(ctx context.Context) (net.Listener, error) {
	for told := false; ; {
		ln, err := new(net.ListenConfig).Listen(ctx, "tcp", s.cfg.Address.String())
		if err == nil {
			return ln, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, errors.Join(errors.New("listening for clients of the API on this node: --local-api-address"), err)
		}
		if !told {
			told = true
			s.cfg.Log.Warn("the address for clients of the API on this node is another program's: 'ss -ltnp' tells whose; --local-api-address moves it", "address", s.cfg.Address)
		}
		if err := wait.Delay(ctx, listenAgain); err != nil {
			return nil, err
		}
	}
}

// Serve leads on what comes to ln, which it closes.
func (s *Server) Serve(ctx context.Context, ln net.Listener, objects agent.Objects) error {
	var conns sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer conns.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		ln.Close()
		s.closeAll(func(*conn) bool { return true })
	})()
	conns.Go(func() { s.part(ctx, objects) })
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
				s.lead(ctx, client, objects)
			})
		default:
			client.Close()
			s.tooMany()
		}
	}
}

func (s *Server) tooMany() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.refused {
		s.refused = true
		s.cfg.Log.Warn("connections to the API on this node are refused: there are too many", "limit", s.cfg.Limit, "address", s.cfg.Address)
	}
}

// lead joins a client to a replica until one of them ends.
func (s *Server) lead(ctx context.Context, client net.Conn, objects agent.Objects) {
	defer client.Close()
	c := &conn{client: client}
	for _, to := range s.inTurn(s.own(replicas(objects)), time.Now()) {
		d := net.Dialer{Timeout: dialTimeout, KeepAliveConfig: vanished, Control: impatient}
		replica, err := d.DialContext(ctx, "tcp", to.String())
		s.answered(to, err == nil)
		if err == nil {
			c.replica, c.to = replica, to
			break
		}
	}
	if c.replica == nil {
		return // the client sees that nobody is there
	}
	s.mu.Lock()
	s.open[c] = struct{}{}
	s.mu.Unlock()
	defer func() {
		c.close()
		s.mu.Lock()
		delete(s.open, c)
		s.mu.Unlock()
	}()
	if ctx.Err() != nil {
		return // whoever closes all may have passed already
	}
	join(client, c.replica)
}

// impatient has a connection end when what was sent is not acknowledged, and marks it as one to a replica.
func impatient(network, address string, raw syscall.RawConn) error {
	err := agent.MarkReplicaConn(network, address, raw)
	if err != nil {
		return err
	}
	return errors.Join(raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(unacknowledged.Milliseconds()))
	}), err)
}

// join copies both ways until both have ended, or one has failed.
func join(a, b net.Conn) {
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

// replicas are those that are ready, in the slice's order.
func replicas(objects agent.Objects) []netip.AddrPort {
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

// own leaves out the address that is listened at: a replica that was told to advertise it would be led to itself for ever.
func (s *Server) own(all []netip.AddrPort) []netip.AddrPort {
	return slices.DeleteFunc(all, func(a netip.AddrPort) bool { return a == s.cfg.Address })
}

// inTurn has each replica be the first in turn; those that did not answer lately come last.
func (s *Server) inTurn(all []netip.AddrPort, now time.Time) []netip.AddrPort {
	if len(all) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.next++
	at := s.next % len(all)
	out := slices.Concat(all[at:], all[:at])
	slices.SortStableFunc(out, func(a, b netip.AddrPort) int { return cmp.Compare(s.shuns(a, now), s.shuns(b, now)) })
	return out
}

func (s *Server) shuns(a netip.AddrPort, now time.Time) int {
	if at, ok := s.failed[a]; ok && now.Sub(at) < shunned {
		return 1
	}
	return 0
}

// answered remembers who did not answer.
func (s *Server) answered(a netip.AddrPort, well bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.failed, a); !well {
		s.failed[a] = time.Now()
	}
}

// part closes connections to replicas that have not been listed for a while.
func (s *Server) part(ctx context.Context, objects agent.Objects) {
	changes := objects.Follow(ctx, "EndpointSlice")
	gone := map[netip.AddrPort]time.Time{} // since when
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
			if _, ours := c.Keys[agent.ObjectKey{Kind: "EndpointSlice", Namespace: "default", Name: "kubernetes"}]; !c.All && !ours {
				continue
			}
		case <-due.C:
		}
		due.Reset(s.partFrom(replicas(objects), gone, time.Now()))
	}
}

// partFrom closes what is due, and says when to call again. Nobody is parted from while nobody is listed: then it is the
// list that is missing.
func (s *Server) partFrom(listed []netip.AddrPort, gone map[netip.AddrPort]time.Time, now time.Time) time.Duration {
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
		used[c.to] = true
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
		if left := s.cfg.Parting - now.Sub(since); left > 0 {
			next = min(next, left)
			continue
		}
		s.cfg.Log.Info("connections to a replica that is not ready are closed", "replica", a)
		s.closeAll(func(c *conn) bool { return c.to == a })
		delete(gone, a)
	}
	return next
}

func (s *Server) closeAll(which func(*conn) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.open {
		if which(c) {
			c.close()
		}
	}
}
