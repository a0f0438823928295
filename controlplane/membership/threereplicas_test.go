package membership_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// TestThreeReplicas tests operations on a cluster of three replicas: the status from each replica,
// leadership transfer, removal and rejoin of a member, loss and rebuild of the data, and loss of
// the majority.
func TestThreeReplicas(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.PutConfigMap("cp3", "a")
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{{"status", p.testStatus}, {"step-down", p.testStepDown}, {"remove", p.testRemove}, {"rebuild", p.testRebuild},
		{"lost majority", p.testLostMajority}} {
		if !t.Run(step.name, func(t *testing.T) { p.T = t; step.run(t) }) {
			return // each step starts from the state after the previous step
		}
	}
}

func (p *plane) testStatus(t *testing.T) {
	servertest.Eventually(t, func() error {
		s := p.ClusterStatus("cp2")
		if len(s.Members) != 3 || s.Leader == "" {
			return fmt.Errorf("the status at cp2 is %+v", s)
		}
		for _, m := range s.Members {
			if m.Ready != "yes" || !m.Voter || m.Applied == 0 || m.Lag > 0 || m.Version != "test" || m.Disk == 0 {
				return fmt.Errorf("the status of a member is %+v", m)
			}
		}
		return nil
	})
	// Compaction works from any replica.
	for name := range p.Members {
		var r api.ClusterCompactResult
		if err := p.Call(name, "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 5}, &r); err != nil ||
			r.Compacted < 5 {
			t.Errorf("compact at %s: %v %+v", name, err, r)
		}
	}
}

func (p *plane) testStepDown(t *testing.T) {
	if err := p.Call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp9"},
		nil); !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), "cp9") {
		t.Errorf("leadership transfer to the unknown replica cp9: %v", err)
	}
	for _, to := range []string{"cp2", "cp3", "cp1"} {
		var r api.ClusterStepDownResult
		if err := p.Call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: to}, &r); err != nil ||
			r.To != to {
			t.Fatalf("leadership transfer to %s: %v, result %+v", to, err, r)
		}
		servertest.Eventually(t, func() error {
			for name := range p.Members {
				if got := p.ClusterStatus(name).Leader; got != to {
					return fmt.Errorf("%s reports the leader %q, want %s", name, got, to)
				}
			}
			return nil
		})
		p.PutConfigMap(to, "led-by-"+to)
	}
}

func (p *plane) testRemove(t *testing.T) {
	peers, err := pki.NewPeers(recovery.TrustFolder(p.Members["cp3"].Config.Dir()), pki.ReplicaPeer("cp3"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"cp1", "cp2"} {
		if err := p.DialPeer(t, to, peers.Client()); err != nil {
			t.Fatalf("connecting member cp3 to %s: %v", to, err)
		}
	}
	// The removed member is the leader, which transfers leadership first.
	if err := p.Call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp3"}, nil); err != nil {
		t.Fatal(err)
	}
	if err := p.Call("cp2", "DELETE", api.PathClusterMembers+"/cp3", nil, nil); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"cp1", "cp2"} { // F51
		servertest.Eventually(t, func() error {
			if err := p.DialPeer(t, to, peers.Client()); err == nil {
				return fmt.Errorf("%s still accepts connections of the removed replica cp3", to)
			}
			return nil
		})
	}
	p.PutConfigMap("cp1", "without-cp3")
	p.StopReplica("cp3")
	// The data of cp3 still lists it as a member, and is not trusted. A rebuild is accepted.
	cfg := p.Members["cp3"].Config
	if _, err := recovery.Rebuild(cfg.Dir(), nil); err != nil {
		t.Fatal(err)
	}
	p.Restart("cp3")
	p.CheckConfigMaps("cp3", "a", "without-cp3")
	servertest.Eventually(t, func() error {
		if s := p.ClusterStatus("cp1"); len(s.Members) != 3 || !s.Members[0].Voter || !s.Members[1].Voter ||
			!s.Members[2].Voter {
			return fmt.Errorf("after the rebuild of cp3 the members are %+v", s.Members)
		}
		return p.DialPeer(t, "cp1", peers.Client())
	})
}

