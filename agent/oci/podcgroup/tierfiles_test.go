package podcgroup

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/agent"
)

// With both cgroup versions the QoS cgroups get the same limits, in different files and units. v2
// enables the controllers for children.
func TestTierFiles(t *testing.T) {
	want := agent.Tiers{CPU: 2000, Memory: 4 << 30, PIDs: 30000, Burstable: 1500}
	for unified, files := range map[bool]map[string]string{
		false: {"cpu/keelson/kubepods/cpu.shares": "2048",
			"memory/keelson/kubepods/memory.limit_in_bytes": "4294967296",
			"pids/keelson/kubepods/pids.max":                "30000",
			"cpu/keelson/kubepods/burstable/cpu.shares":     "1536", "cpu/keelson/kubepods/besteffort/cpu.shares": "2"},
		true: {"keelson/kubepods/cpu.weight": "174", "keelson/kubepods/memory.max": "4294967296",
			"keelson/kubepods/pids.max":             "30000",
			"keelson/kubepods/burstable/cpu.weight": "138", "keelson/kubepods/besteffort/cpu.weight": "1",
			// the last value written
			"cgroup.subtree_control": "+pids", "keelson/kubepods/cgroup.subtree_control": "+pids"},
	} {
		tree := fakeTree(t, unified)
		for range 2 {
			if err := tree.ApplyTiers(want); err != nil {
				t.Fatal(err)
			}
		}
		base := tree.Controllers["cpu"]
		if !unified {
			base = filepath.Dir(base)
		}
		for file, value := range files {
			if got, err := os.ReadFile(filepath.Join(base, file)); err != nil || string(got) != value {
				t.Errorf("v2 %v: %s is %q, want %s (%v)", unified, file, got, value, err)
			}
		}
		delete(tree.Controllers, "pids")
		if err := tree.ApplyTiers(agent.Tiers{CPU: 1000}); err == nil ||
			!strings.Contains(err.Error(), "no pids cgroup controller") {
			t.Errorf("without a controller: %v", err)
		}
	}
	none := tierLimits(agent.Tiers{}, true)
	if !slices.Contains(none, tierLimit{podsCgroup, "memory", "memory.max", "max"}) ||
		!slices.Contains(none, tierLimit{podsCgroup, "pids", "pids.max", "max"}) {
		t.Errorf("no limits: %v", none)
	}
}

// fakeTree returns a cgroup hierarchy of plain files, for v2 or the three relevant controllers of
// v1.
func fakeTree(t *testing.T, unified bool) *Tree {
	dir := t.TempDir()
	tree := &Tree{Root: "/keelson", Unified: unified, Controllers: map[string]string{}}
	for _, c := range []string{"cpu", "memory", "pids"} {
		tree.Controllers[c] = dir
		if !unified {
			tree.Controllers[c] = filepath.Join(dir, c)
		}
	}
	if unified {
		for _, d := range []string{"", "keelson", "keelson/kubepods"} {
			if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, d, "cgroup.subtree_control"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	return tree
}
