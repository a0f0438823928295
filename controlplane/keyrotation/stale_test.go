package keyrotation_test

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
	"keelson.dev/keelson/controlplane/keyrotation/rotation"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// awaitNotReady waits until a replica reports why it is not ready.
func (p *plane) awaitNotReady(t *testing.T, name, why string) {
	t.Helper()
	cs := p.Client(name)
	servertest.Eventually(t, func() error {
		raw, err := cs.RESTClient().Get().AbsPath("/readyz").DoRaw(context.Background())
		if err == nil || !strings.Contains(string(raw)+err.Error(), why) {
			return fmt.Errorf("readyz returned %q, %v", raw, err)
		}
		return nil
	})
}

// A replica that was removed and missed a rotation of the service account key is not admitted with
// the previous key. Its error names the remedy, and the remedy works.
func TestReplicaThatMissedARotation(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.StopReplica("cp3")
	if err := p.Call("cp1", "DELETE", api.PathClusterMembers+"/cp3", nil, nil); err != nil {
		t.Fatal(err)
	}
	p.requestRotation(t, "cp1", api.ClusterRotate{Kind: string(rotation.ServiceAccountKey), Keep: "0s"})
	p.awaitRotation(t, "cp2", rotation.ServiceAccountKey)
	cfg := p.Members["cp3"].Config
	if _, err := recovery.Rebuild(cfg.Dir(), nil); err != nil {
		t.Fatal(err)
	}
	p.StartReplica(cfg)
	p.awaitNotReady(t, "cp3", "replica cp3 has the service-account-key")
	if s := p.ClusterStatus("cp1"); slices.ContainsFunc(s.Members, func(m api.ClusterMember) bool {
		return m.Name == "cp3"
	}) {
		t.Errorf("the replica was admitted: %+v", s.Members)
	}
	p.StopReplica("cp3")
	if err := os.Rename(cfg.DataDir, cfg.DataDir+".aside"); err != nil {
		t.Fatal(err)
	}
	p.Join(cfg)
	p.StartReplica(cfg)
	p.AwaitReady("cp3")
	p.checkTokens(t, true, accountTokens{requested: p.requestToken(t, "cp1")},
		accountTokens{requested: p.requestToken(t, "cp3")})
}

// A member whose signing key is rejected by most other members gets no traffic, and every replica
// raises an alarm. The other replicas stay ready.
func TestMemberWithStaleKeys(t *testing.T) {
	p := newPlane(t, 3, nil)
	former := pki.ParseKeyID(p.requestToken(t, "cp1"))
	servertest.Eventually(t, func() error { // a replica that is not ready gets no vote
		for _, m := range p.ClusterStatus("cp1").Members {
			if !m.Voter {
				return fmt.Errorf("%s has no vote", m.Name)
			}
		}
		return nil
	})
	p.StopReplica("cp3")
	cfg := p.Members["cp3"].Config
	folder := filepath.Join(cfg.DataDir, datadir.PKIFolder)
	text, _, err := pki.NewServiceKey()
	if err == nil {
		err = errors.Join(pki.AddServiceKey(folder, text), pki.SetSigningServiceKey(folder, text),
			pki.RemoveServiceKey(folder, former))
	}
	if err != nil {
		t.Fatal(err)
	}
	p.StartReplica(cfg)
	p.awaitNotReady(t, "cp3", "join")
	servertest.Eventually(t, func() error {
		for _, a := range p.ClusterStatus("cp1").Alarms {
			if a.Kind == "stale keys" && a.Member == "cp3" && a.Since > 0 &&
				strings.Contains(a.Message, "service-account-key") && strings.Contains(a.Remedy, "join") {
				return nil
			}
		}
		return fmt.Errorf("alarms: %+v", p.ClusterStatus("cp1").Alarms)
	})
	p.AwaitReady("cp1")
	p.AwaitReady("cp2")
	// A leader with stale keys transfers leadership.
	servertest.Eventually(t, func() error { // it may not have its vote yet
		return p.Call(p.ClusterStatus("cp1").Leader, "POST", api.PathClusterStepDown,
			api.ClusterStepDown{To: "cp3"}, nil)
	})
	servertest.Eventually(t, func() error {
		if s := p.ClusterStatus("cp1"); s.Leader == "" || s.Leader == "cp3" {
			return fmt.Errorf("%q leads", s.Leader)
		}
		return nil
	})
}
