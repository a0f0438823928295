package membership_test

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/raftstore"
)

// A removed member is reported while its keys are valid, even if another machine has its name. A
// replica that was rebuilt removed itself, and is not reported.
func TestRemovedMemberIsReportedAfterNameReuse(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.StopReplica("cp2")
	if _, err := recovery.Rebuild(p.Members["cp2"].Config.Dir(), nil); err != nil {
		t.Fatal(err)
	}
	p.Restart("cp2")
	p.StopReplica("cp3")
	if err := p.Call("cp1", "DELETE", api.PathClusterMembers+"/cp3", nil, nil); err != nil {
		t.Fatal(err)
	}
	cfg := p.Members["cp3"].Config
	if err := os.Rename(cfg.DataDir, cfg.DataDir+".stolen"); err != nil {
		t.Fatal(err)
	}
	p.Join(cfg)
	p.StartReplica(cfg)
	p.AwaitReady("cp3")
	if gone := p.Keys("cp1").Removed; len(gone) != 1 || gone[0].Name != "cp3" || len(gone[0].Kinds) == 0 {
		t.Errorf("the reported removed members are %+v, want cp3", gone)
	}
	if err := p.Call("cp1", "POST", api.PathClusterKeys, api.ClusterRotate{Dismiss: "cp3"}, nil); err != nil {
		t.Fatal(err)
	}
	if gone := p.Keys("cp1").Removed; len(gone) != 0 {
		t.Errorf("after the dismissal the reported removed members are %+v", gone)
	}
}

// A replica is not reported as removed if its removal was refused, whether an operator or the
// autopilot requested the removal. The report about an earlier replica of the same name remains.
func TestRefusedRemovalIsNotReported(t *testing.T) {
	var replicas wiredReplicas
	p := newPlane(t, 3, replicas.recordWired)
	p.StopReplica("cp3")
	if err := p.Call("cp1", "DELETE", api.PathClusterMembers+"/cp2", nil, nil); err == nil ||
		!strings.Contains(err.Error(), "cp3") {
		t.Fatalf("cp2 is removed while cp3 is down: %v", err)
	}
	p.Restart("cp3")
	if gone := p.Keys("cp1").Removed; len(gone) != 0 {
		t.Errorf("after a refused removal the reported removed members are %+v", gone)
	}

	leader := p.ClusterStatus("cp1").Leader
	r, dead := replicas.membershipOf(leader), "cp2"
	if leader == dead {
		dead = "cp3"
	}
	if err := r.RemoveDead(t.Context(), dead); !errors.Is(err, raftstore.ErrInvalid) {
		t.Fatalf("the autopilot removes %s, which responds: %v", dead, err)
	}
	if gone := p.Keys("cp1").Removed; len(gone) != 0 {
		t.Errorf("after a refused removal by the autopilot the reported removed members are %+v", gone)
	}

	before := time.Now().Add(-time.Hour)
	if err := r.RecordRemoval(t.Context(), dead, "its machine was sold", before); err != nil {
		t.Fatal(err)
	}
	p.StopReplica("cp3")
	if err := p.Call("cp1", "DELETE", api.PathClusterMembers+"/cp2", nil, nil); err == nil {
		t.Fatal("cp2 is removed while cp3 is down")
	}
	p.Restart("cp3")
	if gone := p.Keys("cp1").Removed; len(gone) != 1 || gone[0].Name != dead || gone[0].At != before.UnixMilli() {
		t.Errorf("the reported removed members are %+v, want %s with its removal of an hour ago", gone, dead)
	}
}
