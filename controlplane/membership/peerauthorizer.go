package membership

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/raftstore"
)

// errNotMember is the reason why a replica with a valid certificate may not connect.
var errNotMember = errors.New("it is not a member of the raft cluster: 'kctl cluster member list' lists the members")

// peerAuthorizer admits only members to the peer port, on which replicas exchange raft messages. A
// certificate proves only that its holder was a replica when the certificate was issued. The list
// of members decides whether the holder is still a replica. If the list may be out of date, no
// connection is refused because of it: the peer may be the next leader.
type peerAuthorizer struct {
	selfName string
	// returns the members according to the log entries that this replica has applied
	listMembers func() []raftstore.Member
	// reports whether this replica has a leader and has caught up, so that its list is current
	listIsCurrent func() bool
	// this replica is joining: it applies the log from its start, so its first lists of members are
	// old
	joining bool
	log     *slog.Logger

	mu sync.Mutex
	// the open connections that have completed their handshake, with the names of the peers
	connections    map[*peerConn]string
	loggedRefusals map[string]bool // names of the replicas for which a refused connection was logged
}

func newPeerAuthorizer(
	self string, listMembers func() []raftstore.Member, listIsCurrent func() bool, log *slog.Logger,
) *peerAuthorizer {
	return &peerAuthorizer{selfName: self, listMembers: listMembers, listIsCurrent: listIsCurrent, log: log,
		connections:    map[*peerConn]string{},
		loggedRefusals: map[string]bool{}}
}

// admitMember returns nil if the replica with the given name may connect. Otherwise the error wraps
// errNotMember.
func (g *peerAuthorizer) admitMember(name string) error {
	list := g.listMembers()
	selfIsMember := false
	for _, m := range list {
		if m.ID == name {
			return nil
		}
		selfIsMember = selfIsMember || m.ID == g.selfName
	}
	switch {
	case !selfIsMember: // this replica is joining or was removed, so its list cannot be used
		return nil
	case (len(list) > 1 || g.joining) && !g.listIsCurrent():
		return nil
	}
	// A list that contains only this replica cannot be out of date: the replica is its own
	// majority. It refuses replicas that still have the data from before a restore or recovery.
	// There is one exception: the first replica of the cluster, if it lost its data and joins
	// again. Until it has the whole log, its list contains only its own name, and it must accept
	// the leader that sends the log.
	return fmt.Errorf("replica %q: %w", name, errNotMember)
}

// guardTLS returns a copy of base in which every handshake also checks that the peer is a member
// (admitConn).
func (g *peerAuthorizer) guardTLS(base *tls.Config) *tls.Config {
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
			return g.admitConn(cs, h.Conn)
		}
		return c, nil
	}
	return out
}

// admitConn returns an error if the peer of the connection conn is not a member. Otherwise it
// registers conn, so that closeRemoved can close it.
func (g *peerAuthorizer) admitConn(cs tls.ConnectionState, conn net.Conn) error {
	name, err := pki.PeerName(cs)
	if err != nil {
		return err
	}
	err = g.admitMember(name)
	g.mu.Lock()
	defer g.mu.Unlock()
	if err != nil {
		if !g.loggedRefusals[name] {
			g.loggedRefusals[name] = true
			g.log.Warn("connection of a replica at the peer port refused", "peer", name, "address",
				conn.RemoteAddr(), "err", err)
		}
		return err
	}
	delete(g.loggedRefusals, name)
	if p, ok := conn.(*peerConn); ok && !p.closed {
		g.connections[p] = name
		connlimit.FromConn(p.Conn).MarkAuthenticated()
	}
	return nil
}

// closeRemoved closes the connections of replicas that are no longer members.
func (g *peerAuthorizer) closeRemoved() {
	g.mu.Lock()
	names := map[string]bool{}
	for _, n := range g.connections {
		names[n] = true
	}
	g.mu.Unlock()
	for n := range names {
		if err := g.admitMember(n); err == nil {
			continue
		}
		g.mu.Lock()
		var cut []*peerConn
		for c, name := range g.connections {
			if name == n {
				cut = append(cut, c)
			}
		}
		g.mu.Unlock()
		for _, c := range cut {
			c.Close()
		}
		g.log.Info("connections of a removed member closed", "peer", n, "connections", len(cut))
	}
}

// wrapListener returns a listener with connections that admitConn can register. It limits the
// number of connections: in total, and before their handshake.
func (g *peerAuthorizer) wrapListener(l net.Listener) net.Listener {
	return &peerListener{connlimit.New(l, connlimit.Limits{Total: connlimit.OpenFilesShare(1, 8), Unauthenticated: 128,
		UnauthenticatedPerSource: 32}), g}
}

type peerListener struct {
	net.Listener
	authorizer *peerAuthorizer
}

func (l *peerListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &peerConn{Conn: c, authorizer: l.authorizer}, nil
}

// peerConn is an accepted connection to the peer port. It unregisters itself from the authorizer
// when it is closed.
type peerConn struct {
	net.Conn
	authorizer *peerAuthorizer
	closed     bool // guarded by authorizer.mu
}

func (c *peerConn) Close() error {
	c.authorizer.mu.Lock()
	c.closed = true
	delete(c.authorizer.connections, c)
	c.authorizer.mu.Unlock()
	return c.Conn.Close()
}
