package keyrotation

import (
	"context"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
)

// A rotation that applies to no current key of a replica, as in a restored backup, changes no key
// at any step.
func TestUnrelatedRotationChangesNoKey(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "pki")
	trust, err := pki.Init(folder, "test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := pki.NewServiceTokens("test", trust.ServiceKey)
	if err != nil {
		t.Fatal(err)
	}
	f := &follower{folder: folder, trust: trust, tokens: tokens}
	f.current.Store(&rotation.Record{})
	signs, _ := tokens.KeyIDs()
	text, id, err := pki.NewServiceKey()
	if err != nil {
		t.Fatal(err)
	}
	for _, old := range []string{"an unrelated key", signs} {
		for _, step := range []rotation.Step{rotation.Trust, rotation.Use, rotation.Wait, rotation.Forget} {
			rec := rotation.Record{Version: rotation.Version, ID: "x", Kind: rotation.ServiceAccountKey, Old: old,
				New: id, Step: step}
			if rec.Sealed, err = trust.Seal(sealContext(rec), text); err != nil {
				t.Fatal(err)
			}
			err := f.performStep(context.Background(), rec)
			is, believes := tokens.KeyIDs()
			if foreign := old != signs; foreign &&
				(err == nil || !strings.Contains(err.Error(), signs) || is != signs || len(believes) != 1) {
				t.Errorf("%s of an unrelated rotation: %v; the replica signs with %s and trusts %q", step,
					err, is, believes)
			} else if !foreign && (err != nil || len(believes) == 0) {
				t.Errorf("%s of its own rotation: %v", step, err)
			}
		}
	}
	if is, believes := tokens.KeyIDs(); is != id || len(believes) != 1 {
		t.Errorf("after its own rotation the replica signs with %s and trusts %q", is, believes)
	}
}
