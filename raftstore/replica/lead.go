package replica

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	storev1 "keelson.dev/keelson/proto/store/v1"
	"keelson.dev/keelson/raftstore"
)

// leadership is one time of leading. It is established once a first entry of
// its term has been applied here, which implies everything committed before.
type leadership struct {
	ctx    context.Context
	cancel context.CancelFunc
	term   uint64 // valid when established
	// confirm asks the voters whether they still follow.
	confirm confirmer
}

// leaderships is the present leadership, if any, and who waits for one.
type leaderships struct {
	mu          sync.Mutex
	begun       *leadership // raft says that this replica leads
	current     *leadership // and it is established
	moved       chan struct{}
	expiry      int64 // next expiry last seen; see noteChanged
	establishes sync.WaitGroup
}

func (s *leaderships) init() { s.moved = make(chan struct{}) }

func (s *leaderships) wait() { s.establishes.Wait() }

// established returns the present leadership, or nil.
func (s *leaderships) established() *leadership {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

func (s *leaderships) begin(r *Replica) {
	l := new(leadership)
	l.ctx, l.cancel = context.WithCancel(r.ctx)
	s.mu.Lock()
	s.begun = l
	s.mu.Unlock()
	s.establishes.Add(1)
	go func() {
		defer s.establishes.Done()
		r.establish(l)
	}()
}

func (s *leaderships) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.begun == nil {
		return
	}
	s.begun.cancel()
	s.begun = nil
	if s.current != nil {
		s.current = nil
		s.announce()
	}
}

// follow starts a leadership where none exists, or ends the one that there is.
func (s *leaderships) follow(r *Replica, leads bool) {
	s.mu.Lock()
	begun := s.begun != nil
	s.mu.Unlock()
	switch {
	case !leads:
		s.end()
	case !begun && r.ctx.Err() == nil:
		s.begin(r)
	}
}

// of returns the established leadership of a term, or nil.
func (s *leaderships) of(fence raftstore.Fence) *leadership {
	if l := s.established(); l != nil && raftstore.Fence(l.term) == fence {
		return l
	}
	return nil
}

func (s *leaderships) announce() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// establish applies an empty batch as the barrier of a new leadership, then
// does the leader's housekeeping until it ends. raft's own Barrier would not
// pass through the state machine, whose index must show it.
func (r *Replica) establish(l *leadership) {
	began := time.Now()
	r.clock.found()
	for l.ctx.Err() == nil {
		future, err := r.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{}}})
		if err == nil {
			err = r.outcome(future)
		}
		if err != nil {
			r.log.Info("leadership not established", "error", err)
			// Leadership ends by raft's notice; until then another attempt may succeed.
			select {
			case <-l.ctx.Done():
			case <-time.After(retryPause):
			}
			continue
		}
		done, ok := future.Response().(applied)
		if !ok {
			return // the state machine is broken; Run is ending
		}
		l.term = done.term
		break
	}
	s := &r.lead
	s.mu.Lock()
	if s.begun != l {
		s.mu.Unlock()
		return
	}
	s.current = l
	s.announce()
	s.mu.Unlock()
	r.log.Info("leading", "term", l.term, "established", time.Since(began))
	r.housekeeping(l)
}

// Lead implements raftstore.Leader. When lead returns an error although
// leadership goes on, Lead returns it: a leader that does not do its work must
// not go unnoticed.
func (r *Replica) Lead(ctx context.Context, lead func(ctx context.Context, fence raftstore.Fence) error) error {
	last := uint64(0) // term of the previous leadership
	for {
		r.lead.mu.Lock()
		l, moved := r.lead.current, r.lead.moved
		r.lead.mu.Unlock()
		if l != nil && l.term == last {
			r.flushQueue(ctx, l)
		}
		if l != nil {
			last = l.term
			if err := leadDuring(ctx, l, lead); err != nil {
				return fmt.Errorf("leading in term %d: %w", l.term, err)
			}
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return nil
		case <-r.stopped:
			return nil
		}
	}
}

// flushQueue returns when every proposal that was queued before the call has been applied or certainly never will be, or l or
// ctx has ended. A leadership that ends because the disk hangs may be followed by another one of the same term. What was proposed
// under the first passes the fence of the second, so that it must have been applied before the second is used.
func (r *Replica) flushQueue(ctx context.Context, l *leadership) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	for ctx.Err() == nil {
		id := r.newID()
		_, err := r.attempt(ctx, newItem(&storev1.Proposal{Id: id, Fence: l.term}))
		r.ids.settle(id)
		if err == nil || r.pause(ctx) != nil {
			return
		}
	}
}

// Leads reports whether this replica leads as far as it knows. It is false while the disk of the replica hangs.
func (r *Replica) Leads() bool { return r.lead.established() != nil }

// ConfirmLeadership returns nil when a majority has confirmed, after the call began, that this replica leads in the term of the
// fence, and this replica has applied everything that was committed by then. Callers need it before an action that no fence
// stops, such as a call to a service outside the store. While no majority answers it waits.
//
// Errors: ErrFenced when the leadership has ended, ErrUnavailable when ctx ends first, ErrClosed.
func (r *Replica) ConfirmLeadership(ctx context.Context, fence raftstore.Fence) error {
	if err := r.up(ctx); err != nil {
		return err
	}
	for {
		if r.lead.of(fence) == nil {
			return fmt.Errorf("confirming the leadership of term %d: %w", fence, raftstore.ErrFenced)
		}
		at, err := r.reads.do(ctx)
		if err == nil && at.term == uint64(fence) {
			if err = r.fsm.line.wait(ctx, at.index); err == nil {
				return nil
			}
		}
		if stop := r.pause(ctx); errors.Is(stop, raftstore.ErrClosed) {
			return stop
		} else if stop != nil {
			return fmt.Errorf("%w: confirming the leadership of term %d: %w", raftstore.ErrUnavailable, fence, errors.Join(stop, err))
		}
	}
}

// leadDuring calls lead with a context that ends with ctx or the leadership.
func leadDuring(ctx context.Context, l *leadership, lead func(ctx context.Context, fence raftstore.Fence) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(l.ctx, cancel)
	defer stop()
	err := lead(ctx, raftstore.Fence(l.term))
	if ctx.Err() != nil {
		return nil // it ended because it was told to
	}
	return err
}
