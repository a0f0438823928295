package autopilot

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

// world is a group of replicas that die, come back, fall behind and lead in turn, in virtual seconds. It knows the truth; the
// leader knows what its watch has seen.
type world struct {
	t       *testing.T
	rnd     *rand.Rand
	now     time.Duration
	nodes   []*node
	first   int // voters in the beginning
	after   time.Duration
	commit  uint64
	leader  *node
	since   time.Duration // that it leads
	watch   *Watch
	heard   map[string]time.Duration // by this leader, last
	pending *Replacement
	acts    map[Act]int
}

type node struct {
	name                 string
	alive, in            bool
	voter, standby, late bool // late: it does not follow the log
	applied              uint64
	level                uint32
}

const worldLevel = 2

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{t: t, rnd: rand.New(rand.NewPCG(seed, 7)), after: 10 * time.Second, commit: 1000, acts: map[Act]int{}}
	w.first = 1 + w.rnd.IntN(5)
	for i := range w.first + 1 + w.rnd.IntN(3) {
		n := &node{name: fmt.Sprintf("cp%d", i+1), alive: true, in: true, applied: 1000, level: worldLevel}
		n.voter, n.standby = i < w.first, i >= w.first && w.rnd.IntN(5) > 0
		if !n.voter && w.rnd.IntN(4) == 0 {
			n.level--
		}
		w.nodes = append(w.nodes, n)
	}
	return w
}

func (w *world) voters() (all, live int) {
	for _, n := range w.nodes {
		if n.in && n.voter {
			all++
			if n.alive {
				live++
			}
		}
	}
	return all, live
}

// elect has somebody lead, where a majority lives.
func (w *world) elect() {
	if w.leader != nil && w.leader.alive && w.leader.in {
		return
	}
	w.leader = nil
	if all, live := w.voters(); live < majority(all) {
		return
	}
	var may []*node
	for _, n := range w.nodes {
		if n.in && n.voter && n.alive {
			may = append(may, n)
		}
	}
	w.leader, w.since = may[w.rnd.IntN(len(may))], w.now
	w.watch, w.heard = NewWatch(time.Second), map[string]time.Duration{}
}

// fate lets something happen, the more often the wilder.
func (w *world) fate(wild int) {
	n := w.nodes[w.rnd.IntN(len(w.nodes))]
	switch w.rnd.IntN(wild) {
	case 0:
		n.alive = false
	case 1:
		n.alive = true
	case 3:
		n.late = !n.late
	case 4:
		w.leader = nil // it hands over
	case 6: // it has heard that it was taken out, and joins anew as a standby
		if !n.in {
			n.in, n.alive, n.standby, n.level = true, true, true, worldLevel
		}
	case 5:
		w.now += time.Duration(w.rnd.IntN(120)) * time.Second // everybody was frozen
	}
	w.commit += uint64(w.rnd.IntN(20))
	for _, n := range w.nodes {
		if n.alive && !n.late {
			n.applied = w.commit
		}
	}
}

// look is one round of the leader; lossy loses some answers.
func (w *world) look(lossy bool) {
	w.elect()
	if w.leader == nil {
		return
	}
	var all []Member
	for _, n := range w.nodes {
		if !n.in {
			continue
		}
		m := Member{Name: n.name, Voter: n.voter, Standby: n.standby, Applied: n.applied, Level: n.level, Heard: n == w.leader || n.alive && (!lossy || w.rnd.IntN(8) > 0)}
		if m.Heard {
			w.heard[n.name] = w.now
		}
		all = append(all, m)
	}
	w.watch.Look(w.now, all)
	r := Round{Self: w.leader.name, Members: all, Commit: w.commit, Level: worldLevel, After: w.after, Pending: w.pending}
	d := Decide(r)
	if d.Why == "" {
		w.t.Fatal("a decision without a reason")
	}
	w.act(r, d)
}

func (w *world) node(name string) *node {
	for _, n := range w.nodes {
		if n.name == name {
			return n
		}
	}
	w.t.Fatalf("nobody is called %q", name)
	return nil
}

func (w *world) fit(r Round, name string) {
	for _, m := range r.Members {
		if m.Name == name && (m.Voter || !m.Standby || !m.Heard || m.Level < worldLevel || m.Applied+lag < r.Commit) {
			w.t.Fatalf("%s is no standby that may get a vote: %+v", name, m)
		}
	}
}

