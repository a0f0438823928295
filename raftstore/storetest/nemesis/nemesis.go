// Package nemesis plans how a group of replicas is disturbed, and does it. A
// plan is a pure function of its seed and length: the same seed gives the same
// faults in the same order at the same distances, though raft below them will
// not run the same way twice. It names roles and not replicas ("the leader",
// "the second follower"), which are looked up when a fault begins.
package nemesis

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Group is what a nemesis can do to replicas. Verbs block until done; each
// waits for as long as it must, and reports to whoever runs the test when it
// cannot. Undoing what was not done is harmless.
type Group interface {
	Names() []string // of all replicas
	Leader() string  // waits until one leads with a majority
	Kill(name string)
	Stop(name string) // in order, leadership handed over
	Start(name string)
	Pause(name string) // as SIGSTOP
	Resume(name string)
	Cut(from, to string)                // what one sends to the other does not arrive
	Slow(delay, jitter time.Duration)   // all lines
	Heal()                              // all lines are whole and quick
	Jump(name string, by time.Duration) // its clock is wrong by so much; 0 = right again
	Transfer(from string)
	Snapshot(name string)
	Remove(name string) // from the group; it stays up
	Add(name string)
	Wipe(name string) // the disk of one that is down
	Compact()         // nearly all history
}

// Fault is one kind of disturbance.
type Fault string

// The faults.
const (
	KillLeader     Fault = "kill the leader"
	KillFollower   Fault = "kill a follower"
	KillFollowers  Fault = "kill all followers"
	KillAll        Fault = "kill all"
	StopLeader     Fault = "stop the leader in order"
	IsolateLeader  Fault = "isolate the leader"
	IsolateAny     Fault = "isolate a follower"
	LeaderMinority Fault = "the leader in the minority, with one other if there are five"
	MuteLeader     Fault = "nobody hears the leader"
	DeafLeader     Fault = "the leader hears nobody"
	MuteFollower   Fault = "nobody hears a follower"
	DeafFollower   Fault = "a follower hears nobody"
	BridgeLeader   Fault = "only the leader speaks with both sides"
	BridgeFollower Fault = "only a follower speaks with both sides"
	SlowLines      Fault = "slow lines"
	JumbledLines   Fault = "jumbled lines"
	FlappingLine   Fault = "a flapping line between leader and follower"
	PauseLeader    Fault = "pause the leader"
	PauseFollower  Fault = "pause a follower"
	Transfer       Fault = "transfer leadership"
	SnapshotAll    Fault = "snapshots on all"
	Install        Fault = "a follower gets a snapshot installed"
	RemoveFollower Fault = "remove a follower and add it again"
	RemoveLeader   Fault = "remove the leader and add it again"
	Replace        Fault = "replace a dead follower by an empty one"
	ClockAhead     Fault = "the leader's clock is ahead"
	ClockBehind    Fault = "the leader's clock is behind"
	Compact        Fault = "compact the history"
)

// All are all faults.
var All = []Fault{
	KillLeader, KillFollower, KillFollowers, KillAll, StopLeader, IsolateLeader, IsolateAny, LeaderMinority,
	MuteLeader, DeafLeader, MuteFollower, DeafFollower, BridgeLeader, BridgeFollower, SlowLines, JumbledLines, FlappingLine,
	PauseLeader, PauseFollower, Transfer, SnapshotAll, Install, RemoveFollower, RemoveLeader, Replace, ClockAhead, ClockBehind, Compact,
}

// Skew is by how much a clock is wrong at most.
const Skew = 1500 * time.Millisecond

// Act is one fault: after a rest, for a time.
type Act struct {
	Fault Fault
	Rest  time.Duration // with everything whole, before
	Hold  time.Duration
	Pick  int           // chooses among followers
	By    time.Duration // of a clock or a delay
}

// Plan is faults one after the other.
type Plan []Act

// New plans faults for about a time: every one once, in random order, before
// any comes again.
func New(seed uint64, d time.Duration, faults []Fault) Plan {
	rng := rand.New(rand.NewPCG(seed, 0x6e656d65736973))
	var p Plan
	var left []Fault
	for spent := time.Duration(0); spent < d; {
		if len(left) == 0 {
			left = append(left, faults...)
			rng.Shuffle(len(left), func(i, j int) { left[i], left[j] = left[j], left[i] })
		}
		a := Act{Fault: left[0], Pick: rng.IntN(1 << 16),
			Rest: time.Duration(50+rng.IntN(200)) * time.Millisecond, Hold: time.Duration(100+rng.IntN(500)) * time.Millisecond}
		a.By = Skew/2 + time.Duration(rng.Int64N(int64(Skew/2)))
		switch a.Fault {
		case IsolateLeader, LeaderMinority, MuteLeader, DeafLeader, PauseLeader:
			a.Hold += 400 * time.Millisecond // so that there is another leader meanwhile
		}
		left = left[1:]
		p = append(p, a)
		spent += a.Rest + a.Hold
	}
	return p
}

// String tells the plan, one act a line.
func (p Plan) String() string {
	var b strings.Builder
	at := time.Duration(0)
	for _, a := range p {
		at += a.Rest
		fmt.Fprintf(&b, "%8.3fs %s for %s (%d, %s)\n", at.Seconds(), a.Fault, a.Hold, a.Pick, a.By.Round(time.Millisecond))
		at += a.Hold
	}
	return b.String()
}

// Run carries a plan out and leaves the group whole. It ends early with ctx.
func (p Plan) Run(ctx context.Context, g Group, logf func(format string, args ...any)) {
	for _, a := range p {
		if !wait(ctx, a.Rest) {
			return
		}
		began := time.Now()
		leader := g.Leader()
		logf("%s (leader %s)", a.Fault, leader)
		a.run(ctx, g, leader)
		if took := time.Since(began); took > a.Hold+2*time.Second {
			logf("%s took %s", a.Fault, took.Round(time.Millisecond))
		}
	}
	g.Leader()
}

// wait is false when ctx ended.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
