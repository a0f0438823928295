// Package chaos plans how the leaders of a cluster are lost, one after the other. A plan follows from its seed alone, so that
// what a run has found can be had again.
package chaos

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Fault is one way in which a leader is lost.
type Fault string

// The faults, of the replica that leads when its turn comes.
const (
	Kill     Fault = "kill -9"
	Freeze   Fault = "freeze"
	CutOff   Fault = "cut off"
	HandOver Fault = "hand over"
)

// Faults are all of them.
var Faults = []Fault{Kill, Freeze, CutOff, HandOver}

const (
	leastRest, mostRest = 500 * time.Millisecond, 1500 * time.Millisecond
	// A leader that freezes or is cut off has been replaced after the least of it.
	leastHold, mostHold = 1500 * time.Millisecond, 3500 * time.Millisecond
	// mending is about how long it takes until a replica is whole again.
	mending = 2 * time.Second
)

// Act is a fault: after a rest with everything whole, and for a time. A leader that hands over is not held.
type Act struct {
	Fault      Fault
	Rest, Hold time.Duration
}

// Plan is acts one after the other.
type Plan []Act

// New plans for about a time, and every fault once at least: all of them in random order before any comes again.
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
			if spent += a.Rest + a.Hold + mending; spent > d && len(p) >= len(Faults) {
				break
			}
			p = append(p, a)
		}
	}
	return p
}

// String tells the plan, one act a line.
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
