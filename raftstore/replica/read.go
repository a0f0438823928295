package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/hashicorp/raft"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// Get implements raftstore.Store.
func (r *Replica) Get(ctx context.Context, key string, o raftstore.ReadOptions) (raftstore.Item, raftstore.Revision, error) {
	v, err := r.fresh(ctx, o)
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
	v, err := r.fresh(ctx, o.ReadOptions)
	if err != nil {
		return raftstore.List{}, fmt.Errorf("list of %q: %w", prefix, err)
	}
	return v.List(prefix, o)
}

// fresh returns a state as new as the options ask for.
func (r *Replica) fresh(ctx context.Context, o raftstore.ReadOptions) (*mvcc.View, error) {
	if err := r.up(ctx); err != nil {
		return nil, err
	}
	if !o.Local {
		if _, err := r.syncIndex(ctx); err != nil {
			return nil, err
		}
	}
	return r.fsm.view(), nil
}

// Watch implements raftstore.Store. A watch from now begins after everything
// acknowledged before the call, also on a replica that is still catching up.
func (r *Replica) Watch(ctx context.Context, prefix string, after raftstore.Revision) (raftstore.Watcher, error) {
	if err := r.up(ctx); err != nil {
		return nil, fmt.Errorf("watch of %q: %w", prefix, err)
	}
	// What another replica has shown may be news here; so may, to the watches, what was applied a moment ago.
	if after == 0 || after > r.fsm.hub.Revision() {
		if _, err := r.syncIndex(ctx); err != nil {
			return nil, fmt.Errorf("watch of %q: %w", prefix, err)
		}
	}
	w, err := r.fsm.hub.Watch(ctx, prefix, after)
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Sync implements raftstore.Store.
func (r *Replica) Sync(ctx context.Context) (raftstore.Revision, error) {
	if err := r.up(ctx); err != nil {
		return 0, err
	}
	if _, err := r.syncIndex(ctx); err != nil {
		return 0, err
	}
	return r.Applied(), nil
}

// Applied implements raftstore.Store.
func (r *Replica) Applied() raftstore.Revision { return r.fsm.view().Revision() }

// syncIndex waits until this replica has applied everything acknowledged
// before the call, asking again for as long as there is no leader to ask.
func (r *Replica) syncIndex(ctx context.Context) (uint64, error) {
	for {
		at, err := r.reads.do(ctx)
		if err == nil {
			if err := r.fsm.line.wait(ctx, at.index); err != nil {
				if errors.Is(err, raftstore.ErrClosed) {
					return 0, err
				}
				return 0, fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
			}
			return at.index, nil
		}
		if err := r.pause(ctx); err != nil {
			if errors.Is(err, raftstore.ErrClosed) {
				return 0, err
			}
			return 0, fmt.Errorf("%w: %w", raftstore.ErrUnavailable, err)
		}
	}
}

// readIndex is an index that includes everything acknowledged before the round that found it.
type readIndex struct {
	index uint64
	term  uint64 // in which a majority confirmed this replica as the leader; 0 = another replica leads
}

// coalescer answers many askers with one round. A round answers only those who
// asked before it began.
type coalescer struct {
	round func() (readIndex, error)

	mu     sync.Mutex
	next   *readRound
	active bool
}

type readRound struct {
	done chan struct{}
	at   readIndex
	err  error
}

func (c *coalescer) do(ctx context.Context) (readIndex, error) {
	if err := ctx.Err(); err != nil { // a round may be so quick that it would be answered
		return readIndex{}, err
	}
	c.mu.Lock()
	if c.next == nil {
		c.next = &readRound{done: make(chan struct{})}
	}
	mine := c.next
	if !c.active {
		c.active = true
		go c.rounds()
	}
	c.mu.Unlock()
	select {
	case <-mine.done:
		return mine.at, mine.err
	case <-ctx.Done():
		return readIndex{}, ctx.Err()
	}
}

// rounds runs until nobody asks.
func (c *coalescer) rounds() {
	for {
		c.mu.Lock()
		now := c.next
		c.next = nil
		if now == nil {
			c.active = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		now.at, now.err = c.round()
		close(now.done)
	}
}

// readIndexRound learns an index that includes everything acknowledged before
// the round began.
func (r *Replica) readIndexRound() (readIndex, error) {
	r.meters.readRounds.Add(1)
	id, address, moved := r.role.current()
	switch id {
	case "":
		return readIndex{}, raftstore.ErrUnavailable
	case r.cfg.Name:
		return r.confirmedIndex()
	}
	ctx, cancel := until(r.ctx, moved)
	defer cancel()
	client, err := r.peers.client(address)
	if err != nil {
		return readIndex{}, err
	}
	resp, err := client.ReadIndex(ctx, &storev1.ReadIndexRequest{Group: r.group.id()})
	if err != nil {
		return readIndex{}, fmt.Errorf("read index from the leader at %s: %w", address, err)
	}
	r.clock.toldBy(resp.GetNowUnixMs())
	return readIndex{index: resp.GetIndex()}, nil
}

// confirmedIndex is the leader's commit index, confirmed by heartbeats that
// were sent after it was read. raft's own VerifyLeader also counts answers to
// heartbeats sent before, which after a pause of this process may be old: the
// others may have elected a new leader since.
func (r *Replica) confirmedIndex() (readIndex, error) {
	l := r.lead.established()
	if l == nil {
		return readIndex{}, raftstore.ErrNotLeader
	}
	index := r.raft.CommitIndex()
	if !l.confirm.ask(r, l, r.voters()) {
		return readIndex{}, fmt.Errorf("%w: a majority did not confirm it", raftstore.ErrNotLeader)
	}
	return readIndex{index, l.term}, nil
}

func (r *Replica) header() raft.RPCHeader {
	return raft.RPCHeader{
		ProtocolVersion: raft.ProtocolVersionMax,
		ID:              []byte(r.cfg.Name),
		Addr:            []byte(r.address),
	}
}

// voters are the voting members, as last configured.
func (r *Replica) voters() []raft.Server {
	var out []raft.Server
	for _, s := range r.raft.GetConfiguration().Configuration().Servers {
		if s.Suffrage == raft.Voter {
			out = append(out, s)
		}
	}
	return out
}
