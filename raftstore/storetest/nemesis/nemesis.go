// Package nemesis plans faults for a raft cluster and injects them. A plan is a pure function of
// its seed and length: the same seed gives the same faults in the same order and at the same
// intervals, though raft does not run the same way twice. A plan names roles ("the leader", "the
// second follower"), which are resolved when a fault starts.
package nemesis

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// Group is the raft cluster on which a plan is executed: the operations that inject faults and undo
// them. Each operation returns when it is done, and reports to the test if it is impossible.
// Undoing a fault that does not exist has no effect.
type Group interface {
	Names() []string // names of all replicas
	Leader() string  // waits until a majority of the replicas agree on a leader and returns its name
	Kill(name string)
	Stop(name string) // graceful, with leadership transfer
	Start(name string)
	Pause(name string) // stops the replica's process as SIGSTOP does
	Resume(name string)
	Cut(from, to string)                // drops the traffic from one replica to the other
	Slow(delay, jitter time.Duration)   // delays all traffic between replicas
	Heal()                              // undoes Cut and Slow everywhere
	Jump(name string, by time.Duration) // sets the clock error of a replica; 0 = correct
	Transfer(from string)
	Snapshot(name string)
	Remove(name string) // removes a replica from the raft cluster; its process continues to run
	Add(name string)
	Wipe(name string) // deletes the disk of a stopped replica
	Compact()         // compacts nearly all history
}

// Fault is a kind of fault that a plan injects. Its value is a description for logs.
type Fault string

// The faults that a plan may contain.
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

// All contains every Fault.
var All = []Fault{
	KillLeader, KillFollower, KillFollowers, KillAll, StopLeader, IsolateLeader, IsolateAny, LeaderMinority,
	MuteLeader, DeafLeader, MuteFollower, DeafFollower, BridgeLeader, BridgeFollower, SlowLines,
	JumbledLines, FlappingLine,
	PauseLeader, PauseFollower, Transfer, SnapshotAll, Install, RemoveFollower, RemoveLeader, Replace, ClockAhead,
	ClockBehind, Compact,
}

// Skew is the largest clock error that the faults ClockAhead and ClockBehind cause.
const Skew = 1500 * time.Millisecond

// Act is one fault of a plan: it starts after Rest and lasts for Hold.
type Act struct {
	Fault Fault
	Rest  time.Duration // healthy time before the fault
	Hold  time.Duration
	Pick  int           // selects the follower that the fault affects
	By    time.Duration // amount of the clock error; delays and intervals of network faults are fractions of it
}

// Plan is a sequence of faults, which Run injects one after the other.
type Plan []Act

// New returns a plan of about duration d with the given faults. It contains each fault once, in
// random order, before any fault is repeated.
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
			Rest: time.Duration(50+rng.IntN(200)) * time.Millisecond,
			Hold: time.Duration(100+rng.IntN(500)) * time.Millisecond}
		a.By = Skew/2 + time.Duration(rng.Int64N(int64(Skew/2)))
		switch a.Fault {
		case IsolateLeader, LeaderMinority, MuteLeader, DeafLeader, PauseLeader:
			a.Hold += 400 * time.Millisecond // enough time to elect another leader
		}
		left = left[1:]
		p = append(p, a)
		spent += a.Rest + a.Hold
	}
	return p
}

// String returns the plan as text, one act per line.
func (p Plan) String() string {
	var b strings.Builder
	at := time.Duration(0)
	for _, a := range p {
		at += a.Rest
		fmt.Fprintf(&b, "%8.3fs %s for %s (%d, %s)\n", at.Seconds(), a.Fault, a.Hold, a.Pick,
			a.By.Round(time.Millisecond))
		at += a.Hold
	}
	return b.String()
}

// Run injects the faults of the plan and undoes them. It logs each fault with logf. At the end it
// waits until the cluster has a leader. If ctx ends, it stops after the current fault, without this
// wait.
func (p Plan) Run(ctx context.Context, g Group, logf func(format string, args ...any)) {
	for _, a := range p {
		if !waitFor(ctx, a.Rest) {
			return
		}
		began := time.Now()
		leader := g.Leader()
		logf("%s (leader %s)", a.Fault, leader)
		a.injectFault(ctx, g, leader)
		if took := time.Since(began); took > a.Hold+2*time.Second {
			logf("%s took %s", a.Fault, took.Round(time.Millisecond))
		}
	}
	g.Leader()
}

// waitFor waits for d and returns true. It returns false if ctx ends first.
func waitFor(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
