package mvcc

import (
	"sort"

	storev1 "keelson.dev/keelson/proto/store/v1"
)

// Bounds of what is remembered. A proposer retries for as long as its caller's
// deadline, so what these bounds forget is far older than any retry; should a
// retry come nevertheless it is answered Unknown and never applied again.
const (
	maxIncarnations = 4096
	maxOutcomes     = 1 << 16 // per incarnation
)

// recent remembers the outcomes of proposals, so that a proposal that reaches
// the log twice applies once. It is part of the replicated state.
type recent struct {
	clock        uint64 // counts proposals; orders incarnations by last use
	incarnations map[uint64]*incarnation
}

// incarnation is one proposer: one start of one replica's process.
type incarnation struct {
	floor    uint64 // sequences up to this one are forgotten
	used     uint64
	outcomes map[uint64]Outcome
}

func newRecent() recent { return recent{incarnations: make(map[uint64]*incarnation)} }

// recall answers for a proposal seen before. Incarnation 0 is nobody: such a
// proposal is never remembered.
func (r *recent) recall(id *storev1.ProposalID) (Outcome, bool) {
	inc := r.incarnations[id.GetIncarnation()]
	if id.GetIncarnation() == 0 || inc == nil {
		return Outcome{}, false
	}
	if out, ok := inc.outcomes[id.GetSequence()]; ok {
		return out, true
	}
	if id.GetSequence() <= inc.floor {
		return Outcome{Code: Unknown}, true
	}
	return Outcome{}, false
}

func (r *recent) remember(id *storev1.ProposalID, out Outcome) {
	if id.GetIncarnation() == 0 {
		return
	}
	r.clock++
	inc := r.incarnations[id.GetIncarnation()]
	if inc == nil {
		inc = &incarnation{outcomes: make(map[uint64]Outcome)}
		r.incarnations[id.GetIncarnation()] = inc
		r.evict()
	}
	inc.used = r.clock
	inc.outcomes[id.GetSequence()] = out
	// A proposal cannot settle itself or what comes after it.
	if id.GetSequence() > 0 {
		inc.settle(min(id.GetSettled(), id.GetSequence()-1))
	}
	for len(inc.outcomes) > maxOutcomes {
		inc.settle(inc.oldest())
	}
}

// settle forgets sequences up to and including upTo.
func (inc *incarnation) settle(upTo uint64) {
	if upTo <= inc.floor {
		return
	}
	if upTo-inc.floor <= uint64(len(inc.outcomes)) {
		for s := inc.floor + 1; s <= upTo; s++ {
			delete(inc.outcomes, s)
		}
	} else {
		for s := range inc.outcomes {
			if s <= upTo {
				delete(inc.outcomes, s)
			}
		}
	}
	inc.floor = upTo
}

func (inc *incarnation) oldest() uint64 {
	// Sequences are nearly dense above the floor.
	for s, tries := inc.floor+1, 0; tries < 1024; s, tries = s+1, tries+1 {
		if _, ok := inc.outcomes[s]; ok {
			return s
		}
	}
	least := ^uint64(0)
	for s := range inc.outcomes {
		least = min(least, s)
	}
	return least
}

// evict forgets the least recently used incarnations beyond the bound, not
// counting the one just added, whose use is not recorded yet.
func (r *recent) evict() {
	for len(r.incarnations) > maxIncarnations {
		var victim, used uint64 = 0, ^uint64(0)
		for id, inc := range r.incarnations {
			if inc.used != 0 && inc.used < used {
				victim, used = id, inc.used
			}
		}
		delete(r.incarnations, victim)
	}
}

// clone copies the table for a snapshot.
func (r *recent) clone() recent {
	out := recent{clock: r.clock, incarnations: make(map[uint64]*incarnation, len(r.incarnations))}
	for id, inc := range r.incarnations {
		c := &incarnation{floor: inc.floor, used: inc.used, outcomes: make(map[uint64]Outcome, len(inc.outcomes))}
		for s, o := range inc.outcomes {
			c.outcomes[s] = o
		}
		out.incarnations[id] = c
	}
	return out
}

// ids returns the incarnations in a fixed order.
func (r *recent) ids() []uint64 {
	ids := make([]uint64, 0, len(r.incarnations))
	for id := range r.incarnations {
		ids = append(ids, id)
	}
	sort.Slice(ids, func(i, j int) bool { return ids[i] < ids[j] })
	return ids
}

// sequences returns the remembered sequences in order.
func (inc *incarnation) sequences() []uint64 {
	out := make([]uint64, 0, len(inc.outcomes))
	for s := range inc.outcomes {
		out = append(out, s)
	}
	sort.Slice(out, func(i, j int) bool { return out[i] < out[j] })
	return out
}
