package replica

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/protobuf/proto"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// runQueue turns queued proposals into batches and sends each to whoever leads.
func (r *Replica) runQueue(ctx context.Context) error {
	ended := make(chan struct{}, inFlight)
	var running sync.WaitGroup
	defer r.forwards.close()
	defer running.Wait()
	for underWay := 0; ; {
		// Whoever was answered by the same batch asks again at the same moment:
		// all that can run now, and are about to ask, share the next one.
		runtime.Gosched()
		if batch := r.queue.take(underWay); len(batch) > 0 {
			wait := r.dispatch(ctx, batch)
			underWay++
			running.Add(1)
			go func() {
				defer running.Done()
				wait()
				ended <- struct{}{} // buffered for all that are under way
			}()
			continue
		}
		select {
		case <-r.queue.filled:
		case <-ended:
			underWay--
		case <-ctx.Done():
			return nil
		}
	}
}

// dispatch starts a batch on its way, in order, and returns the function that
// waits for it and answers.
func (r *Replica) dispatch(ctx context.Context, batch []*item) (wait func()) {
	id, address, moved := r.role.current()
	switch id {
	case "":
		return func() { finishAll(batch, errNotProposed) }
	case r.cfg.Name:
		future, err := r.propose(batch)
		if err != nil {
			return func() { finishAll(batch, err) }
		}
		return func() { r.conclude(batch, future) }
	default:
		return func() { r.forward(ctx, batch, address, moved) }
	}
}

func finishAll(batch []*item, err error) {
	for _, it := range batch {
		it.finish(result{err: err})
	}
}

// propose hands a batch to raft.
func (r *Replica) propose(batch []*item) (raft.ApplyFuture, error) {
	now := r.clock.read()
	r.meters.batch.Observe(float64(len(batch)))
	b := &storev1.Batch{Proposals: make([]*storev1.Proposal, len(batch))}
	for i, it := range batch {
		it.proposal.ProposedUnixMs = now
		b.Proposals[i] = it.proposal
	}
	return r.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: b}})
}

func (r *Replica) proposeCommand(cmd *storev1.Command) (raft.ApplyFuture, error) {
	data, err := proto.Marshal(cmd)
	if err != nil {
		return nil, fmt.Errorf("%w: encoding: %w", errNotProposed, err)
	}
	return r.raft.Apply(data, 0), nil
}

// conclude waits for a batch of this leader and answers its items.
func (r *Replica) conclude(batch []*item, future raft.ApplyFuture) {
	if err := r.outcome(future); err != nil {
		finishAll(batch, raftError(err))
		return
	}
	done, ok := future.Response().(applied)
	if !ok || len(done.outcomes) != len(batch) {
		finishAll(batch, errMaybe)
		return
	}
	for i, it := range batch {
		it.finish(result{outcome: done.outcomes[i], index: future.Index()})
	}
}

// outcome waits for a future of raft, which may never answer when raft is shut
// down before it has looked at what is in its channels.
func (r *Replica) outcome(f raft.Future) error {
	done := make(chan error, 1)
	go func() { done <- f.Error() }()
	select {
	case err := <-done:
		return err
	case <-r.raftDown:
		return raft.ErrRaftShutdown
	}
}

// raftError tells whether an entry that raft refused may be in the log.
func raftError(err error) error {
	switch {
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress):
		return fmt.Errorf("%w: %w", errNotProposed, err)
	default:
		return fmt.Errorf("%w: %w", errMaybe, err)
	}
}

// forward sends a batch to the leader and answers its items. It gives up when
// the leader changes, so that nobody waits for one who is gone.
func (r *Replica) forward(ctx context.Context, batch []*item, address string, moved <-chan struct{}) {
	send := batch[:0:0]
	req := &storev1.ForwardRequest{Group: r.group.id()}
	for _, it := range batch {
		if it.local {
			it.finish(result{err: errNotProposed})
			continue
		}
		send = append(send, it)
		req.Proposals = append(req.Proposals, it.proposal)
	}
	if len(send) == 0 {
		return
	}
	r.meters.forwarded.Add(uint64(len(send)))
	resp, err := r.forwards.call(ctx, leaderLine{address, moved}, req)
	switch {
	case errors.Is(err, errNotProposed):
		finishAll(send, err)
	case err != nil:
		finishAll(send, fmt.Errorf("%w: %w", errMaybe, err))
	default:
		for i, it := range send {
			it.finish(forwardResult(resp, i, len(send)))
		}
	}
}

// until returns a context that also ends when the channel closes.
func until(ctx context.Context, over <-chan struct{}) (context.Context, context.CancelFunc) {
	return untilAfter(ctx, over, 0)
}

// untilAfter returns a context that also ends a time after the channel has closed.
func untilAfter(ctx context.Context, over <-chan struct{}, grace time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-over:
		case <-ctx.Done():
			return
		}
		if grace > 0 {
			timer := time.NewTimer(grace)
			defer timer.Stop()
			select {
			case <-timer.C:
			case <-ctx.Done():
			}
		}
		cancel()
	}()
	return ctx, cancel
}
