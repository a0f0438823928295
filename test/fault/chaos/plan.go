// Package chaos plans a sequence of faults of a cluster's leader. A plan depends on its seed alone,
// so that a failed run can be repeated.
package chaos

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Fault is one way in which a leader fails or loses its leadership.
type Fault string

// The faults of a leader. Each applies to the replica that is the leader when the fault is due.
const (
	Kill     Fault = "kill -9"
	Freeze   Fault = "freeze"
	CutOff   Fault = "cut off"
	HandOver Fault = "hand over"
)

// Faults lists all faults.
var Faults = []Fault{Kill, Freeze, CutOff, HandOver}

const (
	leastRest, mostRest = 500 * time.Millisecond, 1500 * time.Millisecond
	// leastHold is long enough for the election of a new leader while the old leader is frozen or
	// cut off.
	leastHold, mostHold = 1500 * time.Millisecond, 3500 * time.Millisecond
	// recoveryTime is the approximate time in which a replica recovers after a fault.
	recoveryTime = 2 * time.Second
)

// Act is one fault. It starts after Rest, during which all replicas are healthy, and lasts for
// Hold. Hold is 0 for a leadership transfer (HandOver).
type Act struct {
	Fault      Fault
	Rest, Hold time.Duration
}

// Plan is a sequence of faults.
type Plan []Act

// New returns a plan that takes about d. It has every fault at least once: all faults are drawn in
// random order before any fault is repeated.
func New(seed uint64, d time.Duration) Plan {
	rng := rand.New(rand.NewPCG(seed, 0x6368616f73))
	between := func(least, most time.Duration) time.Duration {
		return (least + time.Duration(rng.Int64N(int64(most-least)))).Round(time.Millisecond)
	}
	var p Plan
	for spent := time.Duration(0); len(p) == 0 || spent < d; {
		for _, i := range rng.Perm(len(Faults)) {
			a := Act{Fault: Faults[i], Rest: between(leastRest, mostRest)}
			if a.Fault != HandOver {
				a.Hold = between(leastHold, mostHold)
			}
			if spent += a.Rest + a.Hold + recoveryTime; spent > d && len(p) >= len(Faults) {
				break
			}
			p = append(p, a)
		}
	}
	return p
}

// String returns the plan as a numbered list with one fault a line.
func (p Plan) String() string {
	var b strings.Builder
	for i, a := range p {
		fmt.Fprintf(&b, "%3d. after %s: %s", i+1, a.Rest, a.Fault)
		if a.Hold > 0 {
			fmt.Fprintf(&b, " for %s", a.Hold)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
