package matching

import (
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"
)

// Rounds is what mutating webhooks, or mutating policies, remember from the first round of one write to the second. A
// write has at most two: the second is for those who ask to see what others changed after them.
type Rounds struct {
	second bool
	// earlier are those to be asked again once somebody after them changes something; again are those for whom
	// that has happened.
	earlier, again map[string]bool
	output         runtime.Object
	changed        bool
}

// Round is 0, or 1 in the second.
func (r *Rounds) Round() int {
	if r.second {
		return 1
	}
	return 0
}

// Begin begins a round. An object that others have changed since the end of the first is a change for all.
func (r *Rounds) Begin(o runtime.Object) {
	if r.second && !equality.Semantic.DeepEqual(r.output, o) {
		r.Changed()
	}
}

// End ends a round with an object.
func (r *Rounds) End(o runtime.Object) {
	if !r.second && o != nil {
		r.output = o.DeepCopyObject()
	}
}

// Skips says that somebody is not asked: in the second round, who saw all changes in the first, or was not asked in it.
func (r *Rounds) Skips(who string) bool { return r.second && !r.again[who] }

// Changed says that the object has been changed.
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

// Asked says that somebody has been asked who wants to be asked again if needed.
func (r *Rounds) Asked(who string) {
	if r.earlier == nil {
		r.earlier = make(map[string]bool)
	}
	r.earlier[who] = true
}

// Again says that there is reason for a second round.
func (r *Rounds) Again() bool { return r.changed && !r.second }

// Second begins the second round.
func (r *Rounds) Second() { r.second = true }
