package peernet

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"

	"keelson.dev/keelson/raftstore/disk"
)

// A raft cluster has an identity: a random string that is created when the cluster is bootstrapped,
// restored from a backup, or recovered after the loss of its majority. Every raft connection starts
// with it. raft itself accepts messages of any sender that contain a later term. A lost member that
// returns after its cluster was recovered without it must not be able to send such messages.
//
// A replica without data has no identity. It accepts no raft messages until the leader of a cluster
// has admitted it, which is part of adding a member. A voter that has lost its disk can therefore
// not vote again without its previous votes: it must be removed and added again.

// firstGroup is the identity of raft clusters that were created before identities existed.
const firstGroup = "first"

// PrefixBytes is the length of the prefix of every raft connection: a marker and the padded
// identity.
const PrefixBytes = 48

var (
	errNotAdmitted  = errors.New("replica has not been admitted to a raft cluster")
	ErrAnotherGroup = errors.New("peer belongs to another raft cluster")
)

// ClusterIdentity is the identity of this replica's raft cluster; "" if it has none yet. It is safe
// for concurrent use after LoadID.
type ClusterIdentity struct {
	log    *slog.Logger
	stable raft.StableStore
	known  atomic.Pointer[string]

	mu     sync.Mutex
	warned time.Time
}

// LoadID reads the identity from the stable store. empty reports whether the disk contains no other
// data of a replica.
func (g *ClusterIdentity) LoadID(stable raft.StableStore, empty bool, log *slog.Logger) error {
	g.stable, g.log = stable, log
	id, err := stable.Get(disk.KeyRaftClusterID)
	if err != nil && err.Error() != raftboltdb.ErrKeyNotFound.Error() {
		return fmt.Errorf("reading the identity of the raft cluster: %w", err)
	}
	if len(id) == 0 && !empty {
		id = []byte(firstGroup)
	}
	g.SetID(string(id))
	return nil
}

func (g *ClusterIdentity) SetID(id string) { g.known.Store(&id) }

func (g *ClusterIdentity) ID() string {
	if id := g.known.Load(); id != nil {
		return *id
	}
	return ""
}

// JoinCluster makes this replica a member of a raft cluster. The identity is written to the disk
// before it takes effect.
func (g *ClusterIdentity) JoinCluster(id string) error {
	if err := g.stable.Set(disk.KeyRaftClusterID, []byte(id)); err != nil {
		return fmt.Errorf("writing the identity of the raft cluster: %w", err)
	}
	g.SetID(id)
	return nil
}

// IsForeign reports whether the identity received in a request is that of another raft cluster. A
// request without an identity is not foreign.
func (g *ClusterIdentity) IsForeign(received string) bool {
	return received != "" && received != g.ID()
}

func (g *ClusterIdentity) connPrefix() []byte {
	p := make([]byte, PrefixBytes)
	copy(p, "keelson:")
	copy(p[8:], g.ID())
	return p
}

func (g *ClusterIdentity) warnLimited(msg string, args ...any) {
	g.mu.Lock()
	again := time.Since(g.warned) > time.Minute
	if again {
		g.warned = time.Now()
	}
	g.mu.Unlock()
	if again {
		g.log.Warn(msg, args...)
	}
}

// IdentifiedStreams is a raft.StreamLayer. Its connections start with the identity of the cluster.
type IdentifiedStreams struct {
	raft.StreamLayer
	Group *ClusterIdentity
}

// Dial implements raft.StreamLayer.
func (s *IdentifiedStreams) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	conn, err := s.StreamLayer.Dial(address, timeout)
	if err != nil {
		return nil, err
	}
	if err := conn.SetWriteDeadline(time.Now().Add(timeout)); err == nil {
		_, err = conn.Write(s.Group.connPrefix())
	}
	if err == nil {
		err = conn.SetWriteDeadline(time.Time{})
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("sending the cluster identity to replica at %s: %w", address, err)
	}
	return conn, nil
}

// Accept implements net.Listener. The first read of the connection checks the identity, so that a
// silent peer does not block other connections.
func (s *IdentifiedStreams) Accept() (net.Conn, error) {
	conn, err := s.StreamLayer.Accept()
	if err != nil {
		return nil, err
	}
	return &identifiedConn{Conn: conn, group: s.Group}, nil
}

type identifiedConn struct {
	net.Conn
	group   *ClusterIdentity
	greeted bool
}

// Read implements net.Conn. It must not be called concurrently.
func (c *identifiedConn) Read(b []byte) (int, error) {
	if !c.greeted {
		if err := c.checkIdentity(); err != nil {
			return 0, err
		}
		c.greeted = true
	}
	return c.Conn.Read(b)
}

func (c *identifiedConn) checkIdentity() error {
	if c.group.ID() == "" {
		c.group.warnLimited(
			"raft connection refused: this replica has no data and must be added to the raft cluster; "+
				"if its name is a member already, remove that member first",
			"from", c.RemoteAddr().String())
		return errNotAdmitted
	}
	want, got := c.group.connPrefix(), make([]byte, 0, PrefixBytes)
	for len(got) < PrefixBytes {
		n, err := c.Conn.Read(got[len(got):PrefixBytes])
		got = got[:len(got)+n]
		if !bytes.HasPrefix(want, got) {
			c.group.warnLimited("raft connection of another raft cluster refused", "from", c.RemoteAddr().String())
			return ErrAnotherGroup
		}
		if err != nil {
			return err
		}
	}
	return nil
}
