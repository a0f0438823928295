// Package autopilot decides when a standby replaces a dead voter of the raft cluster. It consists
// of pure functions. Their inputs are the leader's observations of the members and the recorded
// replacement in progress. Their output is an action and the reason for it.
//
// A standby is a member without a vote (raft learner). It has all data and serves requests, but it
// is not part of a majority. The dead voter is removed first, and then the standby is promoted to a
// voter. This order tolerates more failures than the opposite order:
//
//   - Remove, then promote: of 3 voters with 1 dead voter, 2 remain and both are needed, as before.
//     After the promotion there are 3 voters again, of which one may fail.
//   - Promote, then remove: after the promotion there are 4 voters, and 3 are needed. If the new
//     voter fails at that moment, the cluster has no quorum. Without the promotion, it would have
//     a quorum.
//
// With an even number of voters, the removal alone improves the fault tolerance. Therefore no step
// depends on the standby, and no step needs more live voters than the previous step. A replacement
// is recorded before its first step, so that the next leader can complete it.
package autopilot

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

const (
	// MinReplaceAfter is the minimum time after which an unresponsive voter may be replaced. A
	// replica that restarts with a new release, or that reads a large store on a slow machine,
	// responds again within that time. A replica that was replaced must join the cluster again.
	MinReplaceAfter = 30 * time.Second
	// maxPromotionLag is the maximum number of log entries by which a standby may lag behind the
	// leader when it is promoted.
	maxPromotionLag = 64
)

// Member is the state of a member of the raft cluster, as the leader has observed it in the current
// round of requests.
type Member struct {
	Name         string
	Voter        bool
	Standby      bool          // the member reports that it is a standby
	Responded    bool          // the member has responded in this round
	SilentFor    time.Duration // time since the last response of the member to this leader; 0 if Responded
	AppliedIndex uint64        // index of the last log entry that the member has applied
	FeatureLevel uint32        // the highest feature level that the member supports
}

// Replacement is the stored record of a replacement in progress: the replica Standby replaces the
// voter Dead, which does not respond.
type Replacement struct {
	Dead    string `json:"dead"`
	Standby string `json:"standby"`
	Voters  int    `json:"voters"` // number of voters before the replacement
}

// Observation is the input of Decide: the state of the raft cluster, as the leader has observed it
// in one round of requests.
type Observation struct {
	Leader       string // name of the leader
	Members      []Member
	CommitIndex  uint64        // index of the last committed log entry
	FeatureLevel uint32        // feature level of the cluster
	ReplaceAfter time.Duration // time without a response after which a voter is considered dead
	Pending      *Replacement  // the recorded replacement in progress, or nil
}

// Action is an action that the leader takes to replace a dead voter.
type Action int

// The actions that Decide returns. After each action, the leader makes a new observation and calls
// Decide again.
const (
	ActionNone         Action = iota
	ActionRemove              // record the replacement, then remove Dead
	ActionPromote             // promote Standby to a voter, because Dead was removed
	ActionDeleteRecord        // delete the record of the replacement, which is complete or no longer necessary
)

// Decision is an action and the reason for it, as text for logs and for the cluster status. Blocked
// means that a dead voter should be replaced, but currently cannot be.
type Decision struct {
	Action        Action
	Dead, Standby string
	Voters        int
	Reason        string
	Blocked       bool
}

// Decide returns the action that the leader must take next to replace a dead voter, and the reason
// for it. Only the leader may call it, with its own observations.
func Decide(observation Observation) Decision {
	members := groupByRole(observation)
	if observation.Pending != nil {
		return members.continueReplacement(*observation.Pending)
	}
	var dead []Member
	var silent []string
	for _, m := range members.voters {
		switch {
		case m.Responded || m.Name == observation.Leader:
		case m.SilentFor >= observation.ReplaceAfter:
			dead = append(dead, m)
		default:
			silent = append(silent, fmt.Sprintf("%s has not answered for %s of %s", m.Name,
				m.SilentFor.Round(time.Second), observation.ReplaceAfter))
		}
	}
	if len(dead) == 0 {
		if len(silent) > 0 {
			return Decision{Reason: strings.Join(silent, "; ")}
		}
		return Decision{Reason: "every voter answers; " + members.describeNextStandby()}
	}
	slices.SortFunc(dead, func(a, b Member) int {
		return cmp.Or(cmp.Compare(b.SilentFor, a.SilentFor), cmp.Compare(a.Name, b.Name))
	})
	return members.startReplacement(dead[0])
}

// membersByRole is an Observation with its members grouped by role.
type membersByRole struct {
	Observation
	voters, standbys []Member
	respondingVoters int // number of voters that have responded in this round, including the leader
}

// groupByRole groups the members of an observation into voters and standbys. The standbys are
// sorted; those that have applied the most log entries are first.
func groupByRole(observation Observation) membersByRole {
	g := membersByRole{Observation: observation}
	for _, m := range observation.Members {
		switch {
		case m.Voter:
			g.voters = append(g.voters, m)
			if m.Responded || m.Name == observation.Leader {
				g.respondingVoters++
			}
		case m.Standby:
			g.standbys = append(g.standbys, m)
		}
	}
	slices.SortFunc(g.standbys, func(a, b Member) int {
		return cmp.Or(cmp.Compare(b.AppliedIndex, a.AppliedIndex), cmp.Compare(a.Name, b.Name))
	})
	return g
}

