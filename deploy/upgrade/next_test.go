package upgrade

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// parse reads a cluster: "cp1:old* cp2:new! w1:old~", where * leads, ! is unhealthy, ? does not
// report its release, ~ is drained, ^ has no vote. Names of nodes start with w.
func parse(text string) (s State) {
	for _, word := range strings.Fields(text) {
		name, rest, _ := strings.Cut(word, ":")
		release, trouble := strings.TrimRight(rest, "*!~?^"), ""
		if strings.Contains(rest, "!") {
			trouble = "it does not answer"
		}
		if name[0] == 'w' {
			s.Nodes = append(s.Nodes, Node{Name: name, Release: release, Problem: trouble,
				Drained: strings.Contains(rest, "~")})
			continue
		}
		s.Members = append(s.Members, Member{Name: name, Release: release, Voter: !strings.Contains(rest, "^"),
			Leader: strings.Contains(rest, "*"), Problem: trouble})
	}
	return s
}

func TestPlan(t *testing.T) {
	for _, c := range []struct {
		name, cluster string
		goal          Goal
		want          string
	}{
		{"everything", "cp1:old* cp2:old cp3:old w1:old w2:old", Goal{},
			"replica cp2, replica cp3, hand over cp1 cp2, replica cp1, agent w1, agent w2"},
		{"it goes on where it was cut off", "cp1:old* cp2:new cp3:old w1:old w2:old", Goal{},
			"replica cp3, hand over cp1 cp2, replica cp1, agent w1, agent w2"},
		{"between hand-over and exchange", "cp1:old cp2:new* cp3:new w1:new", Goal{}, "replica cp1"},
		{"nothing is left", "cp1:new* cp2:new w1:new", Goal{}, ""},
		{"standbys come first", "cp1:old* cp2:old cp3:old cp4:old^ cp5:old^ w1:old", Goal{},
			"replica cp4, replica cp5, replica cp2, replica cp3, hand over cp1 cp2, replica cp1, agent w1"},
		{"a standby is not led to", "cp1:old* cp2:new^", Goal{}, "replica cp1"},
		{"one replica", "cp1:old* w1:old", Goal{}, "replica cp1, agent w1"},
		{"what was exchanged is waited for", "cp1:old* cp2:new! cp3:old", Goal{},
			"wait cp2, replica cp3, hand over cp1 cp2, replica cp1"},
		{"who is not well is first", "cp1:old* cp2:old cp3:old! w1:old w2:old!", Goal{},
			"replica cp3, replica cp2, hand over cp1 cp2, replica cp1, agent w2, agent w1"},
		{"who says nothing is first", "cp1:old* cp2:old cp3:?! w1:old", Goal{},
			"replica cp3, replica cp2, hand over cp1 cp2, replica cp1, agent w1"},
		{"nobody leads", "cp1:old cp2:old cp3:old", Goal{},
			"wait, replica cp2, replica cp3, hand over cp1 cp2, replica cp1"},
		{"drained where asked", "cp1:new* w1:old w2:old w3:old", Goal{Drain: []string{"w2"}},
			"agent w1, drain w2, agent w2, return w2, agent w3"},
		{"all are drained", "cp1:new* w1:old w2:old", Goal{Drain: []string{All}},
			"drain w1, agent w1, return w1, drain w2, agent w2, return w2"},
		{"cut off when drained", "cp1:new* w1:old w2:old~", Goal{Drain: []string{All}},
			"agent w2, return w2, drain w1, agent w1, return w1"},
		{"cut off before it was given back", "cp1:new* w1:old w2:new~", Goal{}, "return w2, agent w1"},
		{"one that is not Ready is not drained", "cp1:new* w1:old!", Goal{Drain: []string{All}}, "agent w1"},
		{"some are left out", "cp1:old* cp2:old cp3:old w1:old w2:old", Goal{Skip: []string{"cp1", "w1"}},
			"replica cp2, replica cp3, agent w2"},
		{"the leader alone", "cp1:old* cp2:old cp3:old", Goal{Skip: []string{"cp2", "cp3"}},
			"hand over cp1 cp2, replica cp1"},
		{"five, and one is gone for long", "cp1:old* cp2:old! cp3:old cp4:old cp5:old", Goal{Skip: []string{"cp2"}},
			"replica cp3, replica cp4, replica cp5, hand over cp1 cp3, replica cp1"},
		{"a leader that is not well", "cp1:old cp2:old*! cp3:old", Goal{},
			"hand over cp2 cp1, replica cp2, replica cp3, hand over cp1 cp2, replica cp1"},
	} {
		c.goal.Release = "new"
		steps, err := Plan(parse(c.cluster), c.goal)
		var got []string
		for _, s := range steps {
			got = append(got, strings.TrimSpace(fmt.Sprintf("%s %s %s", s.Do, s.On, s.To)))
		}
		if text := strings.Join(got, ", "); err != nil || text != c.want {
			t.Errorf("%s: %s, %v; want %s", c.name, text, err, c.want)
		}
	}
}

