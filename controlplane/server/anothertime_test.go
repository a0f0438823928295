package server

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/rotation"
)

// A backup of the midst of an exchange, restored after the key was exchanged once more: the exchange is given up, no key
// comes back, and the next exchange goes as ever.
func TestExchangeOfAnotherTime(t *testing.T) {
	p := newPlane(t, 1, nil)
	p.begins(t, "cp1", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey)})
	p.waitsFor(t, "cp1", rotation.Wait, "until")
	file := p.backup("cp1")
	p.begins(t, "cp1", api.ClusterRotate{Force: true})
	p.rotated(t, "cp1", rotation.ServiceAccountKey)
	p.begins(t, "cp1", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey), Keep: "0s"})
	now := p.rotated(t, "cp1", rotation.ServiceAccountKey)
	p.stop("cp1")
	if _, err := recovery.Restore(p.members["cp1"].cfg.Dir(), file, recovery.RestoreOptions{Replace: true}); err != nil {
		t.Fatal(err)
	}
	p.again("cp1")
	eventually(t, func() error {
		all := p.keys("cp1")
		if all.Rotation == nil || all.Rotation.Step != string(rotation.Aborted) {
			return fmt.Errorf("%+v, waiting for %q", all.Rotation, all.Waiting)
		}
		return nil
	})
	if signs := pki.KeyIDOf(p.asked(t, "cp1")); signs != now.New {
		t.Errorf("it signs with %s, want %s", signs, now.New)
	}
	eventually(t, func() error { // the replica may have yet to read that it was given up
		return p.call("cp1", "POST", api.PathClusterKeys, api.ClusterRotate{Kind: string(rotation.ServiceAccountKey), Keep: "0s"}, nil)
	})
	if next := p.rotated(t, "cp1", rotation.ServiceAccountKey); next.Old != now.New {
		t.Errorf("the next exchange is one of %s, want %s", next.Old, now.New)
	}
}

// At no step does a replica take up or give up a key by an exchange that is none of its key's; what was given up may be known
// to whoever it was given up for.
func TestKeysOfAnotherTimeStay(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "pki")
	trust, err := pki.Init(folder, "test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := pki.NewServiceTokens("test", trust.ServiceKey)
	if err != nil {
		t.Fatal(err)
	}
	k := &keys{folder: folder, trust: trust, tokens: tokens}
	k.seen.Store(&rotation.Record{})
	signs, _ := tokens.KeyIDs()
	text, id, err := pki.NewServiceKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, old := range []string{"of another time", signs} {
		for _, step := range []rotation.Step{rotation.Trust, rotation.Use, rotation.Wait, rotation.Forget} {
			rec := rotation.Record{Version: rotation.Version, ID: "x", Kind: rotation.ServiceAccountKey, Old: old, New: id, Step: step}
			if rec.Sealed, err = trust.Seal(sealContext(rec), text); err != nil {
				t.Fatal(err)
			}
			err := k.perform(context.Background(), rec)
			is, believes := tokens.KeyIDs()
			if foreign := old != signs; foreign && (err == nil || !strings.Contains(err.Error(), signs) || is != signs || len(believes) != 1) {
				t.Errorf("%s of another time: %v; it signs with %s and believes %q", step, err, is, believes)
			} else if !foreign && (err != nil || len(believes) == 0) {
				t.Errorf("%s of its own: %v", step, err)
			}
		}
	}
	if is, believes := tokens.KeyIDs(); is != id || len(believes) != 1 {
		t.Errorf("after its own exchange it signs with %s and believes %q", is, believes)
	}
}
