package upgrade

import (
	"fmt"
	"slices"
	"strings"
)

// Next returns the next step of an upgrade from the state s to the goal g. It returns the step
// Finish if no step is left. While a replica is unhealthy, no other replica is changed. The
// unhealthy replica is upgraded, which may repair it. If it already has the goal's release, Next
// returns the step Await. Next returns an error for a goal that the cluster cannot reach, or if the
// step would cost the control plane its quorum.
func Next(s State, g Goal) (Step, error) {
	if err := g.validateFor(s); err != nil {
		return Step{}, err
	}
	step, err := nextMember(s, g)
	if err == nil && step.Do == "" {
		step = nextNode(s, g)
	}
	return step, err
}

// Plan returns all remaining steps from the state s to the goal g, on the assumption that each step
// succeeds and that everything becomes healthy.
func Plan(s State, g Goal) ([]Step, error) {
	s.Members, s.Nodes = slices.Clone(s.Members), slices.Clone(s.Nodes)
	var all []Step
	for {
		step, err := Next(s, g)
		if err != nil || step.Do == Finish {
			return all, err
		}
		all = append(all, step)
		s.simulateStep(step, g)
	}
}

// validateFor returns an error if a cluster with the state s cannot reach the goal. Examples are a
// lower feature level, and unknown names in Drain or Skip.
func (g Goal) validateFor(s State) error {
	if g.Release == "" {
		return fmt.Errorf("the programs do not say which release they are")
	}
	if g.Level < s.Level {
		return fmt.Errorf("release %s understands feature levels up to %d, and the cluster stores forms of level %d: "+
			"no replica can go back to it. "+
			"What remains is to restore a backup from before the level rose", g.Release, g.Level, s.Level)
	}
	for _, name := range slices.Concat(g.Drain, g.Skip) {
		isNode := slices.ContainsFunc(s.Nodes, func(n Node) bool { return n.Name == name })
		isMember := slices.ContainsFunc(s.Members, func(m Member) bool { return m.Name == name })
		switch {
		case slices.Contains(g.Drain, name) && name != All && !isNode:
			return fmt.Errorf("%q is to be drained, and there is no such node: there are %s", name,
				strings.Join(nodeNames(s.Nodes), ", "))
		case slices.Contains(g.Skip, name) && !isNode && !isMember:
			return fmt.Errorf("%q is to be left as it is, and there is no such replica or node", name)
		case slices.Contains(g.Drain, name) && slices.Contains(g.Skip, name):
			return fmt.Errorf("%q is to be drained and to be left as it is: want one of them", name)
		}
	}
	return nil
}

func nodeNames(nodes []Node) (out []string) {
	for _, n := range nodes {
		out = append(out, n.Name)
	}
	return out
}

func (g Goal) isSkipped(name string) bool { return slices.Contains(g.Skip, name) }

func (g Goal) isDrained(name string) bool {
	return slices.Contains(g.Drain, name) || slices.Contains(g.Drain, All)
}

// nextMember returns the next step for the replicas. If every replica has the goal's release and is
// healthy, it returns a Step with an empty Do.
func nextMember(s State, g Goal) (Step, error) {
	leader := slices.IndexFunc(s.Members, func(m Member) bool { return m.Leader })
	if leader < 0 {
		return Step{Do: Await}, nil
	}
	var unwell, follower *Member
	for i := range s.Members {
		m := &s.Members[i]
		switch {
		case g.isSkipped(m.Name):
		case m.Release == g.Release && m.Problem != "":
			return Step{Do: Await, On: m.Name}, nil
		case m.Release == g.Release:
		case m.Problem != "" && unwell == nil:
			unwell = m
		// Replicas without a vote come first, because the quorum does not need them.
		case !m.Leader && (follower == nil || follower.Voter && !m.Voter):
			follower = m
		}
	}
	if s.Busy != "" {
		return Step{Do: Await}, nil
	}
	m := &s.Members[leader]
	switch {
	case unwell != nil:
		m = unwell
	case follower != nil:
		m = follower
	case g.isSkipped(m.Name) || m.Release == g.Release:
		return Step{}, nil
	}
	if m.Problem == "" {
		if err := checkQuorumWithout(s, m); err != nil {
			return Step{}, err
		}
	}
	if to := nextLeader(s, g); m.Leader && to != "" {
		return Step{Do: TransferLead, On: m.Name, To: to}, nil
	}
	return Step{Do: Replica, On: m.Name}, nil
}

// nextLeader returns the name of a healthy voter that can become the leader instead of the current
// leader. It prefers a voter with the goal's release. It returns "" if there is no such voter.
func nextLeader(s State, g Goal) (name string) {
	for _, m := range s.Members {
		if m.Leader || !m.Voter || m.Problem != "" {
			continue
		}
		if m.Release == g.Release {
			return m.Name
		}
		if name == "" {
			name = m.Name
		}
	}
	return name
}