// majorityOf returns the size of a majority of the given number of voters.
func majorityOf(voters int) int { return voters/2 + 1 }

// startReplacement decides whether a standby can replace the given dead voter. If so, it returns a
// Decision to remove the voter (ActionRemove), otherwise a blocked Decision with the reason. The
// caller ensures that no replacement is in progress.
func (g membersByRole) startReplacement(dead Member) Decision {
	d := Decision{Dead: dead.Name, Voters: len(g.voters), Blocked: true}
	// A majority of the current voters must respond, because no change can be committed without it.
	// The remaining voters then have a majority too.
	if needed := majorityOf(len(g.voters)); g.respondingVoters < needed {
		d.Reason = fmt.Sprintf("%s has not answered for %s, but of %d voters only %d answer and %d are "+
			"needed: no change "+
			"can be committed",
			dead.Name, dead.SilentFor.Round(time.Second), len(g.voters), g.respondingVoters, needed)
		return d
	}
	fit, why := g.chooseStandby("")
	if fit == "" {
		d.Reason = fmt.Sprintf("%s has not answered for %s, and %s", dead.Name, dead.SilentFor.Round(time.Second), why)
		return d
	}
	return Decision{Action: ActionRemove, Dead: dead.Name, Standby: fit, Voters: len(g.voters),
		Reason: fmt.Sprintf("%s has not answered for %s and is replaced by %s", dead.Name,
			dead.SilentFor.Round(time.Second), fit)}
}

// continueReplacement returns the next action for the replacement pending, which this leader or a
// previous leader has recorded.
func (g membersByRole) continueReplacement(pending Replacement) Decision {
	d := Decision{Dead: pending.Dead, Standby: pending.Standby, Voters: pending.Voters}
	i := slices.IndexFunc(g.voters, func(m Member) bool { return m.Name == pending.Dead })
	switch {
	case i >= 0 && g.voters[i].Responded:
		d.Action, d.Reason = ActionDeleteRecord, fmt.Sprintf("%s answers again: it is not replaced", pending.Dead)
		return d
	case i >= 0: // the removal was not committed
		if m := g.voters[i]; m.SilentFor >= g.ReplaceAfter && m.Name != g.Leader {
			if again := g.startReplacement(m); again.Action == ActionRemove {
				again.Voters = pending.Voters
				return again
			}
		}
		d.Action, d.Reason = ActionDeleteRecord,
			fmt.Sprintf("%s is still a voter: its replacement is decided again", pending.Dead)
		return d
	case len(g.voters) >= pending.Voters:
		d.Action, d.Reason = ActionDeleteRecord, fmt.Sprintf("%s was replaced", pending.Dead)
		return d
	}
	// The promotion must be committed without the promoted standby.
	if needed := majorityOf(len(g.voters) + 1); g.respondingVoters < needed {
		d.Blocked, d.Reason = true,
			fmt.Sprintf("%s was removed, but of %d voters only %d answer and %d are needed to promote a standby",
				pending.Dead, len(g.voters), g.respondingVoters, needed)
		return d
	}
	fit, why := g.chooseStandby(pending.Standby)
	if fit == "" {
		d.Blocked, d.Reason = true, fmt.Sprintf("%s was removed, and %s", pending.Dead, why)
		return d
	}
	d.Action, d.Standby, d.Reason = ActionPromote, fit, fmt.Sprintf("%s receives the vote of %s", fit, pending.Dead)
	return d
}

// chooseStandby returns the name of the standby to promote: preferred, if that standby is suitable,
// and otherwise the suitable standby that has applied the most log entries. If no standby is
// suitable, name is empty and reason explains why.
func (g membersByRole) chooseStandby(preferred string) (name, reason string) {
	var unsuitable []string
	for _, m := range g.standbys {
		switch {
		case !m.Responded:
			unsuitable = append(unsuitable, m.Name+" does not answer")
		case m.FeatureLevel < g.FeatureLevel:
			unsuitable = append(unsuitable,
				fmt.Sprintf("the release of %s supports feature levels up to %d, and the cluster has level %d", m.Name,
					m.FeatureLevel, g.FeatureLevel))
		case m.AppliedIndex == 0 || m.AppliedIndex+maxPromotionLag < g.CommitIndex:
			unsuitable = append(unsuitable, fmt.Sprintf("%s is %s entries behind", m.Name,
				formatThousands(g.CommitIndex-min(m.AppliedIndex, g.CommitIndex))))
		case name == "" || m.Name == preferred:
			name = m.Name
		}
	}
	switch {
	case name != "":
		return name, ""
	case len(g.standbys) == 0:
		return "", "there is no standby: run 'keelson-controlplane join --standby' on another machine to add a standby"
	}
	return "", "no standby is caught up: " + strings.Join(unsuitable, "; ")
}

// describeNextStandby returns a text that names the standby that would be promoted next, or the
// reason why no standby can be promoted.
func (g membersByRole) describeNextStandby() string {
	fit, why := g.chooseStandby("")
	if fit == "" {
		return why
	}
	return fit + " would be promoted next"
}

// formatThousands formats a number with commas between groups of three digits.
func formatThousands(n uint64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
