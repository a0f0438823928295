package replica

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore/replica/forwarding"
	"keelson.dev/keelson/raftstore/replica/proposals"
	"keelson.dev/keelson/raftstore/replica/raftfsm"
)

// runQueue divides the queued proposals into batches and sends each batch to the leader. It returns
// nil when ctx has ended and all batches have finished.
func (c *committer) runQueue(ctx context.Context) error {
	ended := make(chan struct{}, proposals.InFlight)
	var running sync.WaitGroup
	defer c.forwards.Close()
	defer running.Wait()
	for underWay := 0; ; {
		// The callers that received results of the same batch call again at the same time. Those
		// that are ready to run now share the next batch.
		runtime.Gosched()
		if batch := c.queue.TakeBatch(underWay); len(batch) > 0 {
			wait := c.dispatchBatch(ctx, batch)
			underWay++
			running.Add(1)
			go func() {
				defer running.Done()
				wait()
				ended <- struct{}{} // buffered for all batches in progress
			}()
			continue
		}
		select {
		case <-c.queue.Filled:
		case <-ended:
			underWay--
		case <-ctx.Done():
			return nil
		}
	}
}

// dispatchBatch starts a batch and returns the function that finishes it. On the leader,
// dispatchBatch passes the batch to raft, so that batches have the order of the calls. The returned
// function forwards the batch if another replica leads. It waits for the results and passes them to
// the callers of the proposals.
func (c *committer) dispatchBatch(ctx context.Context, batch []*proposals.Item) (wait func()) {
	id, address, moved := c.node.role.currentLeader()
	switch id {
	case "":
		return func() { failBatch(batch, proposals.ErrNotProposed) }
	case c.node.cfg.Name:
		future, err := c.proposeBatch(batch)
		if err != nil {
			return func() { failBatch(batch, err) }
		}
		return func() { c.concludeBatch(batch, future) }
	default:
		return func() { c.forwardBatch(ctx, batch, address, moved) }
	}
}

func failBatch(batch []*proposals.Item, err error) {
	for _, it := range batch {
		it.SetResult(proposals.Result{Err: err})
	}
}

// proposeBatch proposes a batch to raft and returns the future of the raft entry.
func (c *committer) proposeBatch(batch []*proposals.Item) (raft.ApplyFuture, error) {
	now := c.node.clock.CurrentTime()
	c.node.meters.batch.Observe(float64(len(batch)))
	b := &storev1.Batch{Proposals: make([]*storev1.Proposal, len(batch))}
	for i, it := range batch {
		it.Proposal.ProposedUnixMs = now
		b.Proposals[i] = it.Proposal
	}
	return c.node.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: b}})
}

func (n *node) proposeCommand(cmd *storev1.Command) (raft.ApplyFuture, error) {
	data, err := proto.Marshal(cmd)
	if err != nil {
		return nil, fmt.Errorf("%w: encoding: %w", proposals.ErrNotProposed, err)
	}
	return n.raft.Apply(data, 0), nil
}

// concludeBatch waits for a batch that this leader has proposed and sets the results of its items.
func (c *committer) concludeBatch(batch []*proposals.Item, future raft.ApplyFuture) {
	if err := c.node.awaitFuture(future); err != nil {
		failBatch(batch, classifyRaftError(err))
		return
	}
	done, ok := future.Response().(raftfsm.Applied)
	if !ok || len(done.Outcomes) != len(batch) {
		failBatch(batch, proposals.ErrMaybe)
		return
	}
	for i, it := range batch {
		it.SetResult(proposals.Result{Outcome: done.Outcomes[i], Index: future.Index()})
	}
}

// awaitFuture waits for a future of raft and returns its error. If raft shuts down, the future may
// never be answered; the error is then ErrRaftShutdown.
func (n *node) awaitFuture(f raft.Future) error {
	done := make(chan error, 1)
	go func() { done <- f.Error() }()
	select {
	case err := <-done:
		return err
	case <-n.raftDown:
		return raft.ErrRaftShutdown
	}
}

// classifyRaftError wraps an error of raft for a proposal in ErrNotProposed or ErrMaybe.
func classifyRaftError(err error) error {
	switch {
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return fmt.Errorf("%w: %w", proposals.ErrNotProposed, err)
	default:
		return fmt.Errorf("%w: %w", proposals.ErrMaybe, err)
	}
}

// forwardBatch sends a batch to the leader and sets the results of its items. It stops waiting when
// the leader changes.
func (c *committer) forwardBatch(ctx context.Context, batch []*proposals.Item, address string, moved <-chan struct{}) {
	send := batch[:0:0]
	req := &storev1.ForwardRequest{Group: c.net.group.ID()}
	for _, it := range batch {
		if it.Local {
			it.SetResult(proposals.Result{Err: proposals.ErrNotProposed})
			continue
		}
		send = append(send, it)
		req.Proposals = append(req.Proposals, it.Proposal)
	}
	if len(send) == 0 {
		return
	}
	c.node.meters.forwarded.Add(uint64(len(send)))
	resp, err := c.forwards.ForwardBatch(ctx, forwarding.Leader{Address: address, Moved: moved}, req)
	switch {
	case errors.Is(err, proposals.ErrNotProposed):
		failBatch(send, err)
	case err != nil:
		failBatch(send, fmt.Errorf("%w: %w", proposals.ErrMaybe, err))
	default:
		for i, it := range send {
			it.SetResult(forwardResult(resp, i, len(send)))
		}
	}
}