func TestRefusedGoals(t *testing.T) {
	for _, c := range []struct {
		cluster string
		level   uint32
		goal    Goal
		want    string
	}{
		{"cp1:new*", 2, Goal{Release: "old", Level: 1},
			"release old understands feature levels up to 1, and the cluster stores forms of level 2: no replica " +
				"can go back to it"},
		{"cp1:new*", 0, Goal{}, "do not say which release they are"},
		{"cp1:old* w1:old w2:old", 0, Goal{Release: "new", Drain: []string{"w9"}},
			`"w9" is to be drained, and there is no such node: there are w1, w2`},
		{"cp1:old* w1:old", 0, Goal{Release: "new", Drain: []string{"cp1"}}, `no such node`},
		{"cp1:old* w1:old", 0, Goal{Release: "new", Skip: []string{"x"}},
			`"x" is to be left as it is, and there is no such replica or node`},
		{"cp1:old* w1:old", 0, Goal{Release: "new", Skip: []string{"w1"}, Drain: []string{"w1"}}, `want one of them`},
		{"cp1:old* cp2:old cp3:old!", 0, Goal{Release: "new", Skip: []string{"cp3"}},
			"without cp2, 1 of 3 replicas would be well, and 2 are needed: cp3 (it does not answer) first"},
	} {
		s := parse(c.cluster)
		s.Level = c.level
		if step, err := Next(s, c.goal); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, %v; want %s", c.cluster, step, err, c.want)
		}
	}
}

// From any state a plan comes to its end: everything has the programs, nothing stays drained, one replica is stopped at a
// time, never beside another that is not well, and who leads is stopped only where nobody else could lead.
func TestAnyPlan(t *testing.T) {
	for seed := range uint64(5000) {
		rnd := rand.New(rand.NewPCG(seed, 7))
		s := randomState(rnd)
		g := Goal{Release: "new"}
		for _, n := range s.Nodes {
			if rnd.IntN(3) == 0 {
				g.Drain = append(g.Drain, n.Name)
			}
		}
		if err := follow(s, g); err != nil {
			t.Fatalf("seed %d, %+v: %v", seed, s, err)
		}
	}
}

func randomState(rnd *rand.Rand) (s State) {
	releases := []string{"old", "new", "older", ""}
	for i := range 1 + rnd.IntN(5) {
		s.Members = append(s.Members, Member{Name: fmt.Sprint("cp", i+1), Voter: rnd.IntN(6) > 0,
			Release: releases[rnd.IntN(len(releases))]})
	}
	s.Members[0].Voter = true
	if rnd.IntN(2) == 0 {
		s.Members[rnd.IntN(len(s.Members))].Problem = "down"
	}
	if m := &s.Members[rnd.IntN(len(s.Members))]; m.Voter {
		m.Leader = true
	}
	for i := range rnd.IntN(4) {
		n := Node{Name: fmt.Sprint("w", i+1), Release: releases[rnd.IntN(len(releases))], Drained: rnd.IntN(4) == 0}
		if rnd.IntN(4) == 0 {
			n.Problem = "not Ready"
		}
		s.Nodes = append(s.Nodes, n)
	}
	if rnd.IntN(5) == 0 {
		s.Busy = "its work begins"
	}
	return s
}

func follow(s State, g Goal) error {
	exchanged, drained := map[string]bool{}, 0
	for range 100 {
		step, err := Next(s, g)
		if err != nil {
			return err
		}
		if step.Do == Replica || step.Do == Agent {
			if exchanged[step.On] {
				return fmt.Errorf("%v, for the second time", step)
			}
			exchanged[step.On] = true
		}
		if step.Do == Replica {
			for _, m := range s.Members {
				other := slices.ContainsFunc(s.Members, func(o Member) bool {
					return o.Name != m.Name && o.Voter && o.Problem == ""
				})
				switch {
				case m.Name != step.On && m.Problem != "":
					return fmt.Errorf("%v, while %s is not well", step, m.Name)
				case m.Name == step.On && m.Leader && other:
					return fmt.Errorf("%v, which leads", step)
				case m.Name == step.On && m.Release == g.Release:
					return fmt.Errorf("%v, which has the programs", step)
				}
			}
		}
		if step.Do == Drain {
			drained++
		}
		if step.Do == Finish {
			return done(s, g)
		}
		s.simulateStep(step, g)
		if why := s.pendingReason(step, g); why != "" &&
			(step.Do != Replica && step.Do != TransferLead || why != s.Busy) {
			return fmt.Errorf("%v was done, and %s", step, why)
		}
	}
	return fmt.Errorf("it does not end")
}

func done(s State, g Goal) error {
	for _, m := range s.Members {
		if m.Release != g.Release || m.Problem != "" {
			return fmt.Errorf("in the end there is %+v", m)
		}
	}
	for _, n := range s.Nodes {
		if n.Release != g.Release || n.Problem != "" || n.Drained {
			return fmt.Errorf("in the end there is %+v", n)
		}
	}
	return nil
}