func (p *plane) testRebuild(t *testing.T) {
	p.StopReplica("cp2")
	cfg := p.Members["cp2"].Config
	// The data is lost: without a rebuild, the replica does not vote with an empty log.
	if err := os.RemoveAll(filepath.Join(cfg.DataDir, datadir.RaftFolder)); err != nil {
		t.Fatal(err)
	}
	cfg.Process.Log = slog.New(slog.DiscardHandler)
	if err := server.Run(context.Background(), cfg); !errors.Is(err, datadir.ErrDataGone) {
		t.Fatalf("starting a replica without its data: %v", err)
	}
	p.PutConfigMap("cp1", "without-cp2")
	r, err := recovery.Rebuild(cfg.Dir(), nil)
	if err != nil || len(r.JoinVia) != 2 {
		t.Fatalf("rebuild of cp2: error %v, result %+v", err, r)
	}
	p.Restart("cp2")
	p.CheckConfigMaps("cp2", "a", "without-cp3", "without-cp2")
	i, err := recovery.Inspect(p.Members["cp2"].Config.Dir())
	if !errors.Is(err, datadir.ErrInUse) {
		t.Errorf("inspecting the data of a running replica: error %v, result %+v", err, i)
	}
	p.awaitJoined(t, cfg)
	// As if the replica was killed after it became a member, and before it had caught up.
	p.StopReplica("cp2")
	if err := datadir.WriteJSON(filepath.Join(cfg.DataDir, datadir.NewMemberFile), map[string]string{}); err != nil {
		t.Fatal(err)
	}
	p.Restart("cp2")
	p.awaitJoined(t, cfg)
}

// awaitJoined waits until a replica no longer has the mark of a joining replica.
func (p *plane) awaitJoined(t *testing.T, cfg server.Config) {
	t.Helper()
	servertest.Eventually(t, func() error {
		if joins, err := cfg.Dir().IsJoining(); err != nil || joins {
			return fmt.Errorf("%s has caught up and still has the mark of a joining replica: %v, error %v",
				cfg.Name, joins, err)
		}
		return nil
	})
}

func (p *plane) testLostMajority(t *testing.T) {
	before := p.PutConfigMap("cp1", "last")
	_ = p.Members["cp3"].Stop()
	_ = p.Members["cp2"].Stop()
	servertest.Eventually(t, func() error { // the remaining replica reports the state of the cluster
		s := p.ClusterStatus("cp1")
		if s.Leader != "" || len(s.Members) != 3 || s.Members[1].Ready == "yes" || s.Members[2].Ready == "yes" {
			return fmt.Errorf("without a majority: %+v", s)
		}
		return nil
	})
	_ = p.Members["cp1"].Stop()
	checkRecoverRefused(t, p.Members["cp1"].Config)
	for _, name := range []string{"cp2", "cp3"} {
		if err := os.RemoveAll(p.Members[name].Config.DataDir); err != nil {
			t.Fatal(err)
		}
	}
	cfg := p.Members["cp1"].Config
	lost, err := recovery.Recover(cfg.Dir(), false)
	if index, term := recovery.LastEntry(lost.Disk); !errors.Is(err, recovery.ErrUnsafe) || len(lost.Members) != 2 ||
		index == 0 || term == 0 {
		t.Fatalf("recovery without confirmation: error %v, result %+v", err, lost)
	}
	if _, err := recovery.Recover(cfg.Dir(), true); err != nil {
		t.Fatal(err)
	}
	p.Restart("cp1")
	p.CheckConfigMaps("cp1", "a", "last")
	if s := p.ClusterStatus("cp1"); len(s.Members) != 1 || s.Leader != "cp1" {
		t.Errorf("the status after the recovery is %+v", s)
	}
	now := p.PutConfigMap("cp1", "recovered")
	if len(now.ResourceVersion) < len(before.ResourceVersion) {
		t.Errorf("the resourceVersion decreased: %s after %s", now.ResourceVersion, before.ResourceVersion)
	}
	// The other replicas join again without data.
	p.Join(p.NewConfig(2))
	p.StartReplica(p.NewConfig(2))
	p.AwaitReady("cp2")
	p.CheckConfigMaps("cp2", "a", "last", "recovered")
}

// checkRecoverRefused checks that the recovery of a replica is refused while another of the three
// replicas responds, with and without confirmation.
func checkRecoverRefused(t *testing.T, cfg server.Config) {
	t.Helper()
	members, err := cfg.Dir().Members()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", members["cp3"])
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, confirmed := range []bool{false, true} {
		if _, err := recovery.Recover(cfg.Dir(), confirmed); !errors.Is(err, recovery.ErrNotLost) ||
			!strings.Contains(err.Error(), "cp3 of 3 members respond") {
			t.Errorf("recovery while cp3 responds, confirmed %v: %v", confirmed, err)
		}
	}
}
