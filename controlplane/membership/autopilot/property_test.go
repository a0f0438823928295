package autopilot

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// simulation is a raft cluster in virtual seconds. Its replicas die, return, lag behind and become
// the leader in turn. The simulation has the true state; the leader has only the observations of
// its tracker.
type simulation struct {
	t             *testing.T
	rnd           *rand.Rand
	now           time.Duration
	replicas      []*simulatedReplica
	initialVoters int // number of voters at the start
	replaceAfter  time.Duration
	commit        uint64
	leader        *simulatedReplica
	leaderSince   time.Duration // start of the current leadership
	tracker       *SilenceTracker
	lastResponse  map[string]time.Duration // time of the last response to the current leader, by name
	pending       *Replacement
	actions       map[Action]int
}

type simulatedReplica struct {
	name                    string
	alive, isMember         bool
	voter, standby, lagging bool // late: the replica does not receive the log
	applied                 uint64
	level                   uint32
}

const simulationLevel = 2

// newSimulation returns a cluster of one to five voters and one to three other members, chosen by
// the seed.
func newSimulation(t *testing.T, seed uint64) *simulation {
	w := &simulation{t: t, rnd: rand.New(rand.NewPCG(seed, 7)), replaceAfter: 10 * time.Second, commit: 1000,
		actions: map[Action]int{}}
	w.initialVoters = 1 + w.rnd.IntN(5)
	for i := range w.initialVoters + 1 + w.rnd.IntN(3) {
		n := &simulatedReplica{name: fmt.Sprintf("cp%d", i+1), alive: true, isMember: true, applied: 1000,
			level: simulationLevel}
		n.voter, n.standby = i < w.initialVoters, i >= w.initialVoters && w.rnd.IntN(5) > 0
		if !n.voter && w.rnd.IntN(4) == 0 {
			n.level--
		}
		w.replicas = append(w.replicas, n)
	}
	return w
}

// countVoters returns the number of voters, and how many of them are alive.
func (w *simulation) countVoters() (all, live int) {
	for _, n := range w.replicas {
		if n.isMember && n.voter {
			all++
			if n.alive {
				live++
			}
		}
	}
	return all, live
}

// electLeader elects a random live voter if there is no leader and a majority is alive.
func (w *simulation) electLeader() {
	if w.leader != nil && w.leader.alive && w.leader.isMember {
		return
	}
	w.leader = nil
	if all, live := w.countVoters(); live < majorityOf(all) {
		return
	}
	var candidates []*simulatedReplica
	for _, n := range w.replicas {
		if n.isMember && n.voter && n.alive {
			candidates = append(candidates, n)
		}
	}
	w.leader, w.leaderSince = candidates[w.rnd.IntN(len(candidates))], w.now
	w.tracker, w.lastResponse = NewSilenceTracker(time.Second), map[string]time.Duration{}
}

// injectEvent lets one random event happen with a probability of 6 in odds, and lets live replicas
// receive the log.
func (w *simulation) injectEvent(odds int) {
	n := w.replicas[w.rnd.IntN(len(w.replicas))]
	switch w.rnd.IntN(odds) {
	case 0:
		n.alive = false
	case 1:
		n.alive = true
	case 3:
		n.lagging = !n.lagging
	case 4:
		w.leader = nil // leadership transfer
	case 6: // a removed replica joins again as a standby
		if !n.isMember {
			n.isMember, n.alive, n.standby, n.level = true, true, true, simulationLevel
		}
	case 5:
		w.now += time.Duration(w.rnd.IntN(120)) * time.Second // all replicas were suspended
	}
	w.commit += uint64(w.rnd.IntN(20))
	for _, n := range w.replicas {
		if n.alive && !n.lagging {
			n.applied = w.commit
		}
	}
}

// runRound runs one round of the leader. If lossy is set, some responses are lost.
func (w *simulation) runRound(lossy bool) {
	w.electLeader()
	if w.leader == nil {
		return
	}
	var all []Member
	for _, n := range w.replicas {
		if !n.isMember {
			continue
		}
		m := Member{Name: n.name, Voter: n.voter, Standby: n.standby, AppliedIndex: n.applied, FeatureLevel: n.level,
			Responded: n == w.leader || n.alive && (!lossy || w.rnd.IntN(8) > 0)}
		if m.Responded {
			w.lastResponse[n.name] = w.now
		}
		all = append(all, m)
	}
	w.tracker.Observe(w.now, all)
	r := Observation{Leader: w.leader.name, Members: all, CommitIndex: w.commit, FeatureLevel: simulationLevel,
		ReplaceAfter: w.replaceAfter,
		Pending:      w.pending}
	d := Decide(r)
	if d.Reason == "" {
		w.t.Fatalf("the decision %+v has no reason", d)
	}
	w.applyDecision(r, d)
}

// findReplica returns the replica with a name.
func (w *simulation) findReplica(name string) *simulatedReplica {
	for _, n := range w.replicas {
		if n.name == name {
			return n
		}
	}
	w.t.Fatalf("there is no replica %q", name)
	return nil
}

// checkPromotable fails the test if the member with a name must not be promoted.
func (w *simulation) checkPromotable(r Observation, name string) {
	for _, m := range r.Members {
		if m.Name == name && (m.Voter || !m.Standby || !m.Responded || m.FeatureLevel < simulationLevel ||
			m.AppliedIndex+maxPromotionLag < r.CommitIndex) {
			w.t.Fatalf("%s was chosen for promotion, but is not a suitable standby: %+v", name, m)
		}
	}
}

