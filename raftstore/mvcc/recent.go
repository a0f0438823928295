package mvcc

import (
	"container/list"
	"slices"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// Limits of the stored outcomes. Each proposal states which of its proposer's earlier proposals are
// settled; their outcomes are dropped at once. The limits apply to proposals that are never
// settled. An outcome that they drop is older than any retry. If a retry still comes, it is
// answered Unknown and not applied again.
const (
	maxIncarnations = 4096
	maxOutcomes     = 1 << 16 // per incarnation
	// RememberMs is how long an outcome is stored that its proposer has not settled, by the store's
	// clock.
	RememberMs = 10 * 60 * 1000
)

// recentOutcomes stores the outcomes of proposals, so that a proposal that is in the log twice
// applies once. It is part of the replicated state.
type recentOutcomes struct {
	incarnations map[uint64]*incarnation
	// uses holds the incarnations in the order of their last use, oldest first.
	uses *list.List
	// horizon is the latest time at which an evicted incarnation may have issued an ID. A proposal
	// with an ID from that time or before may have been applied already if its outcome is not
	// stored.
	horizon int64
}

// incarnation is one proposer: one run of one replica's process.
type incarnation struct {
	id          uint64
	settledUpTo uint64 // outcomes of sequences up to this one are dropped
	lastUsed    int64  // the store's clock at its last proposal
	outcomes    []remembered
	buffer      []remembered  // buffer of which outcomes is a part
	element     *list.Element // position in uses
}

// recordedOutcome is one stored outcome. The outcomes of an incarnation are sorted by sequence.
type remembered struct {
	sequence  uint64
	decidedAt int64   // the store's clock when it was decided
	outcome   Outcome // without a value
}

func newRecent() recentOutcomes {
	return recentOutcomes{incarnations: make(map[uint64]*incarnation), uses: list.New()}
}

// lookUpOutcome returns the stored outcome of a proposal. Proposals of incarnation 0 are never
// stored.
func (r *recentOutcomes) lookUpOutcome(id *storev1.ProposalID) (Outcome, bool) {
	if id.GetIncarnation() == 0 {
		return Outcome{}, false
	}
	if inc := r.incarnations[id.GetIncarnation()]; inc != nil {
		if at, ok := inc.findSequence(id.GetSequence()); ok {
			return inc.outcomes[at].outcome, true
		}
		if id.GetSequence() <= inc.settledUpTo {
			return Outcome{Code: Unknown}, true
		}
	}
	if issued := id.GetIssuedUnixMs(); issued != 0 && issued <= r.horizon {
		return Outcome{Code: Unknown}, true
	}
	return Outcome{}, false
}

// recordOutcome stores the outcome of a proposal. now must not be before the ID was issued, so that
// the horizon is never ahead of the clocks that issue new IDs.
func (r *recentOutcomes) recordOutcome(id *storev1.ProposalID, out Outcome, now int64) {
	if id.GetIncarnation() == 0 {
		return
	}
	inc := r.incarnations[id.GetIncarnation()]
	if inc == nil {
		inc = r.addIncarnation(id.GetIncarnation())
	} else {
		r.uses.MoveToBack(inc.element)
	}
	inc.lastUsed = max(inc.lastUsed, now)
	inc.insertOutcome(remembered{id.GetSequence(), now, out.withoutValue()})
	// A proposal cannot settle itself or later ones.
	if id.GetSequence() > 0 {
		inc.settleUpTo(min(id.GetSettled(), id.GetSequence()-1))
	}
	for first := inc.outcomes[0]; len(inc.outcomes) > maxOutcomes || first.decidedAt < now-RememberMs; first = inc.outcomes[0] {
		inc.settleUpTo(first.sequence)
	}
	r.evictIncarnations(now)
}

func (r *recentOutcomes) addIncarnation(id uint64) *incarnation {
	inc := &incarnation{id: id}
	inc.element = r.uses.PushBack(inc)
	r.incarnations[id] = inc
	return inc
}

// evictIncarnations drops the incarnations beyond the limits. The most recently used one always
// stays.
func (r *recentOutcomes) evictIncarnations(now int64) {
	for len(r.incarnations) > 1 {
		oldest := r.uses.Front().Value.(*incarnation)
		if len(r.incarnations) <= maxIncarnations && oldest.lastUsed >= now-RememberMs {
			return
		}
		r.horizon = max(r.horizon, oldest.lastUsed)
		r.uses.Remove(oldest.element)
		delete(r.incarnations, oldest.id)
	}
}

// findSequence returns the index of a sequence, or the index at which to insert it.
func (inc *incarnation) findSequence(sequence uint64) (int, bool) {
	// The sequence is nearly always new.
	if n := len(inc.outcomes); n == 0 || inc.outcomes[n-1].sequence < sequence {
		return n, false
	}
	return slices.BinarySearchFunc(inc.outcomes, sequence, func(o remembered, s uint64) int {
		switch {
		case o.sequence < s:
			return -1
		case o.sequence > s:
			return 1
		}
		return 0
	})
}

func (inc *incarnation) insertOutcome(o remembered) {
	at, known := inc.findSequence(o.sequence)
	switch {
	case known:
		inc.outcomes[at] = o
	case at == len(inc.outcomes):
		inc.appendOutcome(o)
	default:
		inc.outcomes = slices.Insert(inc.outcomes, at, o)
	}
}

// appendOutcome appends an outcome. It reuses the space that settleUpTo has freed at the start of
// the buffer, so that steady work allocates nothing.
func (inc *incarnation) appendOutcome(o remembered) {
	n := len(inc.outcomes)
	if n == cap(inc.outcomes) && len(inc.buffer) >= 2*n && n > 0 {
		copy(inc.buffer, inc.outcomes) // source and destination do not overlap
		clear(inc.outcomes)
		inc.outcomes = inc.buffer[:n]
	}
	full := n == cap(inc.outcomes)
	if inc.outcomes = append(inc.outcomes, o); full {
		inc.buffer = inc.outcomes[:cap(inc.outcomes)]
	}
}

// settleUpTo drops the outcomes of sequences up to and including upTo.
func (inc *incarnation) settleUpTo(upTo uint64) {
	if upTo <= inc.settledUpTo {
		return
	}
	inc.settledUpTo = upTo
	n := 0
	for n < len(inc.outcomes) && inc.outcomes[n].sequence <= upTo {
		n++
	}
	clear(inc.outcomes[:n]) // release what they refer to
	inc.outcomes = inc.outcomes[n:]
}

// copyOutcomes returns a copy for a snapshot.
func (r *recentOutcomes) copyOutcomes() recentOutcomes {
	out := newRecent()
	out.horizon = r.horizon
	for e := r.uses.Front(); e != nil; e = e.Next() {
		inc := e.Value.(*incarnation)
		c := out.addIncarnation(inc.id)
		c.settledUpTo, c.lastUsed, c.outcomes = inc.settledUpTo, inc.lastUsed, slices.Clone(inc.outcomes)
	}
	return out
}
