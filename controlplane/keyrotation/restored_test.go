package keyrotation_test

import (
	"fmt"
	"testing"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// A backup that was made during a rotation is restored after the key was rotated again. The
// restored rotation is aborted, no old key is used again, and the next rotation succeeds.
func TestUnrelatedRotationIsAborted(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.requestRotation(t, "cp1", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey)})
	p.awaitStep(t, "cp1", rotation.Wait, "until")
	file := p.Backup("cp1")
	p.requestRotation(t, "cp1", api.ClusterRotate{Force: true})
	p.awaitRotation(t, "cp1", rotation.ServiceAccountKey)
	p.requestRotation(t, "cp1", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey), Keep: "0s"})
	now := p.awaitRotation(t, "cp1", rotation.ServiceAccountKey)
	p.StopReplica("cp1")
	if _, err := recovery.Restore(p.Members["cp1"].Config.Dir(), file, recovery.RestoreOptions{Replace: true}); err !=
		nil {
		t.Fatal(err)
	}
	p.Restart("cp1")
	servertest.Eventually(t, func() error {
		all := p.Keys("cp1")
		if all.Rotation == nil || all.Rotation.Step != string(rotation.Aborted) {
			return fmt.Errorf("%+v, waiting for %q", all.Rotation, all.Waiting)
		}
		return nil
	})
	if signs := pki.ParseKeyID(p.requestToken(t, "cp1")); signs != now.New {
		t.Errorf("cp1 signs with %s, want %s", signs, now.New)
	}
	servertest.Eventually(t, func() error { // the replica may not have read yet that the rotation was aborted
		return p.Call("cp1", "POST", api.PathClusterKeys,
			api.ClusterRotate{Kind: string(rotation.ServiceAccountKey), Keep: "0s"}, nil)
	})
	if next := p.awaitRotation(t, "cp1", rotation.ServiceAccountKey); next.Old != now.New {
		t.Errorf("the next rotation replaces %s, want %s", next.Old, now.New)
	}
}
