package proposals

import (
	"errors"
	"sync"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// ErrNotProposed means that this attempt has certainly not added the proposal to the log. ErrMaybe
// means that it may have.
var (
	ErrNotProposed = errors.New("not proposed")
	ErrMaybe       = errors.New("proposed, reply lost")
)

// Identities issues proposal IDs and tracks which of them are settled, that is, never sent again.
// It is safe for concurrent use.
type Identities struct {
	Incarnation uint64

	mu      sync.Mutex
	last    uint64
	settled uint64 // every sequence number up to this one is settled
	Waiting map[uint64]struct{}
}

func (d *Identities) NextID() *storev1.ProposalID {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last++
	d.Waiting[d.last] = struct{}{}
	return &storev1.ProposalID{Incarnation: d.Incarnation, Sequence: d.last, Settled: d.settled}
}

func (d *Identities) SettleID(id *storev1.ProposalID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.Waiting, id.GetSequence())
	for d.settled < d.last {
		if _, open := d.Waiting[d.settled+1]; open {
			return
		}
		d.settled++
	}
}
