package failover

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	modelDeviations = flag.Int("model.deviations", 1, "how many deviations TestModelOfAllShortDeviations combines")
	modelSeeds      = flag.Uint64("model.seeds", 60,
		"how many random runs TestModelOfRandomRuns takes of each scenario")
)

// The faults.

func exitOf(id string) modelFault {
	return modelFault{id + " exits", func(m *model) {
		r := m.replicas[id]
		r.up, r.role, r.leader, r.campaign, r.pledge = false, Follower, "", nil, Pledge{}
		r.starts++
		for _, to := range m.ids {
			m.closed[[2]string{id, to}] = m.now
		}
	}}
}

func startOf(id string) modelFault {
	return modelFault{id + " starts", func(m *model) {
		r := m.replicas[id]
		if r.up {
			return
		}
		r.up, r.listens, r.contact = true, true, m.now
		r.starts++
		for _, to := range m.ids {
			m.closed[[2]string{id, to}] = m.now
		}
		m.watch(r, modelHeartbeat)
		m.watchProcess(r)
	}}
}

func portOf(id string) modelFault {
	return modelFault{"the port of " + id + " refuses", func(m *model) { m.replicas[id].listens = false }}
}

func cutOf(from, to string) modelFault {
	return modelFault{"the connections of " + from + " to " + to + " are cut", func(m *model) {
		m.cut[[2]string{from, to}] = true
		m.closed[[2]string{from, to}] = m.now
	}}
}

func healOf(from, to string) modelFault {
	return modelFault{"the connections of " + from + " to " + to + " are open again", func(m *model) {
		if m.cut[[2]string{from, to}] {
			delete(m.cut, [2]string{from, to})
			m.closed[[2]string{from, to}] = m.now
		}
	}}
}

func machineOf(id string) modelFault {
	return modelFault{"the machine of " + id + " vanishes", func(m *model) {
		m.gone[id] = true
		for _, to := range m.ids {
			m.closed[[2]string{id, to}] = m.now
		}
	}}
}

func stallOf(id string) modelFault {
	return modelFault{"the disk of " + id + " stalls", func(m *model) { m.replicas[id].stalled = true }}
}

// requestOf makes a replica without a vote request pledges, as a previous release does.
func requestOf(id string) modelFault {
	return modelFault{id + " requests pledges without a vote", func(m *model) {
		if r := m.replicas[id]; r != nil && r.campaign == nil {
			r.campaign = NewCampaign(r.Settings, r.leader, r.contact)
			r.campaign.majority = len(m.voters)
			m.requestPledges(r, Action{Step: Request, Majority: len(m.voters)})
		}
	}}
}

// transferOf makes the leader, whoever it is, transfer its leadership. The message may be sent twice.
func transferOf(copies int) modelFault {
	return modelFault{"a leadership transfer", func(m *model) {
		for _, id := range m.ids {
			r := m.replicas[id]
			if r.role != Leader || !r.up {
				continue
			}
			choice := NewSuccessor(r.Settings, r.log.Index)
			for _, to := range m.voters {
				if v := m.replicas[to]; to != id {
					choice.Add(m.view(v).Log, max(1, m.now.Sub(v.contact)), v.up && v.role == Follower)
				}
			}
			if choice.Best.ID == "" {
				return
			}
			if m.replicas[choice.Best.ID].stalled {
				m.fail("8: %s selects %s, whose disk is stalled", id, choice.Best.ID)
			}
			for range copies {
				m.send(r, choice.Best.ID, "TimeoutNow", func(to *modelReplica) { m.timeoutNow(to, id) })
			}
			return
		}
	}}
}

// modelScenario is a cluster, the faults with which each run starts, and those that may happen at any moment.
type modelScenario struct {
	name             string
	voters, learners int
	first, later     []modelFault
}

func scenarios() []modelScenario {
	var all []modelScenario
	for _, n := range []int{3, 5} {
		learners := (n - 1) % 4 / 2 // one of three voters' clusters has a learner
		add := func(name string, first []modelFault, later ...modelFault) {
			all = append(all, modelScenario{fmt.Sprintf("%d voters/%s", n, name), n, learners, first, later})
		}
		last := fmt.Sprintf("r%d", n)
		add("the leader exits", []modelFault{exitOf("r1")}, exitOf("r3"), startOf("r1"), startOf("r3"))
		if learners > 0 {
			add("the leader exits and a learner requests pledges", []modelFault{exitOf("r1")}, requestOf("r4"))
		}
		add("the leader exits and a disk stalls", []modelFault{exitOf("r1")}, stallOf(last), transferOf(2))
		add("the leader lives and its port refuses", []modelFault{portOf("r1"), cutOf("r1", "r2")}, cutOf("r1", "r3"),
			healOf("r1", "r2"), exitOf("r1"))
		add("the machine of the leader vanishes", []modelFault{machineOf("r1")}, stallOf("r2"))
		add("the leader transfers its leadership", []modelFault{transferOf(2)}, exitOf("r1"),
			transferOf(1), startOf("r1"))
	}
	return all
}

