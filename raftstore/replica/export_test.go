package replica

import (
	storev1 "keelson.dev/keelson/proto/store/v1"
)

// What tests need to do to a replica that nobody else may.

// CompareNow makes a leader compare the replicas' states at once.
func (r *Replica) CompareNow() { nudge(r.compareNow) }

// FlipBit changes a value in this replica's memory, as a failing one would.
func (r *Replica) FlipBit(key string) bool {
	it, ok := r.fsm.view().Get(key)
	if ok {
		it.Value[0] ^= 1
	}
	return ok
}

// StoreTime is this replica's idea of the store's time, unix milliseconds.
func (r *Replica) StoreTime() int64 { return r.clock.read() }

// Inject proposes as it is what another replica might have proposed.
func (r *Replica) Inject(p ...*storev1.Proposal) error {
	future, err := r.proposeCommand(&storev1.Command{Kind: &storev1.Command_Batch{Batch: &storev1.Batch{Proposals: p}}})
	if err != nil {
		return err
	}
	return r.outcome(future)
}

// Waiting is how many calls wait for this replica to apply what others have.
func (r *Replica) Waiting() int {
	r.fsm.line.mu.Lock()
	defer r.fsm.line.mu.Unlock()
	return len(r.fsm.line.marks)
}