// checkQuorumWithout returns an error if candidate must not be stopped, because too few of the
// other voters are healthy for a quorum. It returns nil if candidate has no vote, or if all voters
// are healthy. A control plane of one or two healthy voters loses its quorum in any case, and
// waiting does not help.
func checkQuorumWithout(s State, candidate *Member) error {
	voters, well := 0, 0
	var not []string
	for _, m := range s.Members {
		if !m.Voter {
			continue
		}
		voters++
		switch {
		case m.Problem != "":
			not = append(not, m.Name+" ("+m.Problem+")")
		case m.Name != candidate.Name:
			well++
		}
	}
	if need := voters/2 + 1; candidate.Voter && well < need && len(not) > 0 {
		return fmt.Errorf("without %s, %d of %d replicas would be well, and %d are needed: %s first", candidate.Name,
			well, voters, need,
			strings.Join(not, ", "))
	}
	return nil
}

func nextNode(s State, g Goal) Step {
	var unwell, drained, other *Node
	for i := range s.Nodes {
		n := &s.Nodes[i]
		switch {
		case g.isSkipped(n.Name):
		case n.Release == g.Release && n.Problem != "":
			return Step{Do: Await, On: n.Name}
		case n.Release == g.Release && n.Drained:
			return Step{Do: Return, On: n.Name}
		case n.Release == g.Release:
		case n.Problem != "" && unwell == nil:
			unwell = n
		case n.Drained && drained == nil:
			drained = n
		case other == nil:
			other = n
		}
	}
	switch {
	case unwell != nil: // unwell is upgraded without draining, because its pods could not be stopped
		return Step{Do: Agent, On: unwell.Name}
	case drained != nil:
		return Step{Do: Agent, On: drained.Name}
	case other == nil:
		return Step{Do: Finish}
	case g.isDrained(other.Name):
		return Step{Do: Drain, On: other.Name}
	}
	return Step{Do: Agent, On: other.Name}
}

// simulateStep changes the state as if the step had been carried out and the affected replica or
// node were healthy.
func (s *State) simulateStep(step Step, g Goal) {
	for i := range s.Members {
		m := &s.Members[i]
		switch {
		case step.Do == TransferLead:
			m.Leader = m.Name == step.To
		case m.Name != step.On:
		case step.Do == Replica:
			m.Release, m.Problem = g.Release, ""
		case step.Do == Await:
			m.Problem = ""
		}
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if n.Name != step.On {
			continue
		}
		switch step.Do {
		case Agent:
			n.Release, n.Problem = g.Release, ""
		case Await:
			n.Problem = ""
		case Drain:
			n.Drained = true
		case Return:
			n.Drained = false
		}
	}
	if step.Do == Await && step.On == "" {
		s.Busy = ""
		if !slices.ContainsFunc(s.Members, func(m Member) bool { return m.Leader }) && len(s.Members) > 0 {
			s.Members[0].Leader = true // which replica does not matter
		}
	}
}

// pendingReason returns the reason why a step that was carried out has not had its effect yet,
// according to the state s. It returns "" if the step has had its effect.
func (s State) pendingReason(step Step, g Goal) string {
	for _, m := range s.Members {
		switch {
		case step.Do == TransferLead && m.Name == step.On && m.Leader:
			return m.Name + " still leads"
		case step.Do == TransferLead || step.Do != Replica || m.Name != step.On:
		case m.Release != g.Release:
			return wrongRelease("replica "+m.Name, m.Release, g.Release)
		case m.Problem != "":
			return "replica " + m.Name + ": " + m.Problem
		}
	}
	for _, n := range s.Nodes {
		switch {
		case n.Name != step.On:
		case step.Do == Agent && n.Release != g.Release:
			return wrongRelease("node "+n.Name, n.Release, g.Release)
		case step.Do == Agent && n.Problem != "":
			return "node " + n.Name + ": " + n.Problem
		case step.Do == Drain && !n.Drained:
			return "node " + n.Name + " is not noted as drained"
		case step.Do == Return && n.Drained:
			return "node " + n.Name + " is still noted as drained"
		}
	}
	switch step.Do {
	case TransferLead, Replica:
		return s.Busy
	case Await:
		if next, err := Next(s, g); err == nil && next == step {
			return s.problemOf(step.On)
		}
	}
	return ""
}

// wrongRelease returns an explanation for a replica or node that runs another release than wanted.
// subject names the replica or node in the text. current is the release that it reports, or "".
func wrongRelease(subject, current, wanted string) string {
	if current == "" {
		return subject + " does not say which release it runs"
	}
	return fmt.Sprintf("%s says that it runs %s, not %s", subject, current, wanted)
}

// problemOf returns the reason why the replica or node with this name is unhealthy. Otherwise, or
// if name is "", it returns the reason why the control plane does not work: State.Busy, or that
// there is no leader.
func (s State) problemOf(name string) string {
	for _, m := range s.Members {
		if m.Name == name && m.Problem != "" {
			return "replica " + m.Name + ": " + m.Problem
		}
	}
	for _, n := range s.Nodes {
		if n.Name == name && n.Problem != "" {
			return "node " + n.Name + ": " + n.Problem
		}
	}
	if s.Busy != "" {
		return s.Busy
	}
	return "no replica leads"
}
