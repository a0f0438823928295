package upgrade

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// fake is a cluster in memory.
type fake struct {
	mu    sync.Mutex // of state, which a test changes while it is looked at
	state State
	goal  Goal
	did   []string
	spoil func(step Step, s *State) error // after a step was done
	deaf  time.Time                       // until then it does not answer
	looks int                             // after so many looks one hangs; 0 = none does
	slow  time.Duration                   // of each look
}

func (f *fake) ReadState(ctx context.Context) (State, error) {
	time.Sleep(f.slow) // in virtual time: how long a slow machine takes to answer
	if f.looks--; f.looks == 0 {
		<-ctx.Done()
		return State{}, ctx.Err()
	}
	if time.Now().Before(f.deaf) {
		return State{}, errors.New("connection refused")
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.state
	s.Members, s.Nodes = slices.Clone(s.Members), slices.Clone(s.Nodes)
	return s, nil
}

func (f *fake) do(s Step) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.did = append(f.did, strings.TrimSpace(fmt.Sprintf("%s %s %s", s.Do, s.On, s.To)))
	f.state.simulateStep(s, f.goal)
	if f.spoil != nil {
		return f.spoil(s, &f.state)
	}
	return nil
}

func (f *fake) TransferLeadership(_ context.Context, from, to string) error {
	return f.do(Step{TransferLead, from, to})
}
func (f *fake) Replica(_ context.Context, name string) error { return f.do(Step{Replica, name, ""}) }
func (f *fake) Agent(_ context.Context, node string) error   { return f.do(Step{Agent, node, ""}) }
func (f *fake) Drain(_ context.Context, node string) error   { return f.do(Step{Drain, node, ""}) }
func (f *fake) Return(_ context.Context, node string) error  { return f.do(Step{Return, node, ""}) }

func (f *fake) run(t *testing.T) (said []string, err error) {
	t.Helper()
	err = Run(t.Context(), f, f.goal, Options{Patience: time.Minute, Say: func(format string, args ...any) {
		said = append(said, fmt.Sprintf(format, args...))
	}})
	return said, err
}

// A machine that takes three seconds to say how the cluster is has half of its time for something else.
func TestSlowMachinesAreAskedLess(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		f := &fake{state: parse("cp1:old*"), goal: Goal{Release: "new"}, slow: 3 * time.Second}
		before := time.Now()
		f.spoil = func(Step, *State) error {
			before, f.looks, f.deaf = time.Now(), 0, time.Now().Add(55*time.Second)
			return nil
		}
		if _, err := f.run(t); err != nil {
			t.Fatal(err)
		}
		// 10 while it is deaf, the one that sees the step done, and the last one.
		if looks, took := -f.looks, time.Since(before); looks > 13 || took > 70*time.Second {
			t.Errorf("%d looks in %v", looks, took)
		}
	})
}

// An upgrade says what it does, and does it in the order of the plan, also where the cluster does not answer for a while
// after each step.
func TestRun(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		f := &fake{state: parse("cp1:old* cp2:old cp3:old w1:old w2:old"),
			goal: Goal{Release: "new", Drain: []string{"w2"}}}
		f.spoil = func(Step, *State) error { f.deaf = time.Now().Add(20 * time.Second); return nil }
		said, err := f.run(t)
		want := []string{
			"replica cp2: programs exchanged, started again (1 of 3 replicas, 0 of 2 nodes)",
			"replica cp3: programs exchanged, started again (2 of 3 replicas, 0 of 2 nodes)",
			"cp1 hands the lead over to cp2 (2 of 3 replicas, 0 of 2 nodes)",
			"replica cp1: programs exchanged, started again (3 of 3 replicas, 0 of 2 nodes)",
			"node w1: programs exchanged, pods stay (3 of 3 replicas, 1 of 2 nodes)",
			"node w2: drained (3 of 3 replicas, 1 of 2 nodes)",
			"node w2: programs exchanged, pods stay (3 of 3 replicas, 2 of 2 nodes)",
			"node w2: takes pods again (3 of 3 replicas, 2 of 2 nodes)",
			"every replica and node has the programs",
		}
		if err != nil || !slices.Equal(said, want) {
			t.Errorf("%v\n%s", err, strings.Join(said, "\n"))
		}
	})
}

