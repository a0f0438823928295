package replica

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
)

// A group of replicas has an identity of its own: a random one from when it was
// founded, restored from a backup or recovered from a lost majority. Every raft
// connection begins with it, because raft itself believes any sender that names
// a later term: a member that was lost and comes back after its group has been
// recovered without it must not be heard.
//
// A replica without data has no group, and takes no raft traffic until the
// leader of one has admitted it, which is part of being added. So a voter whose
// disk was lost cannot vote in forgetfulness of what it had promised: it must be
// removed and added again.

// firstGroup is the identity of groups founded before there were identities.
const firstGroup = "first"

// prefaceBytes is what every raft connection begins with: a mark and the
// group's identity, padded.
const prefaceBytes = 48

var (
	errNotAdmitted  = errors.New("replica has not been admitted to a group")
	errAnotherGroup = errors.New("peer belongs to another group")
)

// group is the identity of this replica's group; "" when it has none yet.
type group struct {
	log    *slog.Logger
	stable raft.StableStore
	known  atomic.Pointer[string]

	mu     sync.Mutex
	warned time.Time
}

// load reads the identity from the disk; empty says whether that holds nothing else.
func (g *group) load(stable raft.StableStore, empty bool, log *slog.Logger) error {
	g.stable, g.log = stable, log
	id, err := stable.Get(disk.KeyGroup)
	if err != nil && err.Error() != raftboltdb.ErrKeyNotFound.Error() {
		return fmt.Errorf("reading the identity of the group: %w", err)
	}
	if len(id) == 0 && !empty {
		id = []byte(firstGroup)
	}
	g.hold(string(id))
	return nil
}

func (g *group) hold(id string) { g.known.Store(&id) }

func (g *group) id() string {
	if id := g.known.Load(); id != nil {
		return *id
	}
	return ""
}

// join makes this replica one of a group, on disk first.
func (g *group) join(id string) error {
	if err := g.stable.Set(disk.KeyGroup, []byte(id)); err != nil {
		return fmt.Errorf("writing the identity of the group: %w", err)
	}
	g.hold(id)
	return nil
}

// strangers reports whether a request names a group that is not this replica's.
func (g *group) strangers(theirs string) bool { return theirs != "" && theirs != g.id() }

func (g *group) preface() []byte {
	p := make([]byte, prefaceBytes)
	copy(p, "keelson:")
	copy(p[8:], g.id())
	return p
}

func (g *group) warn(msg string, args ...any) {
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

// groupStreams is a stream layer whose connections begin with the group's identity.
type groupStreams struct {
	raft.StreamLayer
	group *group
}

// Dial implements raft.StreamLayer.
func (s *groupStreams) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	conn, err := s.StreamLayer.Dial(address, timeout)
	if err != nil {
		return nil, err
	}
	if err := conn.SetWriteDeadline(time.Now().Add(timeout)); err == nil {
		_, err = conn.Write(s.group.preface())
	}
	if err == nil {
		err = conn.SetWriteDeadline(time.Time{})
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("greeting replica at %s: %w", address, err)
	}
	return conn, nil
}

// Accept implements net.Listener. The identity is looked at by the first read,
// so that a silent peer holds up nobody.
func (s *groupStreams) Accept() (net.Conn, error) {
	conn, err := s.StreamLayer.Accept()
	if err != nil {
		return nil, err
	}
	return &greetedConn{Conn: conn, group: s.group}, nil
}

type greetedConn struct {
	net.Conn
	group   *group
	greeted bool
}

// Read is called by one goroutine at a time.
func (c *greetedConn) Read(b []byte) (int, error) {
	if !c.greeted {
		if err := c.greet(); err != nil {
			return 0, err
		}
		c.greeted = true
	}
	return c.Conn.Read(b)
}

func (c *greetedConn) greet() error {
	if c.group.id() == "" {
		c.group.warn("raft traffic for a replica without data: it must be added to the group; if its name is a member already, remove that first",
			"from", c.RemoteAddr().String())
		return errNotAdmitted
	}
	want, got := c.group.preface(), make([]byte, 0, prefaceBytes)
	for len(got) < prefaceBytes {
		n, err := c.Conn.Read(got[len(got):prefaceBytes])
		got = got[:len(got)+n]
		if !bytes.HasPrefix(want, got) {
			c.group.warn("raft traffic of another group refused", "from", c.RemoteAddr().String())
			return errAnotherGroup
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// admit makes sure that the replica at an address is the one to be added and
// belongs to this group, or to none yet: then it is admitted. is is what the
// configuration knows of the name. A member that is settled may be away.
func (r *Replica) admit(ctx context.Context, id, address string, is raft.Server, settled bool) (level uint32, err error) {
	client, err := r.peers.client(address)
	if err != nil {
		return 0, err
	}
	for {
		ask, cancel := context.WithTimeout(ctx, askMember)
		state, err := client.State(ask, &storev1.StateRequest{})
		cancel()
		if err == nil && !settled && state.GetId() == id {
			if err := r.understands(ctx, id, state.GetFeatureLevel()); err != nil {
				return 0, err
			}
		}
		switch {
		case err != nil:
			if settled {
				return 0, nil
			}
		case state.GetId() != id:
			return 0, fmt.Errorf("%w: the replica at %s is %q and not %q", raftstore.ErrInvalid, address, state.GetId(), id)
		case state.GetGroup() == r.group.id():
			return state.GetFeatureLevel(), nil
		case state.GetGroup() != "":
			return 0, fmt.Errorf("%w: the replica at %s has the data of another group: set that aside first", raftstore.ErrInvalid, address)
		case is.ID != "" && is.Suffrage == raft.Voter:
			return 0, fmt.Errorf("%w: %s is a voter, and the replica at %s has lost its disk: remove %s first, then add it",
				raftstore.ErrMemberExists, id, address, id)
		default:
			_, err := client.Admit(ctx, &storev1.AdmitRequest{Id: id, Group: r.group.id()})
			return state.GetFeatureLevel(), fromStatus(err)
		}
		if r.lead.established() == nil {
			return 0, raftstore.ErrNotLeader
		}
		if stop := r.pause(ctx); stop != nil {
			return 0, fmt.Errorf("waiting for the replica at %s: %w (last attempt: %w)", address, stop, err)
		}
	}
}

// admitHere makes this replica, if it has no data, one of a group.
func (r *Replica) admitHere(id, groupID string) error {
	switch mine := r.group.id(); {
	case id != r.cfg.Name:
		return fmt.Errorf("%w: this replica is %q and not %q", raftstore.ErrInvalid, r.cfg.Name, id)
	case groupID == "" || len(groupID) > prefaceBytes-8:
		return fmt.Errorf("%w: identity of a group of %d bytes", raftstore.ErrInvalid, len(groupID))
	case mine == groupID:
		return nil
	case mine != "":
		return fmt.Errorf("%w: replica %s belongs to another group", raftstore.ErrInvalid, id)
	}
	if err := r.group.join(groupID); err != nil {
		return err
	}
	r.log.Info("admitted to a group", "group", groupID)
	return nil
}
