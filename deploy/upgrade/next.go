package upgrade

import (
	"fmt"
	"slices"
	"strings"
)

// Next is what is to be done now. It refuses a goal that the cluster cannot have, and what would cost the control plane its
// majority. As long as a replica is not well no other one is touched: it is exchanged first, for that may mend it, and
// waited for when it has the goal's programs.
func Next(s State, g Goal) (Step, error) {
	if err := g.fits(s); err != nil {
		return Step{}, err
	}
	step, err := nextMember(s, g)
	if err == nil && step.Do == "" {
		step = nextNode(s, g)
	}
	return step, err
}

// Plan is all that is to be done, as long as everything becomes well.
func Plan(s State, g Goal) ([]Step, error) {
	s.Members, s.Nodes = slices.Clone(s.Members), slices.Clone(s.Nodes)
	var all []Step
	for {
		step, err := Next(s, g)
		if err != nil || step.Do == Finish {
			return all, err
		}
		all = append(all, step)
		s.apply(step, g)
	}
}

// fits refuses a goal that this cluster cannot have.
func (g Goal) fits(s State) error {
	if g.Release == "" {
		return fmt.Errorf("the programs do not say which release they are")
	}
	if g.Level < s.Level {
		return fmt.Errorf("release %s understands feature levels up to %d, and the cluster stores forms of level %d: no replica can go back to it. "+
			"What remains is to restore a backup from before the level rose", g.Release, g.Level, s.Level)
	}
	for _, name := range slices.Concat(g.Drain, g.Skip) {
		isNode := slices.ContainsFunc(s.Nodes, func(n Node) bool { return n.Name == name })
		isMember := slices.ContainsFunc(s.Members, func(m Member) bool { return m.Name == name })
		switch {
		case slices.Contains(g.Drain, name) && name != All && !isNode:
			return fmt.Errorf("%q is to be drained, and there is no such node: there are %s", name, strings.Join(names(s.Nodes), ", "))
		case slices.Contains(g.Skip, name) && !isNode && !isMember:
			return fmt.Errorf("%q is to be left as it is, and there is no such replica or node", name)
		case slices.Contains(g.Drain, name) && slices.Contains(g.Skip, name):
			return fmt.Errorf("%q is to be drained and to be left as it is: want one of them", name)
		}
	}
	return nil
}

func names(nodes []Node) (out []string) {
	for _, n := range nodes {
		out = append(out, n.Name)
	}
	return out
}

func (g Goal) skips(name string) bool { return slices.Contains(g.Skip, name) }

func (g Goal) drains(name string) bool {
	return slices.Contains(g.Drain, name) || slices.Contains(g.Drain, All)
}

