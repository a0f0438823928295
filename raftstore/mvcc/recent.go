package mvcc

import (
	"container/list"
	"slices"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// Limits of the outcomes that are stored for retries of proposals. Each proposal contains the
// number of an earlier proposal up to which its proposer has received all outcomes. These outcomes
// are dropped immediately. The limits below drop outcomes that no later proposal reports as
// received. Such an outcome is older than any retry. If its proposal is retried nevertheless, the
// outcome of the retry is Unknown, and the proposal is not applied again.
const (
	maxIncarnations = 4096
	maxOutcomes     = 1 << 16 // largest number of stored outcomes per incarnation
	// RememberMs is how long an outcome is stored if the proposer does not report that it has
	// received the outcome. The time is measured by the store's clock.
	RememberMs = 10 * 60 * 1000
)

// recentOutcomes stores the outcomes of recent proposals by proposal ID. A proposal that is in the
// raft log twice is therefore applied only once. It is part of the replicated state.
type recentOutcomes struct {
	incarnations map[uint64]*incarnation
	// uses holds the incarnations (see the type incarnation) in the order of their last use, oldest
	// first.
	uses *list.List
	// horizon is the latest time of use among the incarnations that were dropped from the map. A
	// proposal with an ID issued at this time or earlier may have been applied already, even if its
	// outcome is not stored.
	horizon int64
}

// incarnation is one proposer: one run of one replica's process, identified by a random number. It
// numbers its proposals consecutively. The number of a proposal is called its sequence.
type incarnation struct {
	id          uint64
	settledUpTo uint64 // outcomes of sequences up to and including this one have been dropped
	lastUsed    int64  // the store's clock at the incarnation's last proposal
	outcomes    []remembered
	buffer      []remembered  // the complete array of which outcomes is a part
	element     *list.Element // position in recentOutcomes.uses
}

// remembered is the stored outcome of one proposal of an incarnation. The outcomes of an
// incarnation are sorted by sequence.
type remembered struct {
	sequence  uint64
	decidedAt int64   // the store's clock when the proposal was applied or refused
	outcome   Outcome // without the value of a conflicting item
}

func newRecent() recentOutcomes {
	return recentOutcomes{incarnations: make(map[uint64]*incarnation), uses: list.New()}
}

// lookUpOutcome returns the outcome of a proposal that must not be applied again. It is the stored
// outcome, or Unknown if the outcome was dropped. The second result is false if the proposal has
// not been applied before. Proposals of incarnation 0 are never stored.
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

// recordOutcome stores the outcome of a proposal, and drops the outcomes that are no longer needed
// or exceed a limit. now is the store's clock. It must not be before the time at which the ID was
// issued. Otherwise, after the incarnation is dropped, horizon could be earlier than the ID, and a
// retry of the proposal would be applied again.
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
	for first := inc.outcomes[0]; len(inc.outcomes) > maxOutcomes ||
		first.decidedAt < now-RememberMs; first = inc.outcomes[0] {
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

// evictIncarnations drops the least recently used incarnations while there are more than
// maxIncarnations, and those that were not used for RememberMs. It advances horizon accordingly.
// The most recently used incarnation always stays.
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

// findSequence returns the index of the outcome with the given sequence in outcomes, and true. If
// no such outcome is stored, it returns the index at which to insert it, and false.
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

// appendOutcome appends an outcome to the sorted slice. It reuses the space at the start of the
// buffer that settleUpTo has freed, so that a steady load allocates nothing.
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

// settleUpTo drops the outcomes of sequences up to and including upTo, because the proposer no
// longer needs them.
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

// copyOutcomes returns a copy of all stored outcomes for a snapshot. Later changes of r do not
// affect it.
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
