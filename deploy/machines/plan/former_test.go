package plan

import (
	"maps"
	"slices"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// Machines of a cluster go to a release that is known to be later, and to no other one; who joins comes with no earlier one.
func TestFormer(t *testing.T) {
	join := func(w *world) {
		w.cluster.Hosts = append(w.cluster.Hosts,
			machines.Host{Name: "w9", Address: "192.0.2.59", Roles: []machines.Role{machines.Worker}})
		w.facts["w9"] = emptyFacts()
	}
	for _, c := range []struct {
		name, runs, goes string
		change           func(*world)
		want             string
	}{
		{"the same", "v1.1.0", "v1.1.0", nil, ""},
		{"a later one", "v1.1.0", "v1.2.0", nil, ""},
		{"a later one of more digits", "v1.9.0", "v1.10.0", nil, ""},
		{"an earlier one", "v1.1.0", "v1.0.0", nil, "cp1 v1.1.0"},
		{"an earlier one of more digits", "v1.10.0", "v1.9.0", nil, "cp1 v1.10.0"},
		{"another commit", "a68641b", "4090482", nil, "cp1 a68641b"},
		{"a commit after a release", "v1.1.0", "v1.1.0-3-gabc", nil, "cp1 v1.1.0"},
		{"one joins with what runs", "v1.1.0", "v1.1.0", join, ""},
		{"one joins with an earlier one", "v1.1.0", "v1.0.0", join, "cp1 v1.1.0"},
		{"one joins with another commit", "a68641b", "4090482", join, "cp1 a68641b"},
		{"programs that do not say what they are", "v1.1.0", "v1.0.0", func(w *world) {
			for name, f := range w.facts {
				f.Version = ""
				w.facts[name] = f
			}
		}, ""},
	} {
		w := newWorld(aCluster(1, 1))
		w.release = aRelease(c.runs)
		w.carryOut(t)
		w.release = aRelease(c.goes)
		only := slices.Sorted(maps.Keys(w.facts))
		if c.change != nil {
			c.change(w)
		}
		steps := w.plan()
		if _, joins := w.facts["w9"]; joins {
			steps = NewPlan(w.cluster, w.facts, w.release, w.state, "w9")
		} else if c.runs != c.goes {
			steps = NewPlan(w.cluster, w.facts, w.release, w.state, only...)
		}
		got := ""
		if machine, runs := FindDowngrade(w.cluster, w.facts, w.release, steps); machine != "" {
			got = machine + " " + runs
		}
		if got != c.want {
			t.Errorf("%s: from %s to %s it says %q, want %q", c.name, c.runs, c.goes, got, c.want)
		}
	}
	// An upgrade that left a replica out, and is stopped: the file may name neither without more.
	w := newWorld(aCluster(2, 0))
	w.release = aRelease("v1.0.0")
	w.carryOut(t)
	w.release = aRelease("v1.1.0")
	for _, s := range NewPlan(w.cluster, w.facts, w.release, w.state, "cp1") {
		w.do(t, s)
	}
	if machine, _ := FindDowngrade(w.cluster, w.facts, w.release, w.plan()); machine != "" {
		t.Errorf("the rest is not brought to the later one: %s", machine)
	}
	w.release = aRelease("v1.0.0")
	if machine, runs := FindDowngrade(w.cluster, w.facts, w.release, w.plan()); machine != "cp1" || runs != "v1.1.0" {
		t.Errorf("what goes back: %s %s", machine, runs)
	}
}
