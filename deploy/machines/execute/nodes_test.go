package execute

import (
	"strings"
	"testing"

	"keelson.dev/keelson/deploy/machines/plan"
)

// A node is of use when it is ready and, where its agent has just started, when traffic comes to its pods, two looks in a row.
func TestNodesAreOfUse(t *testing.T) {
	down := plan.Node{Ready: true, Network: "routes: no vxlan"}
	well := plan.Node{Ready: true}
	ill := plan.Node{Why: "no runtime"}
	for _, c := range []struct {
		name  string
		begun bool
		looks []plan.Node
		want  []string // what is said of each; "" = it is of use
	}{
		{"one that was there", false, []plan.Node{well}, []string{""}},
		{"one that was there, without traffic", false, []plan.Node{down}, []string{""}},
		{"one that was there, not ready", false, []plan.Node{ill, well}, []string{"node w1: no runtime", ""}},
		{"a new one", true, []plan.Node{well, well}, []string{"node w1: its agent has just started", ""}},
		{"a new one without traffic", true, []plan.Node{down, down, well, well},
			[]string{"node w1: its pods are not reachable: routes: no vxlan", "node w1: its pods are not reachable",
				"node w1: its agent", ""}},
		{"a new one that fails a moment later", true, []plan.Node{well, down, well, well},
			[]string{"node w1: its agent", "node w1: its pods", "node w1: its agent", ""}},
		{"a new one that is ready now and then", true, []plan.Node{well, ill, well, well},
			[]string{"node w1: its agent", "node w1: no runtime", "node w1: its agent", ""}},
	} {
		seen := readyCounts{}
		if err := seen.checkNode("w1", c.begun, map[string]plan.Node{"w2": well}); err == nil ||
			err.Error() != "there is no node w1 yet" {
			t.Errorf("%s: before it is there: %v", c.name, err)
		}
		for i, n := range c.looks {
			said := ""
			if err := seen.checkNode("w1", c.begun, map[string]plan.Node{"w1": n}); err != nil {
				said = err.Error()
			}
			if c.want[i] == "" && said != "" || !strings.HasPrefix(said, c.want[i]) {
				t.Errorf("%s: look %d: %q, want %q", c.name, i+1, said, c.want[i])
			}
		}
	}
}