// act does what was decided, or fails half-way, and holds it against the promises.
func (w *world) act(r Round, d Decision) {
	w.acts[d.Act]++
	all, live := w.voters()
	margin := live - majority(all)
	switch d.Act {
	case Remove:
		n := w.node(d.Dead)
		w.fit(r, d.Standby)
		if quiet := w.now - max(w.heard[n.name], w.since); !n.voter || n == w.leader || quiet < w.after {
			w.t.Fatalf("%s is taken out: voter %v, leader %v, silent for %v of %v", n.name, n.voter, n == w.leader, quiet, w.after)
		}
		if w.pending != nil && w.pending.Dead != d.Dead {
			w.t.Fatalf("%s is to be replaced while %+v is under way", d.Dead, w.pending)
		}
		w.pending = &Replacement{d.Dead, d.Standby, d.Voters}
		if w.rnd.IntN(4) == 0 {
			return // what was recorded does not come about
		}
		n.in, n.voter = false, false
	case Promote:
		n := w.node(d.Standby)
		w.fit(r, d.Standby)
		if w.pending == nil || w.node(w.pending.Dead).voter {
			w.t.Fatalf("%s gets a vote, and %+v is recorded", d.Standby, w.pending)
		}
		if live < majority(all+1) {
			w.t.Fatalf("with %s there are %d voters, of which %d live without it", d.Standby, all+1, live)
		}
		if w.rnd.IntN(4) == 0 {
			return
		}
		n.voter = true
	case Forget:
		if n := w.node(w.pending.Dead); !n.voter && all < w.first {
			w.t.Fatalf("%s was taken out, nobody has got its vote, and that is forgotten", n.name)
		}
		w.pending = nil
	}
	now, alive := w.voters()
	if now > w.first || now < w.first-1 {
		w.t.Fatalf("%d voters: there were %d", now, w.first)
	}
	// What still lives is a majority, and no fewer may die than before. A standby that has just died is not yet seen as dead.
	if d.Act == Remove && (alive < majority(now) || alive-majority(now) < margin) || d.Act == Promote && alive < majority(now) {
		w.t.Fatalf("%v: of %d voters %d live, before it were %d of %d", d, now, alive, live, all)
	}
	if w.rnd.IntN(6) == 0 && d.Act != Nothing {
		w.leader = nil // and another goes on
	}
}

// Over random schedules of deaths, returns, lost answers, frozen clocks, changes of the leader and steps that fail half-way the
// promises hold. In the end, when the group is left in peace, one dead voter is replaced where somebody may get its vote.
func TestNoScheduleMakesTheGroupWeaker(t *testing.T) {
	total, replaced := map[Act]int{}, 0
	for seed := range uint64(400) {
		w := newWorld(t, seed)
		for range 600 {
			w.now += time.Second
			w.fate(40)
			w.look(true)
		}
		for act, n := range w.acts {
			total[act] += n
		}
		if w.settle() {
			replaced++
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Logf("acts: %v; %d groups had somebody to be replaced in the end", total, replaced)
	if total[Remove] < 500 || total[Promote] < 500 || replaced < 50 {
		t.Errorf("too little happens for this test to tell anything: %v, %d", total, replaced)
	}
}

// settle leaves one voter dead and all else in order, and reports whether there was something to be replaced.
func (w *world) settle() bool {
	fit := false
	var dead *node
	for _, n := range w.nodes {
		n.alive, n.late, n.applied = true, false, w.commit
		fit = fit || n.in && !n.voter && n.standby && n.level >= worldLevel
	}
	missing := 0
	if all, _ := w.voters(); all < w.first {
		missing = 1
	}
	w.elect()
	for _, n := range w.nodes {
		if n.in && n.voter && n != w.leader && missing == 0 {
			dead = n
		}
	}
	if all, _ := w.voters(); dead != nil && all > 2 {
		dead.alive = false
	} else {
		dead = nil
	}
	for range 200 {
		w.now += time.Second
		w.look(false)
	}
	all, live := w.voters()
	switch {
	case fit && all == w.first && live == all && (dead == nil || !dead.in):
		return dead != nil
	case !fit && missing == 0 && (dead == nil || dead.in) && all == w.first:
		return false
	case !fit && missing == 1 && all == w.first-1:
		return false
	}
	w.t.Errorf("in the end %d of %d voters live, of %d in the beginning; a standby may get a vote: %v, dead: %+v, recorded: %+v", live, all, w.first, fit, dead, w.pending)
	return false
}
