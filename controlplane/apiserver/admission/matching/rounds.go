package matching

import (
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
)

// Rounds is the state that mutating webhooks, or mutating policies, keep between the two rounds of
// one write. The second round runs webhooks and policies with the reinvocation policy IfNeeded
// again if the object was changed after they ran.
type Rounds struct {
	second bool
	// called are the IDs of webhooks or policies that must run again if the object changes after
	// them. changedAfter are the IDs after which the object did change.
	called, changedAfter map[string]bool
	output               runtime.Object
	changed              bool
}

// Round returns 0 in the first round and 1 in the second.
func (r *Rounds) Round() int {
	if r.second {
		return 1
	}
	return 0
}

// StartRound starts a round with the current object o. In the second round, it calls Changed if
// other plugins have changed the object since the end of the first round.
func (r *Rounds) StartRound(o runtime.Object) {
	if r.second && !equality.Semantic.DeepEqual(r.output, o) {
		r.Changed()
	}
}

// FinishRound stores a copy of the object at the end of the first round.
func (r *Rounds) FinishRound(o runtime.Object) {
	if !r.second && o != nil {
		r.output = o.DeepCopyObject()
	}
}

// Skips reports whether a webhook or policy does not run in this round. In the second round it runs
// only if the object changed after its run in the first.
func (r *Rounds) Skips(id string) bool { return r.second && !r.changedAfter[id] }

// Changed records that the object has changed. Webhooks and policies that were marked with
// MarkCalled must run again.
func (r *Rounds) Changed() {
	r.changed = true
	for who := range r.called {
		if r.changedAfter == nil {
			r.changedAfter = make(map[string]bool)
		}
		r.changedAfter[who] = true
	}
	clear(r.called)
}

// MarkCalled records that a webhook or policy with the reinvocation policy IfNeeded has run.
func (r *Rounds) MarkCalled(id string) {
	if r.called == nil {
		r.called = make(map[string]bool)
	}
	r.called[id] = true
}

// NeedsReinvocation reports whether a second round is needed, because the object has changed in the
// first round. It is false in the second round.
func (r *Rounds) NeedsReinvocation() bool { return r.changed && !r.second }

// StartSecond starts the second round.
func (r *Rounds) StartSecond() { r.second = true }