// nextMember has no deed when every replica has the goal's programs and is well.
func nextMember(s State, g Goal) (Step, error) {
	leader := slices.IndexFunc(s.Members, func(m Member) bool { return m.Leader })
	if leader < 0 {
		return Step{Do: Await}, nil
	}
	var unwell, follower *Member
	for i := range s.Members {
		m := &s.Members[i]
		switch {
		case g.skips(m.Name):
		case m.Release == g.Release && m.Trouble != "":
			return Step{Do: Await, On: m.Name}, nil
		case m.Release == g.Release:
		case m.Trouble != "" && unwell == nil:
			unwell = m
		case !m.Leader && (follower == nil || follower.Voter && !m.Voter): // of those without a vote nobody misses any
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
	case g.skips(m.Name) || m.Release == g.Release:
		return Step{}, nil
	}
	if m.Trouble == "" {
		if err := mayStop(s, m); err != nil {
			return Step{}, err
		}
	}
	if to := successor(s, g); m.Leader && to != "" {
		return Step{Do: HandOver, On: m.Name, To: to}, nil
	}
	return Step{Do: Replica, On: m.Name}, nil
}

// successor is who leads next: one that has the goal's programs, where there is one.
func successor(s State, g Goal) (name string) {
	for _, m := range s.Members {
		if m.Leader || !m.Voter || m.Trouble != "" {
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

// mayStop refuses to stop a replica where those that are well besides it are no majority. Where all are well, as in a control
// plane of one or two, there is no better time.
func mayStop(s State, stopped *Member) error {
	voters, well := 0, 0
	var not []string
	for _, m := range s.Members {
		if !m.Voter {
			continue
		}
		voters++
		switch {
		case m.Trouble != "":
			not = append(not, m.Name+" ("+m.Trouble+")")
		case m.Name != stopped.Name:
			well++
		}
	}
	if need := voters/2 + 1; stopped.Voter && well < need && len(not) > 0 {
		return fmt.Errorf("without %s, %d of %d replicas would be well, and %d are needed: %s first", stopped.Name, well, voters, need,
			strings.Join(not, ", "))
	}
	return nil
}

func nextNode(s State, g Goal) Step {
	var unwell, drained, other *Node
	for i := range s.Nodes {
		n := &s.Nodes[i]
		switch {
		case g.skips(n.Name):
		case n.Release == g.Release && n.Trouble != "":
			return Step{Do: Await, On: n.Name}
		case n.Release == g.Release && n.Drained:
			return Step{Do: Return, On: n.Name}
		case n.Release == g.Release:
		case n.Trouble != "" && unwell == nil:
			unwell = n
		case n.Drained && drained == nil:
			drained = n
		case other == nil:
			other = n
		}
	}
	switch {
	case unwell != nil: // its pods could not leave it
		return Step{Do: Agent, On: unwell.Name}
	case drained != nil:
		return Step{Do: Agent, On: drained.Name}
	case other == nil:
		return Step{Do: Finish}
	case g.drains(other.Name):
		return Step{Do: Drain, On: other.Name}
	}
	return Step{Do: Agent, On: other.Name}
}

// apply has a step done, and everything well after it.
func (s *State) apply(step Step, g Goal) {
	for i := range s.Members {
		m := &s.Members[i]
		switch {
		case step.Do == HandOver:
			m.Leader = m.Name == step.To
		case m.Name != step.On:
		case step.Do == Replica:
			m.Release, m.Trouble = g.Release, ""
		case step.Do == Await:
			m.Trouble = ""
		}
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		if n.Name != step.On {
			continue
		}
		switch step.Do {
		case Agent:
			n.Release, n.Trouble = g.Release, ""
		case Await:
			n.Trouble = ""
		case Drain:
			n.Drained = true
		case Return:
			n.Drained = false
		}
	}
	if step.Do == Await && step.On == "" {
		s.Busy = ""
		if !slices.ContainsFunc(s.Members, func(m Member) bool { return m.Leader }) && len(s.Members) > 0 {
			s.Members[0].Leader = true // somebody
		}
	}
}

// missing says what a step that was done is waited for; "" when it has come about.
func (s State) missing(step Step, g Goal) string {
	for _, m := range s.Members {
		switch {
		case step.Do == HandOver && m.Name == step.On && m.Leader:
			return m.Name + " still leads"
		case step.Do == HandOver || step.Do != Replica || m.Name != step.On:
		case m.Release != g.Release:
			return says("replica "+m.Name, m.Release, g.Release)
		case m.Trouble != "":
			return "replica " + m.Name + ": " + m.Trouble
		}
	}
	for _, n := range s.Nodes {
		switch {
		case n.Name != step.On:
		case step.Do == Agent && n.Release != g.Release:
			return says("node "+n.Name, n.Release, g.Release)
		case step.Do == Agent && n.Trouble != "":
			return "node " + n.Name + ": " + n.Trouble
		case step.Do == Drain && !n.Drained:
			return "node " + n.Name + " is not noted as drained"
		case step.Do == Return && n.Drained:
			return "node " + n.Name + " is still noted as drained"
		}
	}
	switch step.Do {
	case HandOver, Replica:
		return s.Busy
	case Await:
		if next, err := Next(s, g); err == nil && next == step {
			return s.trouble(step.On)
		}
	}
	return ""
}

// says tells that something does not run what it was given.
func says(what, is, want string) string {
	if is == "" {
		return what + " does not say which release it runs"
	}
	return fmt.Sprintf("%s says that it runs %s, not %s", what, is, want)
}

// trouble is why a replica or node is not well, or the control plane for "".
func (s State) trouble(of string) string {
	for _, m := range s.Members {
		if m.Name == of && m.Trouble != "" {
			return "replica " + m.Name + ": " + m.Trouble
		}
	}
	for _, n := range s.Nodes {
		if n.Name == of && n.Trouble != "" {
			return "node " + n.Name + ": " + n.Trouble
		}
	}
	if s.Busy != "" {
		return s.Busy
	}
	return "no replica leads"
}
