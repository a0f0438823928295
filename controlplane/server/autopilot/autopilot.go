// Package autopilot says when a replica that has died gives its vote to a standby. It is pure: what the leader has seen of
// the members and what is recorded goes in, what is to be done and why comes out.
//
// A standby is a member without a vote: it has everything, serves, and counts in no majority. The dead voter goes first and
// the standby gets the vote then, which is the order that is safe for what the group can still lose:
//
//	remove, then promote   of 3 voters, 1 dead: 2 are left and both are needed, as before; then 3 and one may die
//	promote, then remove   4 voters, 3 of which are needed: the group stands still if the newcomer dies right then, and
//	                       before that it would not have
//
// With an even number of voters the first step alone makes the group safer. So no step needs the standby, and none needs
// more living voters than the one before. What is under way is recorded before the first step: whoever leads then ends it.
package autopilot

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	// Least is the shortest time after which a silent replica may be replaced: one that is started anew with a new release,
	// or whose machine is slow to read a large store, is back within it, and who was replaced has to join anew.
	Least = 30 * time.Second
	// lag is how many entries a standby may be behind to be given a vote.
	lag = 64
)

// Member is a replica as the leader has just found it.
type Member struct {
	Name    string
	Voter   bool
	Standby bool          // it says that it waits for a vote
	Heard   bool          // it has answered just now
	Silent  time.Duration // for how long this leader has seen it answer nothing; 0 when Heard
	Applied uint64        // its last log entry
	Level   uint32        // the feature level that it understands
}

// Replacement is what is recorded of one that is under way.
type Replacement struct {
	Dead    string `json:"dead"`
	Standby string `json:"standby"`
	Voters  int    `json:"voters"` // how many there were before
}

// Round is all that a decision goes by.
type Round struct {
	Self    string // who leads
	Members []Member
	Commit  uint64 // the last entry that is committed
	Level   uint32 // of what is stored
	After   time.Duration
	Pending *Replacement
}

// Act is what is to be done.
type Act int

// The acts. Each is looked at anew after it was done.
const (
	Nothing Act = iota
	Remove      // record the replacement, then take Dead out
	Promote     // give Standby the vote of Dead, who is out
	Forget      // the record: there is nothing left to do of it
)

// Decision is an act and, for a person, why it or nothing is done. Blocked says that something is to be done and cannot be.
type Decision struct {
	Act           Act
	Dead, Standby string
	Voters        int
	Why           string
	Blocked       bool
}

// Decide says what is to be done now. It is the leader's, who has looked by itself at all that it tells of.
func Decide(r Round) Decision {
	g := groupOf(r)
	if r.Pending != nil {
		return g.goOn(*r.Pending)
	}
	var dead []Member
	var quiet []string
	for _, m := range g.voters {
		switch {
		case m.Heard || m.Name == r.Self:
		case m.Silent >= r.After:
			dead = append(dead, m)
		default:
			quiet = append(quiet, fmt.Sprintf("%s has not answered for %s of %s", m.Name, m.Silent.Round(time.Second), r.After))
		}
	}
	if len(dead) == 0 {
		if len(quiet) > 0 {
			return Decision{Why: strings.Join(quiet, "; ")}
		}
		return Decision{Why: "every voter answers; " + g.standbys()}
	}
	slices.SortFunc(dead, func(a, b Member) int {
		return cmp.Or(cmp.Compare(b.Silent, a.Silent), cmp.Compare(a.Name, b.Name))
	})
	return g.replace(dead[0])
}

// group is a round, sorted.
type group struct {
	Round
	voters, waiting []Member
	live            int // voters that have just answered
}

func groupOf(r Round) group {
	g := group{Round: r}
	for _, m := range r.Members {
		switch {
		case m.Voter:
			g.voters = append(g.voters, m)
			if m.Heard || m.Name == r.Self {
				g.live++
			}
		case m.Standby:
			g.waiting = append(g.waiting, m)
		}
	}
	slices.SortFunc(g.waiting, func(a, b Member) int {
		return cmp.Or(cmp.Compare(b.Applied, a.Applied), cmp.Compare(a.Name, b.Name))
	})
	return g
}