// It stops at the first replica or node that is not well, touches no other, says which and why, and goes on from there when it
// is run again.
func TestRunStops(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			name  string
			spoil func(step Step, s *State) error
			did   string
			says  string
			then  string // when it is run again, and all is well
		}{
			{"a step fails", func(step Step, s *State) error {
				if step.On == "cp3" {
					s.Members[2].Release = "old"
					return errors.New("no space left on device")
				}
				return nil
			}, "replica cp2, replica cp3", "stopped at this step: replica cp3: programs exchanged, started again: no " +
				"space left on device",
				"replica cp3, hand over cp1 cp2, replica cp1, agent w1, agent w2"},
			{"a replica is not ready", func(step Step, s *State) error {
				if step.On == "cp2" {
					s.Members[1].Problem = "it reads its snapshot"
				}
				return nil
			}, "replica cp2", "last: replica cp2: it reads its snapshot",
				"replica cp3, hand over cp1 cp2, replica cp1, agent w1, agent w2"},
			{"a replica runs something else", func(step Step, s *State) error {
				if step.On == "cp2" {
					s.Members[1].Release = "other"
				}
				return nil
			}, "replica cp2", "last: replica cp2 says that it runs other, not new",
				"replica cp2, replica cp3, hand over cp1 cp2, replica cp1, agent w1, agent w2"},
			{"the lead comes back", func(step Step, s *State) error {
				if step.Do == TransferLead {
					s.simulateStep(Step{TransferLead, step.To, step.On}, Goal{})
				}
				return nil
			}, "replica cp2, replica cp3, hand over cp1 cp2", "last: cp1 still leads",
				"hand over cp1 cp2, replica cp1, agent w1, agent w2"},
			{"the new leader does not begin", func(step Step, s *State) error {
				if step.Do == TransferLead {
					s.Busy = "the leader's work has not begun"
				}
				return nil
			}, "replica cp2, replica cp3, hand over cp1 cp2", "last: the leader's work has not begun",
				"replica cp1, agent w1, agent w2"},
			{"a node is not Ready", func(step Step, s *State) error {
				if step.On == "w1" {
					s.Nodes[0].Problem = "NetworkUnavailable"
				}
				return nil
			}, "replica cp2, replica cp3, hand over cp1 cp2, replica cp1, agent w1",
				"last: node w1: NetworkUnavailable", "agent w2"},
		} {
			f := &fake{state: parse("cp1:old* cp2:old cp3:old w1:old w2:old"), goal: Goal{Release: "new"},
				spoil: c.spoil}
			_, err := f.run(t)
			if did := strings.Join(f.did, ", "); did != c.did || !errors.Is(err, ErrStopped) ||
				!strings.Contains(err.Error(), c.says) {
				t.Errorf("%s: %s\n%v", c.name, did, err)
			}
			f.did, f.spoil = nil, nil
			// What was not well becomes so while it is run again, and nothing is exchanged before.
			time.AfterFunc(10*time.Second, func() {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.state.Busy = ""
				for i := range f.state.Members {
					f.state.Members[i].Problem = ""
				}
				for i := range f.state.Nodes {
					f.state.Nodes[i].Problem = ""
				}
			})
			_, err = f.run(t)
			if did := strings.Join(f.did, ", "); did != c.then || err != nil {
				t.Errorf("%s, again: %s\n%v", c.name, did, err)
			}
		}
	})
}

// What was seen of a replica is told, also where the cluster does not answer any more when the time is up.
func TestRunTellsWhatItSaw(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		f := &fake{state: parse("cp1:old*"), goal: Goal{Release: "new"}, looks: 3}
		f.spoil = func(_ Step, s *State) error { s.Members[0].Problem = "it reads its snapshot"; return nil }
		if _, err := f.run(t); err == nil || !strings.Contains(err.Error(), "replica cp1: it reads its snapshot") {
			t.Error(err)
		}
	})
}

// A cluster that does not answer at all, and a goal that it cannot have, are errors before anything is done.
func TestRunBeginsNothing(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		f := &fake{state: parse("cp1:old*"), goal: Goal{Release: "new"}, deaf: time.Now().Add(time.Hour)}
		if _, err := f.run(t); err == nil || !strings.Contains(err.Error(), "connection refused") || len(f.did) > 0 {
			t.Errorf("%v %v", f.did, err)
		}
		f = &fake{state: parse("cp1:new*"), goal: Goal{Release: "old", Level: 1}}
		f.state.Level = 2
		if _, err := f.run(t); err == nil || !strings.Contains(err.Error(), "no replica can go back") ||
			len(f.did) > 0 {
			t.Errorf("%v %v", f.did, err)
		}
	})
}
