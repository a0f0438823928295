package podfiles

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// Fields of the grant record are matched by name: unknown ones are skipped. An invalid record is
// ignored, and without one the pod has the resources of its spec.
func TestGrantOnDisk(t *testing.T) {
	paths := agent.Paths{State: t.TempDir()}
	p := sized("u1", "cpu=1 memory=64Mi", "cpu=2 memory=64Mi")
	if g, found, err := LoadGrant(paths, p); found || err != nil || !g.CoversSpec(p) || !g.InEffect {
		t.Errorf("without a record: %v %v %v", g, found, err)
	}
	old := lifecycle.GrantFromSpec(sized("u1", "cpu=500m memory=64Mi", "cpu=1 memory=64Mi"))
	if err := SaveGrant(paths, p, old); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(paths.State, "pods", "u1", GrantFile)
	g, found, err := LoadGrant(paths, p)
	if !found || err != nil || g.CoversSpec(p) || g.ApplyTo(p).Spec.Containers[0].Resources.Requests.Cpu().String() !=
		"500m" || p.Spec.Containers[0].Resources.Requests.Cpu().String() != "1" {
		t.Errorf("%v %v %v", g, found, err)
	}
	const other = `{"version":9,"generation":3,"later":{"a":[1]},"containers":{"app":{"requests":{"cpu":"250m"}},` +
		`"gone":{}},"settled":true}`
	if err := os.WriteFile(file, []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	if g, found, err = LoadGrant(paths, p); !found || err != nil || g.Generation != 3 ||
		g.ApplyTo(p).Spec.Containers[0].Resources.Requests.Cpu().String() != "250m" {
		t.Errorf("of a later release: %v %v %v", g, found, err)
	}
	for name, text := range map[string]string{"torn": other[:40], "empty": "",
		"huge": strings.Repeat(" ", grantLimit+1)} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if g, found, err = LoadGrant(paths, p); found || err == nil || !g.CoversSpec(p) {
			t.Errorf("%s: %v %v %v", name, g, found, err)
		}
	}
}
