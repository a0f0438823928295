package matching

import (
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
)

// Rounds is the state of mutating webhooks, or of mutating policies, between the two rounds of one
// write. The second round runs plugins with the reinvocation policy IfNeeded again if a later
// plugin changed the object.
type Rounds struct {
	second bool
	// earlier are the IDs of webhooks or policies that must run again if the object changes after
	// them. again are the IDs after which it did.
	earlier, again map[string]bool
	output         runtime.Object
	changed        bool
}

// Round returns 0 in the first round and 1 in the second.
func (r *Rounds) Round() int {
	if r.second {
		return 1
	}
	return 0
}

// Begin starts a round. If other plugins have changed the object since the end of the first round,
// it counts as changed.
func (r *Rounds) Begin(o runtime.Object) {
	if r.second && !equality.Semantic.DeepEqual(r.output, o) {
		r.Changed()
	}
}

// End stores a copy of the object at the end of the first round.
func (r *Rounds) End(o runtime.Object) {
	if !r.second && o != nil {
		r.output = o.DeepCopyObject()
	}
}

// Skips reports whether a webhook or policy does not run in this round. In the second round it runs
// only if the object changed after its run in the first.
func (r *Rounds) Skips(who string) bool { return r.second && !r.again[who] }

// Changed records that the object has changed.
func (r *Rounds) Changed() {
	r.changed = true
	for who := range r.earlier {
		if r.again == nil {
			r.again = make(map[string]bool)
		}
		r.again[who] = true
	}
	clear(r.earlier)
}

// Asked records that a webhook or policy with the reinvocation policy IfNeeded has run.
func (r *Rounds) Asked(who string) {
	if r.earlier == nil {
		r.earlier = make(map[string]bool)
	}
	r.earlier[who] = true
}

// Again reports whether a second round is needed.
func (r *Rounds) Again() bool { return r.changed && !r.second }

// Second starts the second round.
func (r *Rounds) Second() { r.second = true }
