package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica/proposals"
	"keelson.dev/keelson/raftstore/replica/raftfsm"
	"keelson.dev/keelson/raftstore/replica/readindex"
)

// leadership is one period in which this replica leads. It is established when this replica has
// applied the first entry of its term, and therefore everything that was committed before.
type leadership struct {
	ctx    context.Context
	cancel context.CancelFunc
	term   uint64 // the raft term; valid once the leadership is established
	// confirm checks with the voters that they still follow this leader.
	confirm readindex.Confirmer
}

// leaderships has the current leadership of this replica and wakes the goroutines that wait for a
// leadership. It is safe for concurrent use.
type leaderships struct {
	mu          sync.Mutex
	begun       *leadership // the leadership that raft has reported; nil if this replica does not lead
	current     *leadership // the same leadership once it is established; otherwise nil
	moved       chan struct{}
	expiry      int64 // the store time of the next expiry in the last observed view; 0 = no key expires
	establishes sync.WaitGroup
}

func (s *leaderships) initialize() { s.moved = make(chan struct{}) }

func (s *leaderships) awaitEnd() { s.establishes.Wait() }

// currentLeadership returns the established leadership, or nil.
func (s *leaderships) currentLeadership() *leadership {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

func (s *leaderships) startLeadership(t *leaderTasks) {
	l := new(leadership)
	l.ctx, l.cancel = context.WithCancel(t.node.ctx)
	s.mu.Lock()
	s.begun = l
	s.mu.Unlock()
	s.establishes.Add(1)
	go func() {
		defer s.establishes.Done()
		t.establishLeadership(l)
	}()
}

func (s *leaderships) endLeadership() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.begun == nil {
		return
	}
	s.begun.cancel()
	s.begun = nil
	if s.current != nil {
		s.current = nil
		s.notifyChange()
	}
}

// followRaft starts a leadership if this replica leads and has none, and ends it if this replica
// does not lead.
func (s *leaderships) followRaft(t *leaderTasks, leads bool) {
	s.mu.Lock()
	begun := s.begun != nil
	s.mu.Unlock()
	switch {
	case !leads:
		s.endLeadership()
	case !begun && t.node.ctx.Err() == nil:
		s.startLeadership(t)
	}
}

// forFence returns the established leadership in the fence's term, or nil if this replica does not
// lead in that term.
func (s *leaderships) forFence(fence raftstore.Fence) *leadership {
	if l := s.currentLeadership(); l != nil && raftstore.Fence(l.term) == fence {
		return l
	}
	return nil
}

func (s *leaderships) notifyChange() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// establishLeadership commits an empty batch as the barrier of a new leadership, then runs the
// tasks of the leader until the leadership ends. raft.Barrier is not used, because it does not pass
// through the state machine, and the index of the state machine must include the barrier.
func (t *leaderTasks) establishLeadership(l *leadership) {
	began := time.Now()
	t.node.clock.StartFromWallClock()
	for l.ctx.Err() == nil {
		future, err := t.node.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{}}})
		if err == nil {
			err = t.node.awaitFuture(future)
		}
		if err != nil {
			t.node.log.Info("leadership not established", "error", err)
			// raft ends the leadership by a notification; until then another attempt may succeed
			select {
			case <-l.ctx.Done():
			case <-time.After(retryPause):
			}
			continue
		}
		done, ok := future.Response().(raftfsm.Applied)
		if !ok {
			return // the state machine has failed; Run is about to return
		}
		l.term = done.Term
		break
	}
	s := &t.node.lead
	s.mu.Lock()
	if s.begun != l {
		s.mu.Unlock()
		return
	}
	s.current = l
	s.notifyChange()
	s.mu.Unlock()
	t.node.log.Info("leading", "term", l.term, "established", time.Since(began))
	t.runTasks(l)
}

// Lead implements raftstore.Leader. If lead returns an error while the leadership continues, Lead
// returns that error: a leader that does not do its work must not go unnoticed.
func (r *Replica) Lead(ctx context.Context, lead func(ctx context.Context, fence raftstore.Fence) error) error {
	last := uint64(0) // term of the previous leadership
	for {
		r.node.lead.mu.Lock()
		l, moved := r.node.lead.current, r.node.lead.moved
		r.node.lead.mu.Unlock()
		if l != nil && l.term == last {
			r.commits.flushQueue(ctx, l)
		}
		if l != nil {
			last = l.term
			if err := runWhileLeading(ctx, l, lead); err != nil {
				return fmt.Errorf("leading in term %d: %w", l.term, err)
			}
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return nil
		case <-r.node.stopped:
			return nil
		}
	}
}

// flushQueue returns when every proposal that was queued before the call has been applied or
// certainly never will be. It also returns when l or ctx has ended. A leadership that ends because
// the disk is stalled may be followed by another leadership of the same term. The fence of the
// second leadership does not exclude proposals of the first, because the term is the same. They
// must therefore have been applied before the second leadership is used.
func (c *committer) flushQueue(ctx context.Context, l *leadership) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	for ctx.Err() == nil {
		id := c.newProposalID()
		_, err := c.attemptOnce(ctx, proposals.NewItem(&storev1.Proposal{Id: id, Fence: l.term}))
		c.ids.SettleID(id)
		if err == nil || c.node.waitForRetry(ctx) != nil {
			return
		}
	}
}

// Leads reports whether this replica currently has an established leadership.
func (r *Replica) Leads() bool { return r.node.lead.currentLeadership() != nil }

// ConfirmLeadership returns nil when two conditions hold. A majority has confirmed, after the call
// started, that this replica leads in the term of the fence. This replica has applied everything
// that was committed by then. A caller needs it before an action that no fence can prevent, such as
// a call to a service outside the store. ConfirmLeadership waits while no majority responds.
//
// Errors: ErrFenced when the leadership has ended, ErrUnavailable when ctx ends first, ErrClosed.
func (r *Replica) ConfirmLeadership(ctx context.Context, fence raftstore.Fence) error {
	if err := r.node.awaitRunning(ctx); err != nil {
		return err
	}
	for {
		if r.node.lead.forFence(fence) == nil {
			return fmt.Errorf("confirming the leadership of term %d: %w", fence, raftstore.ErrFenced)
		}
		at, err := r.reads.rounds.AwaitRound(ctx)
		if err == nil && at.Term == uint64(fence) {
			if err = r.node.fsm.Line.AwaitIndex(ctx, at.Index); err == nil {
				return nil
			}
		}
		if stop := r.node.waitForRetry(ctx); errors.Is(stop, raftstore.ErrClosed) {
			return stop
		} else if stop != nil {
			return fmt.Errorf("%w: confirming the leadership of term %d: %w", raftstore.ErrUnavailable, fence,
				errors.Join(stop, err))
		}
	}
}

// runWhileLeading calls lead with the fence of the leadership and a context that ends with ctx or
// with the leadership. It returns the error of lead, or nil if this context has ended.
func runWhileLeading(ctx context.Context, l *leadership,
	lead func(ctx context.Context, fence raftstore.Fence) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(l.ctx, cancel)
	defer stop()
	err := lead(ctx, raftstore.Fence(l.term))
	if ctx.Err() != nil {
		return nil // it returned because its context has ended
	}
	return err
}
