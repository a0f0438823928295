package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// errNotProposed says that a proposal is certainly not in the log because of
// this attempt; errMaybe that it may be.
var (
	errNotProposed = errors.New("not proposed")
	errMaybe       = errors.New("proposed, reply lost")
)

// identities hands out proposal ids and knows which are settled.
type identities struct {
	incarnation uint64

	mu      sync.Mutex
	last    uint64
	settled uint64 // every sequence up to this one has been answered
	waiting map[uint64]struct{}
}

func (d *identities) next() *storev1.ProposalID {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last++
	d.waiting[d.last] = struct{}{}
	return &storev1.ProposalID{Incarnation: d.incarnation, Sequence: d.last, Settled: d.settled}
}

func (d *identities) settle(id *storev1.ProposalID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.waiting, id.GetSequence())
	for d.settled < d.last {
		if _, open := d.waiting[d.settled+1]; open {
			return
		}
		d.settled++
	}
}

// Commit implements raftstore.Store. The proposal keeps its id through all
// retries, so that it applies once whichever of them reach the log.
func (r *Replica) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("commit was not begun: %w", err)
	}
	p, err := mvcc.Proposal(c)
	if err != nil {
		return 0, err
	}
	if err := r.up(ctx); err != nil {
		return 0, err
	}
	defer since(r.meters.commit, time.Now())
	if err := r.roomFor(ctx, p); err != nil {
		return 0, err
	}
	p.Id = r.newID()
	defer func() { r.ids.settle(p.Id) }()
	maybe := false // an attempt may have reached the log
	for {
		it := newItem(p)
		out, err := r.attempt(ctx, it)
		switch {
		case err == nil && out.outcome.Code == mvcc.Unknown && !maybe:
			// It has waited so long that its id is too old to be trusted. It
			// was not in the log before and has not been applied now.
			r.ids.settle(p.Id)
			p.Id = r.newID()
		case err == nil:
			return r.answer(ctx, out)
		case ctx.Err() != nil || r.ctx.Err() != nil:
			return 0, r.gaveUp(ctx, maybe || errors.Is(err, errMaybe))
		case errors.Is(err, errMaybe):
			maybe = true
			if p.Fence != 0 {
				// What is fenced must not be proposed under another leader. An
				// empty proposal with the same id and fence tells its fate:
				// the outcome, if it was applied, else that it never will be.
				p = &storev1.Proposal{Id: p.Id, Fence: p.Fence}
			}
		case p.Fence != 0 && len(p.Ops) > 0 && r.lead.of(raftstore.Fence(p.Fence)) == nil:
			return 0, raftstore.ErrFenced
		} // a leadership that has not ended, and refuses proposals during a transfer, takes them again after it
		if err := r.pause(ctx); err != nil {
			return 0, r.gaveUp(ctx, maybe)
		}
	}
}

// newID makes an id that bears the store's time.
func (r *Replica) newID() *storev1.ProposalID {
	id := r.ids.next()
	id.IssuedUnixMs = r.clock.read()
	return id
}

// attempt queues a proposal once and waits for what becomes of it.
func (r *Replica) attempt(ctx context.Context, it *item) (result, error) {
	if ctx.Err() != nil { // whoever waits no longer changes nothing
		return result{}, errNotProposed
	}
	r.queue.put(it)
	select {
	case res := <-it.done:
		return res, res.err
	case <-ctx.Done():
	case <-r.ctx.Done():
	}
	if it.abandon() {
		return result{}, errNotProposed
	}
	return result{}, errMaybe
}

// answer turns an outcome into the reply. On a follower it first waits until
// this replica has applied the commit, so that its own local reads show it, or
// what a conflict was about, so that it can show the value: the leader sends none.
// What is no longer retained here is not there either: all compact alike.
func (r *Replica) answer(ctx context.Context, res result) (raftstore.Revision, error) {
	switch res.outcome.Code {
	case mvcc.OK, mvcc.Conflict:
		// Whether or not the wait succeeds, this is what became of the commit.
		_ = r.fsm.line.wait(ctx, res.index)
	case mvcc.NoSpace:
		r.meters.refusedPuts.Add(1)
	}
	if err := res.outcome.WithValue(r.fsm.view()).Err(); err != nil {
		return 0, err
	}
	return res.outcome.Revision, nil
}

func (r *Replica) gaveUp(ctx context.Context, maybe bool) error {
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

// pause waits for a change of leader, at most for retryPause.
func (r *Replica) pause(ctx context.Context) error {
	_, _, moved := r.role.current()
	t := time.NewTimer(retryPause)
	defer t.Stop()
	select {
	case <-moved:
	case <-t.C:
	case <-ctx.Done():
		return ctx.Err()
	case <-r.ctx.Done():
		return raftstore.ErrClosed
	}
	return nil
}
