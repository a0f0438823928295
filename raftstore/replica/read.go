package replica

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica/peernet"
	"keelson.dev/keelson/raftstore/replica/readindex"
)

// Get implements raftstore.Store.
func (r *Replica) Get(ctx context.Context, key string,
	o raftstore.ReadOptions) (raftstore.Item, raftstore.Revision, error) {
	v, err := r.reads.freshView(ctx, o)
	if err != nil {
		return raftstore.Item{}, 0, fmt.Errorf("get of %q: %w", key, err)
	}
	it, ok := v.Get(key)
	if !ok {
		return raftstore.Item{}, v.Revision(), fmt.Errorf("%q: %w", key, raftstore.ErrNotFound)
	}
	return it, v.Revision(), nil
}

// List implements raftstore.Store.
func (r *Replica) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.List, error) {
	v, err := r.reads.freshView(ctx, o.ReadOptions)
	if err != nil {
		return raftstore.List{}, fmt.Errorf("list of %q: %w", prefix, err)
	}
	return v.List(prefix, o)
}

// reader performs linearizable reads. It works on any replica.
type reader struct {
	node *node
	net  *network

	rounds   readindex.Coalescer
	caughtUp atomic.Bool // a first linearizable read has succeeded
}

func newReader(n *node, net *network) *reader {
	r := &reader{node: n, net: net}
	r.rounds.Round = r.readIndexRound
	return r
}

// freshView returns the current view. Unless the options request a local read, the view includes
// everything that was acknowledged before the call.
func (r *reader) freshView(ctx context.Context, o raftstore.ReadOptions) (*mvcc.View, error) {
	if err := r.node.awaitRunning(ctx); err != nil {
		return nil, err
	}
	if !o.Local {
		if _, err := r.syncIndex(ctx); err != nil {
			return nil, err
		}
	}
	return r.node.fsm.View(), nil
}

// Watch implements raftstore.Store. A watch without a start revision starts after everything that
// was acknowledged before the call, also on a replica that is still catching up.
func (r *Replica) Watch(ctx context.Context, prefix string, after raftstore.Revision) (raftstore.Watcher, error) {
	if err := r.node.awaitRunning(ctx); err != nil {
		return nil, fmt.Errorf("watch of %q: %w", prefix, err)
	}
	// another replica may have shown the revision before this one has applied and published it
	if after == 0 || after > r.node.fsm.Hub.Revision() {
		if _, err := r.reads.syncIndex(ctx); err != nil {
			return nil, fmt.Errorf("watch of %q: %w", prefix, err)
		}
	}
	w, err := r.node.fsm.Hub.Watch(ctx, prefix, after)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Sync implements raftstore.Store.
func (r *Replica) Sync(ctx context.Context) (raftstore.Revision, error) {
	if err := r.node.awaitRunning(ctx); err != nil {
		return 0, err
	}
	if _, err := r.reads.syncIndex(ctx); err != nil {
		return 0, err
	}
	return r.Applied(), nil
}

// Applied implements raftstore.Store.
func (r *Replica) Applied() raftstore.Revision { return r.node.fsm.View().Revision() }

// syncIndex waits until this replica has applied everything that was acknowledged before the call.
// It returns the raft index up to which it has waited. It retries while no leader is known.
func (r *reader) syncIndex(ctx context.Context) (uint64, error) {
	for {
		at, err := r.rounds.AwaitRound(ctx)
		if err == nil {
			if err := r.node.fsm.Line.AwaitIndex(ctx, at.Index); err != nil {
				if errors.Is(err, raftstore.ErrClosed) {
					return 0, err
				}
				return 0, fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
			}
			return at.Index, nil
		}
		if err := r.node.waitForRetry(ctx); err != nil {
			if errors.Is(err, raftstore.ErrClosed) {
				return 0, err
			}
			return 0, fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
		}
	}
}

// readIndexRound runs one round of a Coalescer. It returns an index that includes everything that
// was acknowledged before the call. The leader confirms its leadership for it; any other replica
// requests the index from the leader.
func (r *reader) readIndexRound() (readindex.Index, error) {
	r.node.meters.readRounds.Add(1)
	id, address, moved := r.node.role.currentLeader()
	switch id {
	case "":
		return readindex.Index{}, raftstore.ErrUnavailable
	case r.node.cfg.Name:
		return r.confirmedIndex()
	}
	ctx, cancel := peernet.WithCancelOn(r.node.ctx, moved)
	defer cancel()
	client, err := r.net.peers.Client(address)
	if err != nil {
		return readindex.Index{}, err
	}
	resp, err := client.ReadIndex(ctx, &storev1.ReadIndexRequest{Group: r.net.group.ID()})
	if err != nil {
		return readindex.Index{}, fmt.Errorf("read index from the leader at %s: %w", address, err)
	}
	r.node.clock.ObserveLeaderTime(resp.GetNowUnixMs())
	return readindex.Index{Index: resp.GetIndex()}, nil
}

// confirmedIndex returns the leader's commit index. It returns after a majority has answered
// heartbeats that were sent after the index was read. raft.VerifyLeader is not used, because it
// also counts responses to earlier heartbeats. After a pause of this process these responses may be
// old, and the other voters may have elected a new leader since.
func (r *reader) confirmedIndex() (readindex.Index, error) {
	l := r.node.lead.currentLeadership()
	if l == nil {
		return readindex.Index{}, raftstore.ErrNotLeader
	}
	index := r.node.raft.CommitIndex()
	if !l.confirm.ConfirmLeader(r.confirmerLeadership(l), r.node.currentVoters()) {
		return readindex.Index{}, fmt.Errorf("%w: a majority did not confirm the leadership", raftstore.ErrNotLeader)
	}
	return readindex.Index{Index: index, Term: l.term}, nil
}

// confirmerLeadership returns the readindex.Leadership for the leadership l, which its Confirmer
// needs.
func (r *reader) confirmerLeadership(l *leadership) readindex.Leadership {
	return readindex.Leadership{
		Ctx: l.ctx, Self: raft.ServerID(r.node.cfg.Name), Running: &r.node.lead.establishes,
		Heartbeat: func(to raft.Server) bool { return r.net.sendHeartbeat(to, l.term) },
	}
}

func (n *network) rpcHeader() raft.RPCHeader {
	return raft.RPCHeader{
		ProtocolVersion: raft.ProtocolVersionMax,
		ID:              []byte(n.node.cfg.Name),
		Addr:            []byte(n.address),
	}
}

// currentVoters returns the voters of the latest configuration.
func (n *node) currentVoters() []raft.Server {
	var out []raft.Server
	for _, s := range n.raft.GetConfiguration().Configuration().Servers {
		if s.Suffrage == raft.Voter {
			out = append(out, s)
		}
	}
	return out
}
