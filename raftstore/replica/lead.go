package replica

import (
	"context"
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
	for {
		r.lead.mu.Lock()
		l, moved := r.lead.current, r.lead.moved
		r.lead.mu.Unlock()
		if l != nil {
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
