package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/rotation"
)

// unready waits for a replica to say why it is not ready.
func (p *plane) unready(t *testing.T, name, why string) {
	t.Helper()
	cs := p.client(name)
	eventually(t, func() error {
		raw, err := cs.RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background())
		if err == nil || !strings.Contains(string(raw)+err.Error(), why) {
			return fmt.Errorf("it says %q, %v", raw, err)
		}
		return nil
	})
}

// A replica that was away while the service account key was exchanged, and was removed for it, is not taken in again with the
// former key: it says what to do, and that works.
func TestReplicaOfBeforeAnExchange(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.stop("cp3")
	if err := p.call("cp1", "DELETE", api.PathClusterMembers+"/cp3", nil, nil); err != nil {
		t.Fatal(err)
	}
	p.begins(t, "cp1", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey), Keep: "0s"})
	p.rotated(t, "cp2", rotation.ServiceAccountKey)
	cfg := p.members["cp3"].cfg
	if _, err := recovery.Rebuild(cfg.Dir(), nil); err != nil {
		t.Fatal(err)
	}
	p.start(cfg)
	p.unready(t, "cp3", "replica cp3 has the service-account-key")
	if s := p.status("cp1"); slices.ContainsFunc(s.Members, func(m api.ClusterMember) bool { return m.Name == "cp3" }) {
		t.Errorf("it was taken in: %+v", s.Members)
	}
	p.stop("cp3")
	if err := os.Rename(cfg.DataDir, cfg.DataDir+".aside"); err != nil {
		t.Fatal(err)
	}
	p.join(cfg)
	p.start(cfg)
	p.ready("cp3")
	p.believed(t, true, bearer{asked: p.asked(t, "cp1")}, bearer{asked: p.asked(t, "cp3")})
}

// A member that signs by a key that most others refuse gets no traffic, and every replica raises an alarm. The others, and
// the cluster, are well.
func TestMemberWithStaleKeys(t *testing.T) {
	p := newPlane(t, 3, nil)
	former := pki.KeyIDOf(p.asked(t, "cp1"))
	eventually(t, func() error { // one that is not well gets no vote
		for _, m := range p.status("cp1").Members {
			if !m.Voter {
				return fmt.Errorf("%s has no vote", m.Name)
			}
		}
		return nil
	})
	p.stop("cp3")
	cfg := p.members["cp3"].cfg
	folder := filepath.Join(cfg.DataDir, datadir.PKIFolder)
	text, _, err := pki.NewServiceKey()
	if err == nil {
		err = errors.Join(pki.BelieveServiceKey(folder, text), pki.SignServiceKey(folder, text), pki.DropServiceKey(folder, former))
	}
	if err != nil {
		t.Fatal(err)
	}
	p.start(cfg)
	p.unready(t, "cp3", "join")
	eventually(t, func() error {
		for _, a := range p.status("cp1").Alarms {
			if a.Kind == "stale keys" && a.Member == "cp3" && a.Since > 0 && strings.Contains(a.Message, "service-account-key") && strings.Contains(a.Remedy, "join") {
				return nil
			}
		}
		return fmt.Errorf("the alarms are %+v", p.status("cp1").Alarms)
	})
	p.ready("cp1")
	p.ready("cp2")
	// The group goes by others' keys: it does not go on leading, for which it stands as well as they do.
	eventually(t, func() error { // it may be about to have its vote
		return p.call(p.status("cp1").Leader, "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp3"}, nil)
	})
	eventually(t, func() error {
		if s := p.status("cp1"); s.Leader == "" || s.Leader == "cp3" {
			return fmt.Errorf("%q leads", s.Leader)
		}
		return nil
	})
}