func majority(voters int) int { return voters/2 + 1 }

// replace begins with one that is dead.
func (g group) replace(dead Member) Decision {
	d := Decision{Dead: dead.Name, Voters: len(g.voters), Blocked: true}
	// What is left has a majority that lives, and so has what there is: without it nothing can be changed anyway.
	if need := majority(len(g.voters)); g.live < need {
		d.Why = fmt.Sprintf("%s has not answered for %s, and of %d voters %d answer where %d are needed: nothing can be changed",
			dead.Name, dead.Silent.Round(time.Second), len(g.voters), g.live, need)
		return d
	}
	fit, why := g.fittest("")
	if fit == "" {
		d.Why = fmt.Sprintf("%s has not answered for %s, and %s", dead.Name, dead.Silent.Round(time.Second), why)
		return d
	}
	return Decision{Act: Remove, Dead: dead.Name, Standby: fit, Voters: len(g.voters),
		Why: fmt.Sprintf("%s has not answered for %s and is replaced by %s", dead.Name, dead.Silent.Round(time.Second), fit)}
}

// goOn ends what was begun, by this leader or another.
func (g group) goOn(p Replacement) Decision {
	d := Decision{Dead: p.Dead, Standby: p.Standby, Voters: p.Voters}
	i := slices.IndexFunc(g.voters, func(m Member) bool { return m.Name == p.Dead })
	switch {
	case i >= 0 && g.voters[i].Heard:
		d.Act, d.Why = Forget, fmt.Sprintf("%s answers again: it is not replaced", p.Dead)
		return d
	case i >= 0: // the removal did not come about
		if m := g.voters[i]; m.Silent >= g.After && m.Name != g.Self {
			if again := g.replace(m); again.Act == Remove {
				again.Voters = p.Voters
				return again
			}
		}
		d.Act, d.Why = Forget, fmt.Sprintf("%s is a voter still: it is looked at anew", p.Dead)
		return d
	case len(g.voters) >= p.Voters:
		d.Act, d.Why = Forget, fmt.Sprintf("%s was replaced", p.Dead)
		return d
	}
	// The vote is given without counting on who gets it.
	if need := majority(len(g.voters) + 1); g.live < need {
		d.Blocked, d.Why = true, fmt.Sprintf("%s was taken out, and of %d voters %d answer where %d have to for another to become one", p.Dead, len(g.voters), g.live, need)
		return d
	}
	fit, why := g.fittest(p.Standby)
	if fit == "" {
		d.Blocked, d.Why = true, fmt.Sprintf("%s was taken out, and %s", p.Dead, why)
		return d
	}
	d.Act, d.Standby, d.Why = Promote, fit, fmt.Sprintf("%s gets the vote of %s", fit, p.Dead)
	return d
}

// fittest is the standby that gets a vote: the one that was chosen before if it still may, else the one that has most; or why none exists.
func (g group) fittest(chosen string) (name, why string) {
	var not []string
	for _, m := range g.waiting {
		switch {
		case !m.Heard:
			not = append(not, m.Name+" does not answer")
		case m.Level < g.Level:
			not = append(not, fmt.Sprintf("%s is of a release that understands feature levels up to %d of %d", m.Name, m.Level, g.Level))
		case m.Applied == 0 || m.Applied+lag < g.Commit:
			not = append(not, fmt.Sprintf("%s is %s entries behind", m.Name, thousands(g.Commit-min(m.Applied, g.Commit))))
		case name == "" || m.Name == chosen:
			name = m.Name
		}
	}
	switch {
	case name != "":
		return name, ""
	case len(g.waiting) == 0:
		return "", "there is no standby: 'keelson-controlplane join --standby' on a further machine makes one"
	}
	return "", "no standby is caught up: " + strings.Join(not, "; ")
}

// standbys says who would get a vote.
func (g group) standbys() string {
	fit, why := g.fittest("")
	if fit == "" {
		return why
	}
	return fit + " would be the next"
}

// thousands is a number for a person.
func thousands(n uint64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