// run takes one run of a scenario.
func (s modelScenario) run(choose func(int) int, seed uint64) *model {
	m := newModel(s.voters, s.learners, choose, seed)
	m.faults = slices.Clone(s.later)
	m.events = append(m.events, modelEvent{at: m.now.Add(100 * time.Millisecond), name: "first faults", run: func() {
		for _, f := range s.first {
			f.do(m)
		}
	}})
	m.run()
	return m
}

func (m *model) report(t *testing.T, how string) {
	if m.broken != "" {
		var b strings.Builder
		for _, e := range m.trace {
			fmt.Fprintf(&b, "%v %s %s, choice %d\n", e.at.Sub(time.Unix(1000, 0)), e.from, e.name, e.choice)
		}
		t.Fatalf("%s: invariant %s\n%s", how, m.broken, b.String())
	}
}

// Every combination of a few deviations from the run in which each message takes its latency keeps the invariants.
func TestModelOfAllShortDeviations(t *testing.T) {
	for _, s := range scenarios() {
		t.Run(s.name, func(t *testing.T) {
			runs := 0
			var explore func(deviations map[int]int, from, left int)
			explore = func(deviations map[int]int, from, left int) {
				var options []int
				m := s.run(func(n int) int {
					options = append(options, n)
					return deviations[len(options)-1]
				}, 1)
				runs++
				m.report(t, fmt.Sprint("deviations ", deviations))
				if left == 0 {
					return
				}
				// A further deviation follows the previous one within a part of one failover.
				to := min(len(options), modelPoints)
				if len(deviations) > 0 {
					to = min(to, from+modelWindow)
				}
				for at := from; at < to; at++ {
					for choice := 1; choice < options[at]; choice++ {
						next := map[int]int{at: choice}
						for k, v := range deviations {
							next[k] = v
						}
						explore(next, at+1, left-1)
					}
				}
			}
			explore(map[int]int{}, 0, *modelDeviations)
			t.Logf("%d runs", runs)
		})
	}
}

// modelPoints is how many points of deviation a run has at most: the failover is over by then.
const modelPoints = 160

// modelWindow is how many points of deviation after the previous deviation the next one follows at most.
const modelWindow = 8

// Random runs with many deviations keep the invariants, and decide each scenario in some way.
func TestModelOfRandomRuns(t *testing.T) {
	for _, s := range scenarios() {
		t.Run(s.name, func(t *testing.T) {
			candidacies, checks, transfers := 0, 0, 0
			for seed := range *modelSeeds {
				rng := rand.New(rand.NewPCG(seed, 2))
				m := s.run(func(n int) int {
					if rng.IntN(10) > 0 {
						return 0
					}
					return rng.IntN(n)
				}, seed)
				m.report(t, fmt.Sprint("seed ", seed))
				candidacies += len(m.candidacies)
				transfers += m.admitted
				if !m.checked.IsZero() {
					checks++
				}
			}
			t.Logf("%d confirmed candidates, %d TimeoutNow obeyed, %d runs with a check of a silent leader",
				candidacies, transfers, checks)
			if candidacies+checks+transfers == 0 {
				t.Error("no run has decided anything")
			}
		})
	}
}

// Without deviations an exited leader is replaced early, and a silent leader is checked when it is overdue. Of five voters,
// campaigns may block each other until then.
func TestModelOfProgress(t *testing.T) {
	for _, s := range scenarios() {
		early := 0
		for seed := range uint64(50) {
			m := s.run(func(int) int { return 0 }, seed)
			m.report(t, fmt.Sprint(s.name, ", seed ", seed))
			start := time.Unix(1000, 0).Add(100 * time.Millisecond)
			confirmed := len(m.candidacies) > 0 && m.candidacies[0].at.Sub(start) < modelHeartbeat
			checked := !m.checked.IsZero() && m.checked.Sub(start) < modelHeartbeat+time.Duration(len(m.voters))*stagger
			if confirmed {
				early++
			}
			switch {
			case strings.Contains(s.name, "exits") && len(m.voters) == 3 && !confirmed,
				strings.Contains(s.name, "exits") && !confirmed && !checked,
				strings.Contains(s.name, "vanishes") && !checked:
				t.Errorf("%s, seed %d: confirmed candidates %v, first check %v", s.name, seed, m.candidacies, m.checked)
			case strings.Contains(s.name, "lives") && len(m.candidacies) > 0:
				t.Errorf("%s, seed %d: %v replaces a living leader", s.name, seed, m.candidacies)
			}
		}
		t.Logf("%s: %d of 50 runs confirm a candidate", s.name, early)
	}
}