// applyDecision applies a decision, or lets it fail halfway. It fails the test if the decision
// breaks a guarantee of the package.
func (w *simulation) applyDecision(r Observation, d Decision) {
	w.actions[d.Action]++
	all, live := w.countVoters()
	margin := live - majorityOf(all)
	switch d.Action {
	case ActionRemove:
		n := w.findReplica(d.Dead)
		w.checkPromotable(r, d.Standby)
		if silent := w.now - max(w.lastResponse[n.name], w.leaderSince); !n.voter || n == w.leader ||
			silent < w.replaceAfter {
			w.t.Fatalf("%s is removed: voter %v, leader %v, silent for %v of %v", n.name, n.voter, n == w.leader,
				silent, w.replaceAfter)
		}
		if w.pending != nil && w.pending.Dead != d.Dead {
			w.t.Fatalf("%s is replaced while %+v is pending", d.Dead, w.pending)
		}
		w.pending = &Replacement{d.Dead, d.Standby, d.Voters}
		if w.rnd.IntN(4) == 0 {
			return // the removal fails after it was recorded
		}
		n.isMember, n.voter = false, false
	case ActionPromote:
		n := w.findReplica(d.Standby)
		w.checkPromotable(r, d.Standby)
		if w.pending == nil || w.findReplica(w.pending.Dead).voter {
			w.t.Fatalf("%s is promoted, but the recorded replacement is %+v", d.Standby, w.pending)
		}
		if live < majorityOf(all+1) {
			w.t.Fatalf("the promotion of %s gives %d voters, of which only %d are alive without it",
				d.Standby, all+1, live)
		}
		if w.rnd.IntN(4) == 0 {
			return
		}
		n.voter = true
	case ActionDeleteRecord:
		if n := w.findReplica(w.pending.Dead); !n.voter && all < w.initialVoters {
			w.t.Fatalf("the record is deleted, although %s was removed and no standby has its vote", n.name)
		}
		w.pending = nil
	}
	now, alive := w.countVoters()
	if now > w.initialVoters || now < w.initialVoters-1 {
		w.t.Fatalf("there are %d voters, but there were %d at the start", now, w.initialVoters)
	}
	// The live voters are a majority, and as many of them may fail as before. A standby that has
	// just died does not count as dead yet.
	if d.Action == ActionRemove && (alive < majorityOf(now) || alive-majorityOf(now) < margin) ||
		d.Action == ActionPromote && alive < majorityOf(now) {
		w.t.Fatalf("%v: %d voters with %d alive, before the action %d alive of %d", d, now, alive, live, all)
	}
	if w.rnd.IntN(6) == 0 && d.Action != ActionNone {
		w.leader = nil // another leader continues
	}
}

// The guarantees hold over random schedules of deaths, returns, lost responses, suspended clocks,
// leader changes and failed steps. In the end no further event happens and one voter is dead. This
// voter is replaced if there is a suitable standby.
func TestNoScheduleReducesFaultTolerance(t *testing.T) {
	total, replaced := map[Action]int{}, 0
	for seed := range uint64(400) {
		w := newSimulation(t, seed)
		for range 600 {
			w.now += time.Second
			w.injectEvent(40)
			w.runRound(true)
		}
		for act, n := range w.actions {
			total[act] += n
		}
		if w.checkFinalReplacement() {
			replaced++
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Logf("actions: %v; in %d clusters a voter was replaced in the end", total, replaced)
	if total[ActionRemove] < 500 || total[ActionPromote] < 500 || replaced < 50 {
		t.Errorf("the schedules have too few actions: %v, and %d replacements in the end", total, replaced)
	}
}

// checkFinalReplacement lets one voter be dead and all other replicas respond. It fails the test if
// the voter is not replaced although there is a suitable standby. It reports whether a voter was
// replaced.
func (w *simulation) checkFinalReplacement() bool {
	fit := false
	var dead *simulatedReplica
	for _, n := range w.replicas {
		n.alive, n.lagging, n.applied = true, false, w.commit
		fit = fit || n.isMember && !n.voter && n.standby && n.level >= simulationLevel
	}
	missing := 0
	if all, _ := w.countVoters(); all < w.initialVoters {
		missing = 1
	}
	w.electLeader()
	for _, n := range w.replicas {
		if n.isMember && n.voter && n != w.leader && missing == 0 {
			dead = n
		}
	}
	if all, _ := w.countVoters(); dead != nil && all > 2 {
		dead.alive = false
	} else {
		dead = nil
	}
	for range 200 {
		w.now += time.Second
		w.runRound(false)
	}
	all, live := w.countVoters()
	switch {
	case fit && all == w.initialVoters && live == all && (dead == nil || !dead.isMember):
		return dead != nil
	case !fit && missing == 0 && (dead == nil || dead.isMember) && all == w.initialVoters:
		return false
	case !fit && missing == 1 && all == w.initialVoters-1:
		return false
	}
	w.t.Errorf("in the end %d of %d voters are alive, %d voters at the start; a standby is suitable: %v, dead: %+v, "+
		"recorded: %+v", live, all, w.initialVoters, fit, dead, w.pending)
	return false
}
