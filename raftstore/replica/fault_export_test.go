package replica

import "context"

// BreakVotes makes every write of term and vote fail from now on.
func (r *Replica) BreakVotes(err error) {
	s := r.disk.stable
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inner = &brokenKeeper{recordKeeper: s.inner, err: err}
}

// Ended is closed when Run has returned; Cause says why it had to.
func (r *Replica) Ended() <-chan struct{} { return r.stopped }
func (r *Replica) Cause() error           { return context.Cause(r.ctx) }
