package server

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/connlimit"
)

// errNotMember: a replica of this cluster by its certificate, but no member of the group.
var errNotMember = errors.New("it is no member of the group (any more): 'kctl cluster member list' shows who is")

// gate lets members of the group through the peer port and nobody else. A
// certificate says that its holder was made a replica once; the group says who
// is one now. A replica whose own list may be old refuses nobody for it:
// its next leader may be one that it has not heard of yet.
type gate struct {
	self    string
	members func() []raftMember // as this replica knows them
	settled func() bool         // this replica hears a leader, so its list is that of the group
	joins   bool                // it was none's member when it was started: its list begins with that of the group's first day
	log     *slog.Logger

	mu      sync.Mutex
	open    map[*peerConn]string // connections whose handshake is done, and whose they are
	refused map[string]bool      // said once per name
}

func newGate(self string, members func() []raftMember, settled func() bool, log *slog.Logger) *gate {
	return &gate{self: self, members: members, settled: settled, log: log, open: map[*peerConn]string{}, refused: map[string]bool{}}
}

// admits says whether a replica may speak now.
func (g *gate) admits(name string) error {
	list := g.members()
	mine := false
	for _, m := range list {
		if m.ID == name {
			return nil
		}
		mine = mine || m.ID == g.self
	}
	switch {
	case !mine: // a newcomer, or one that was removed itself: it cannot judge
		return nil
	case (len(list) > 1 || g.joins) && !g.settled():
		return nil
	}
	// Alone in its group, a replica needs nobody and its list cannot be old:
	// replicas that do not know of a restore or a recovery must not take it over.
	// The founder's, who joins anew with an empty disk, is, until it has the whole
	// log: were its leader refused then, it would never have more.
	return fmt.Errorf("replica %q: %w", name, errNotMember)
}

// guard makes the serving side of base ask the gate at every handshake.
func (g *gate) guard(base *tls.Config) *tls.Config {
	out := base.Clone()
	out.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		c, err := base.GetConfigForClient(h)
		if err != nil {
			return nil, err
		}
		c = c.Clone()
		verify := c.VerifyConnection
		c.VerifyConnection = func(cs tls.ConnectionState) error {
			if err := verify(cs); err != nil {
				return err
			}
			return g.enter(cs, h.Conn)
		}
		return c, nil
	}
	return out
}

func (g *gate) enter(cs tls.ConnectionState, conn net.Conn) error {
	name, err := pki.PeerName(cs)
	if err != nil {
		return err
	}
	err = g.admits(name)
	g.mu.Lock()
	defer g.mu.Unlock()
	if err != nil {
		if !g.refused[name] {
			g.refused[name] = true
			g.log.Warn("replica refused at the peer port", "peer", name, "address", conn.RemoteAddr(), "err", err)
		}
		return err
	}
	delete(g.refused, name)
	if p, ok := conn.(*peerConn); ok && !p.closed {
		g.open[p] = name
		connlimit.FromConn(p.Conn).MarkAuthenticated()
	}
	return nil
}

// sweep cuts the connections of those who are members no more.
func (g *gate) sweep() {
	g.mu.Lock()
	names := map[string]bool{}
	for _, n := range g.open {
		names[n] = true
	}
	g.mu.Unlock()
	for n := range names {
		if err := g.admits(n); err == nil {
			continue
		}
		g.mu.Lock()
		var cut []*peerConn
		for c, name := range g.open {
			if name == n {
				cut = append(cut, c)
			}
		}
		g.mu.Unlock()
		for _, c := range cut {
			c.Close()
		}
		g.log.Info("connections of a former member are cut", "peer", n, "connections", len(cut))
	}
}

// listen makes the listener's connections known to the gate, and keeps those few
// that nobody has let in yet.
func (g *gate) listen(l net.Listener) net.Listener {
	return &gateListener{connlimit.New(l, connlimit.Limits{Total: connlimit.OpenFilesShare(1, 8), Unauthenticated: 128, UnauthenticatedPerSource: 32}), g}
}

type gateListener struct {
	net.Listener
	gate *gate
}

func (l *gateListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &peerConn{Conn: c, gate: l.gate}, nil
}

// peerConn leaves the gate's book when it is closed.
type peerConn struct {
	net.Conn
	gate   *gate
	closed bool // guarded by gate.mu
}

func (c *peerConn) Close() error {
	c.gate.mu.Lock()
	c.closed = true
	delete(c.gate.open, c)
	c.gate.mu.Unlock()
	return c.Conn.Close()
}
