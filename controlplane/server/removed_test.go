package server

import (
	"os"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// Who was removed is told of as long as its keys are good, also when another machine has its name; one that was rebuilt by
// itself was not removed by anybody.
func TestRemovedNameIsAnothersNow(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.stop("cp2")
	if _, err := Rebuild(p.members["cp2"].cfg, nil); err != nil {
		t.Fatal(err)
	}
	p.again("cp2")
	p.stop("cp3")
	if err := p.call("cp1", "DELETE", api.PathClusterMembers+"/cp3", nil, nil); err != nil {
		t.Fatal(err)
	}
	cfg := p.members["cp3"].cfg
	if err := os.Rename(cfg.DataDir, cfg.DataDir+".stolen"); err != nil {
		t.Fatal(err)
	}
	p.join(cfg)
	p.start(cfg)
	p.ready("cp3")
	if gone := p.keys("cp1").Removed; len(gone) != 1 || gone[0].Name != "cp3" || len(gone[0].Kinds) == 0 {
		t.Errorf("told of are %+v, want cp3", gone)
	}
	if err := p.call("cp1", "POST", api.PathClusterKeys, api.ClusterRotate{Dismiss: "cp3"}, nil); err != nil {
		t.Fatal(err)
	}
	if gone := p.keys("cp1").Removed; len(gone) != 0 {
		t.Errorf("after it was dismissed there are %+v", gone)
	}
}
