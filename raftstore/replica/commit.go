package replica

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
	"keelson.dev/keelson/raftstore/replica/forwarding"
	"keelson.dev/keelson/raftstore/replica/proposals"
)

// committer commits the proposals of all callers of this replica in batches. On the leader it
// passes a batch to raft. On any other replica it forwards the batch to the leader.
type committer struct {
	node  *node
	net   *network
	reads *reader

	ids      proposals.Identities
	queue    proposals.Queue
	forwards forwarding.Client
}

func newCommitter(n *node, net *network, reads *reader) *committer {
	c := &committer{node: n, net: net, reads: reads}
	c.ids = proposals.Identities{Incarnation: rand.Uint64() | 1, Waiting: make(map[uint64]struct{})}
	c.queue.Initialize()
	c.forwards.Peers = &net.peers
	return c
}

// Commit implements raftstore.Store. The proposal keeps its ID through all retries. It is therefore
// applied once, even if several copies of it reach the log.
func (r *Replica) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("commit not started: %w", err)
	}
	p, err := mvcc.Proposal(c)
	if err != nil {
		return 0, err
	}
	if err := r.node.awaitRunning(ctx); err != nil {
		return 0, err
	}
	defer observeSince(r.node.meters.commit, time.Now())
	if err := r.commits.checkSpace(ctx, p); err != nil {
		return 0, err
	}
	p.Id = r.commits.newProposalID()
	defer func() { r.commits.ids.SettleID(p.Id) }()
	maybe := false // an attempt may have reached the log
	for {
		it := proposals.NewItem(p)
		out, err := r.commits.attemptOnce(ctx, it)
		switch {
		case err == nil && out.Outcome.Code == mvcc.Unknown && !maybe:
			// The proposal has waited so long that its ID is too old to be recognized. It was not
			// in the log before and has not been applied now.
			r.commits.ids.SettleID(p.Id)
			p.Id = r.commits.newProposalID()
		case err == nil:
			return r.commits.replyOutcome(ctx, out)
		case ctx.Err() != nil || r.node.ctx.Err() != nil:
			return 0, r.commits.abandonError(ctx, maybe || errors.Is(err, proposals.ErrMaybe))
		case errors.Is(err, proposals.ErrMaybe):
			maybe = true
			if p.Fence != 0 {
				// A fenced proposal must not be proposed under another leader. An empty proposal
				// with the same ID and fence returns what happened to the original: the outcome if
				// it was applied, or else the guarantee that it never will be.
				p = &storev1.Proposal{Id: p.Id, Fence: p.Fence}
			}
		case p.Fence != 0 && len(p.Ops) > 0 && r.node.lead.forFence(raftstore.Fence(p.Fence)) == nil:
			return 0, raftstore.ErrFenced
		} // during a transfer a leader refuses proposals, and accepts them again if its leadership has not ended
		if err := r.node.waitForRetry(ctx); err != nil {
			return 0, r.commits.abandonError(ctx, maybe)
		}
	}
}

// newProposalID returns a new proposal ID with the current store time.
func (c *committer) newProposalID() *storev1.ProposalID {
	id := c.ids.NextID()
	id.IssuedUnixMs = c.node.clock.CurrentTime()
	return id
}

// attemptOnce queues a proposal once and waits for its result. If ctx or the replica ends first, it
// returns ErrNotProposed if the proposal was still in the queue, and ErrMaybe otherwise.
func (c *committer) attemptOnce(ctx context.Context, it *proposals.Item) (proposals.Result, error) {
	if ctx.Err() != nil { // a caller that no longer waits must change nothing
		return proposals.Result{}, proposals.ErrNotProposed
	}
	c.queue.Enqueue(it)
	select {
	case res := <-it.Done:
		return res, res.Err
	case <-ctx.Done():
	case <-c.node.ctx.Done():
	}
	if it.Withdraw() {
		return proposals.Result{}, proposals.ErrNotProposed
	}
	return proposals.Result{}, proposals.ErrMaybe
}

// replyOutcome converts the outcome of a proposal to the results of Commit. It first waits until
// this replica has applied the commit, so that later local reads here observe it. The leader sends
// outcomes without values; for a conflict, replyOutcome reads the value from this replica's state.
// A value that is compacted here is compacted on all replicas.
func (c *committer) replyOutcome(ctx context.Context, res proposals.Result) (raftstore.Revision, error) {
	switch res.Outcome.Code {
	case mvcc.OK, mvcc.Conflict:
		// the outcome is decided even if the wait fails
		_ = c.node.fsm.Line.AwaitIndex(ctx, res.Index)
	case mvcc.NoSpace:
		c.node.meters.refusedPuts.Add(1)
	}
	if err := res.Outcome.WithValue(c.node.fsm.View()).Err(); err != nil {
		return 0, err
	}
	return res.Outcome.Revision, nil
}

func (c *committer) abandonError(ctx context.Context, maybe bool) error {
	cause := ctx.Err()
	if cause == nil {
		cause = raftstore.ErrClosed
	}
	if maybe {
		return fmt.Errorf("%w: %w", raftstore.ErrOutcomeUnknown, cause)
	}
	if cause == raftstore.ErrClosed {
		return raftstore.ErrClosed
	}
	return fmt.Errorf("%w: %w", raftstore.ErrUnavailable, cause)
}

// waitForRetry waits for a change of the leader, but at most for retryPause, and returns nil. It
// returns an error if ctx or the replica ends first.
func (n *node) waitForRetry(ctx context.Context) error {
	_, _, moved := n.role.currentLeader()
	t := time.NewTimer(retryPause)
	defer t.Stop()
	select {
	case <-moved:
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	case <-n.ctx.Done():
		return raftstore.ErrClosed
	}
	return nil
}
