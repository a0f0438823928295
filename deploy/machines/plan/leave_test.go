package plan

import (
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// Where no machine of the file has a replica that would tell whose a node is, it is the file's if its agent was told of a replica of the
// file. What a reset has left that was cut off is taken away by the next one.
func TestResetLeavesOtherClustersAlone(t *testing.T) {
	others := func(w *world, how func(*machines.Facts)) {
		for _, name := range []string{"cp1", "cp2", "cp3", "cp4"} {
			w.facts[name] = emptyFacts()
		}
		f := w.facts["w1"]
		how(&f)
		w.facts["w1"] = f
	}
	to := func(agent string) func(*world) {
		return func(w *world) { others(w, func(f *machines.Facts) { f.Agent = agent }) }
	}
	for _, c := range []struct {
		name   string
		damage func(*world)
		ours   bool
	}{
		{"the cluster as it is", func(*world) {}, true},
		{"its agent as the file has it", func(w *world) { others(w, func(*machines.Facts) {}) }, true},
		{"no control plane is reached", func(w *world) {
			for _, name := range []string{"cp1", "cp2", "cp3", "cp4"} {
				delete(w.facts, name)
			}
		}, true},
		{"its agent by hand", to("server: 192.0.2.13:6444\n"), true},
		{"its agent by hand, with a list", to("server: [\"192.0.2.14\"]\n"), true},
		{"an agent of another cluster", to("server: [\"192.0.2.113:6444\"]\n"), false},
		{"an agent that was told of no replica", to("max-pods: 3\n"), false},
		{"settings that cannot be read", to("server: ["), false},
		{"an agent that runs without settings", to(""), false},
		{"what a reset has left", func(w *world) {
			others(w, func(f *machines.Facts) { f.Agent, f.Active = "", nil })
		}, true},
		{"a machine without anything", func(w *world) {
			others(w, func(f *machines.Facts) {
				*f = emptyFacts()
			})
		}, true},
	} {
		w := settled(t)
		c.damage(w)
		if err := CheckForeignNodes(w.cluster, w.facts); (err == nil) != c.ours ||
			err != nil && !strings.HasPrefix(err.Error(), "w1: ") {
			t.Errorf("%s: %v; ours: %v", c.name, err, c.ours)
		}
	}
}
