package nemesis_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore/storetest/nemesis"
)

func TestPlanFollowsFromItsSeed(t *testing.T) {
	a, b := nemesis.New(7, 20*time.Second, nemesis.All), nemesis.New(7, 20*time.Second, nemesis.All)
	if a.String() != b.String() {
		t.Error("one seed gives two plans")
	}
	if c := nemesis.New(8, 20*time.Second, nemesis.All); c.String() == a.String() {
		t.Error("two seeds give one plan")
	}
	if longer := nemesis.New(7, 40*time.Second, nemesis.All); !strings.HasPrefix(longer.String(), a.String()) {
		t.Error("a longer plan begins otherwise")
	}
	seen := make(map[nemesis.Fault]bool)
	for _, act := range a[:len(nemesis.All)] {
		seen[act.Fault] = true
	}
	if len(seen) != len(nemesis.All) {
		t.Errorf("%d faults of %d before the first comes again", len(seen), len(nemesis.All))
	}
}

// ledger is a group that only notes what is wrong with it.
type ledger struct {
	names []string
	wrong map[string]bool
	did   int
}

func (l *ledger) note(what string, wrong bool) {
	l.did++
	if wrong {
		l.wrong[what] = true
	} else {
		delete(l.wrong, what)
	}
}

func (l *ledger) Names() []string    { return l.names }
func (l *ledger) Leader() string     { return l.names[0] }
func (l *ledger) Kill(name string)   { l.note("down "+name, true) }
func (l *ledger) Stop(name string)   { l.note("down "+name, true) }
func (l *ledger) Start(name string)  { l.note("down "+name, false) }
func (l *ledger) Pause(name string)  { l.note("paused "+name, true) }
func (l *ledger) Resume(name string) { l.note("paused "+name, false) }
func (l *ledger) Cut(from, to string) {
	if from == to || !slices.Contains(l.names, from) || !slices.Contains(l.names, to) {
		l.wrong[fmt.Sprintf("cut from %q to %q", from, to)] = true
	}
	l.note("line", true)
}
func (l *ledger) Slow(delay, jitter time.Duration) { l.note("line", delay+jitter > 0) }
func (l *ledger) Heal()                            { l.note("line", false) }
func (l *ledger) Jump(name string, by time.Duration) {
	l.note("clock "+name, by != 0)
	if by.Abs() > nemesis.Skew {
		l.wrong["skew"] = true
	}
}
func (l *ledger) Transfer(string)    { l.did++ }
func (l *ledger) Snapshot(string)    { l.did++ }
func (l *ledger) Remove(name string) { l.note("member "+name, true) }
func (l *ledger) Add(name string)    { l.note("member "+name, false) }
func (l *ledger) Wipe(name string)   { l.did++ }
func (l *ledger) Compact()           { l.did++ }

// Every fault does something, and undoes it, in groups of any size.
func TestFaultsAreUndone(t *testing.T) {
	for _, names := range [][]string{{"a"}, {"a", "b", "c"}, {"a", "b", "c", "d", "e"}} {
		for _, f := range nemesis.All {
			l := &ledger{names: names, wrong: make(map[string]bool)}
			plan := nemesis.Plan{{Fault: f, Hold: time.Millisecond, Pick: 1, By: nemesis.Skew}}
			plan.Run(context.Background(), l, t.Logf)
			if len(l.wrong) > 0 {
				t.Errorf("%q among %d leaves %v", f, len(names), l.wrong)
			}
			if l.did == 0 && len(names) > 1 {
				t.Errorf("%q among %d does nothing", f, len(names))
			}
		}
	}
}
