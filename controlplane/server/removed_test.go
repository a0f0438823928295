package server

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/autopilot"
	"keelson.dev/keelson/raftstore"
)

// Who was removed is told of as long as its keys are good, also when another machine has its name; one that was rebuilt by
// itself was not removed by anybody.
func TestRemovedNameIsAnothersNow(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.stop("cp2")
	if _, err := recovery.Rebuild(p.members["cp2"].cfg.Dir(), nil); err != nil {
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

// Of a replica that stays since its removal was refused nothing is told, whoever wanted it removed; and what was told of one
// that had its name before is told still.
func TestRefusedRemovalIsNotToldOf(t *testing.T) {
	var replicas wiredReplicas
	p := newPlane(t, 3, replicas.note)
	p.stop("cp3")
	if err := p.call("cp1", "DELETE", api.PathClusterMembers+"/cp2", nil, nil); err == nil || !strings.Contains(err.Error(), "cp3") {
		t.Fatalf("cp2 is removed while cp3 is down: %v", err)
	}
	p.again("cp3")
	if gone := p.keys("cp1").Removed; len(gone) != 0 {
		t.Errorf("after a refused removal it is told of %+v", gone)
	}

	leader := p.status("cp1").Leader
	r, dead := replicas.get(leader), "cp2"
	if leader == dead {
		dead = "cp3"
	}
	rec, at, err := r.storedPilot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	d := autopilot.Decision{Act: autopilot.Remove, Dead: dead, Why: dead + " is silent"}
	if err := r.removeDead(t.Context(), r.client.As(api.User{Name: pilotUser}), d, rec, at, raftstore.Fence(r.store.Status().Term)); !errors.Is(err, raftstore.ErrInvalid) {
		t.Fatalf("the autopilot removes %s, which answers: %v", dead, err)
	}
	if gone := p.keys("cp1").Removed; len(gone) != 0 {
		t.Errorf("after the autopilot was refused it is told of %+v", gone)
	}

	before := time.Now().Add(-time.Hour)
	if _, err := r.noteRemoved(t.Context(), dead, "its machine was sold", r.keys.all(), before); err != nil {
		t.Fatal(err)
	}
	p.stop("cp3")
	if err := p.call("cp1", "DELETE", api.PathClusterMembers+"/cp2", nil, nil); err == nil {
		t.Fatal("cp2 is removed while cp3 is down")
	}
	p.again("cp3")
	if gone := p.keys("cp1").Removed; len(gone) != 1 || gone[0].Name != dead || gone[0].At != before.UnixMilli() {
		t.Errorf("told of are %+v, want %s of an hour ago", gone, dead)
	}
}
