package mvcc

import (
	"container/list"
	"slices"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// Bounds of what is remembered. A proposer says with each proposal which of its
// earlier ones are settled, and those are forgotten at once; the bounds are for
// what was never settled. What they forget is older than any retry; should one
// come nevertheless it is answered Unknown and never applied again.
const (
	maxIncarnations = 4096
	maxOutcomes     = 1 << 16 // per incarnation
	// RememberMs is for how long an outcome that its proposer has not settled is
	// remembered, by the store's own time.
	RememberMs = 10 * 60 * 1000
)

// recentOutcomes remembers the outcomes of proposals, so that a proposal that reaches
// the log twice applies once. It is part of the replicated state.
type recentOutcomes struct {
	incarnations map[uint64]*incarnation
	// uses has the incarnations in the order of their last use, oldest first.
	uses *list.List
	// horizon is the latest time at which an incarnation that was forgotten may
	// have issued an id. An id issued by then that is not remembered may have
	// been applied.
	horizon int64
}

// incarnation is one proposer: one start of one replica's process.
type incarnation struct {
	id          uint64
	settledUpTo uint64 // sequences up to this one are forgotten
	lastUsed    int64  // the store's time when it last proposed
	outcomes    []remembered
	buffer      []remembered  // what outcomes is a part of
	element     *list.Element // in uses
}

// remembered is one outcome; those of an incarnation are in order of sequence.
type remembered struct {
	sequence  uint64
	decidedAt int64   // the store's time when it was decided
	outcome   Outcome // lean
}

func newRecent() recentOutcomes {
	return recentOutcomes{incarnations: make(map[uint64]*incarnation), uses: list.New()}
}

// lookUpOutcome answers for a proposal seen before. Incarnation 0 is nobody: such a
// proposal is never remembered.
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

// recordOutcome records what became of a proposal at a time, which is not before the
// id was issued: so the horizon is never ahead of the clocks that issue new ids.
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
	// A proposal cannot settle itself or what comes after it.
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

// evictIncarnations drops the incarnations beyond the bounds. The last used always stays.
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

// findSequence returns where a sequence is, or would be.
func (inc *incarnation) findSequence(sequence uint64) (int, bool) {
	// Nearly always it is new.
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

// appendOutcome adds an outcome at the end. What settle has left free at the beginning of
// the room is used again, so that steady work allocates nothing.
func (inc *incarnation) appendOutcome(o remembered) {
	n := len(inc.outcomes)
	if n == cap(inc.outcomes) && len(inc.buffer) >= 2*n && n > 0 {
		copy(inc.buffer, inc.outcomes) // the halves do not overlap
		clear(inc.outcomes)
		inc.outcomes = inc.buffer[:n]
	}
	full := n == cap(inc.outcomes)
	if inc.outcomes = append(inc.outcomes, o); full {
		inc.buffer = inc.outcomes[:cap(inc.outcomes)]
	}
}

// settleUpTo forgets sequences up to and including upTo.
func (inc *incarnation) settleUpTo(upTo uint64) {
	if upTo <= inc.settledUpTo {
		return
	}
	inc.settledUpTo = upTo
	n := 0
	for n < len(inc.outcomes) && inc.outcomes[n].sequence <= upTo {
		n++
	}
	clear(inc.outcomes[:n]) // what they refer to is free
	inc.outcomes = inc.outcomes[n:]
}

// copyOutcomes copies the table for a snapshot.
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
