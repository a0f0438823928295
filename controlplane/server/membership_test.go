package server

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
)

// Three replicas: status from any of them, stepping down, a member removed and
// refused, and back again; data lost and rebuilt; the majority lost.
func TestThreeReplicas(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.put("cp3", "a")
	for _, step := range []struct {
		name string
		run  func(*testing.T)
	}{{"status", p.testStatus}, {"step-down", p.testStepDown}, {"remove", p.testRemove}, {"rebuild", p.testRebuild}, {"lost majority", p.testLostMajority}} {
		if !t.Run(step.name, func(t *testing.T) { p.t = t; step.run(t) }) {
			return // each begins with what the one before left
		}
	}
}

func (p *plane) testStatus(t *testing.T) {
	eventually(t, func() error {
		s := p.status("cp2")
		if len(s.Members) != 3 || s.Leader == "" {
			return fmt.Errorf("%+v", s)
		}
		for _, m := range s.Members {
			if m.Ready != "yes" || !m.Voter || m.Applied == 0 || m.Lag > 0 || m.Version != "test" || m.Disk == 0 {
				return fmt.Errorf("%+v", m)
			}
		}
		return nil
	})
	// Compaction works from any replica.
	for name := range p.members {
		var r api.ClusterCompactResult
		if err := p.call(name, "POST", api.PathClusterCompact, api.ClusterCompact{Revision: 5}, &r); err != nil || r.Compacted < 5 {
			t.Errorf("compact at %s: %v %+v", name, err, r)
		}
	}
}

func (p *plane) testStepDown(t *testing.T) {
	if err := p.call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp9"}, nil); !apierrors.IsNotFound(err) || !strings.Contains(err.Error(), "cp9") {
		t.Errorf("to a stranger: %v", err)
	}
	for _, to := range []string{"cp2", "cp3", "cp1"} {
		var r api.ClusterStepDownResult
		if err := p.call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: to}, &r); err != nil || r.To != to {
			t.Fatalf("to %s: %v %+v", to, err, r)
		}
		eventually(t, func() error {
			for name := range p.members {
				if got := p.status(name).Leader; got != to {
					return fmt.Errorf("%s says that %q leads, want %s", name, got, to)
				}
			}
			return nil
		})
		p.put(to, "led-by-"+to)
	}
}

func (p *plane) testRemove(t *testing.T) {
	peers, err := pki.NewPeers(recovery.TrustFolder(p.members["cp3"].cfg.Dir()), pki.ReplicaPeer("cp3"), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"cp1", "cp2"} {
		if err := p.knock(t, to, peers.Client()); err != nil {
			t.Fatalf("a member at %s: %v", to, err)
		}
	}
	// The leader of all, which hands over first.
	if err := p.call("cp1", "POST", api.PathClusterStepDown, api.ClusterStepDown{To: "cp3"}, nil); err != nil {
		t.Fatal(err)
	}
	if err := p.call("cp2", "DELETE", api.PathClusterMembers+"/cp3", nil, nil); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"cp1", "cp2"} { // F51
		eventually(t, func() error {
			if err := p.knock(t, to, peers.Client()); err == nil {
				return fmt.Errorf("%s still speaks to a replica that was removed", to)
			}
			return nil
		})
	}
	p.put("cp1", "without-cp3")
	p.stop("cp3")
	// Its data says that it is a member; it is not believed. A new beginning is.
	cfg := p.members["cp3"].cfg
	if _, err := recovery.Rebuild(cfg.Dir(), nil); err != nil {
		t.Fatal(err)
	}
	p.again("cp3")
	p.holds("cp3", "a", "without-cp3")
	eventually(t, func() error {
		if s := p.status("cp1"); len(s.Members) != 3 || !s.Members[0].Voter || !s.Members[1].Voter || !s.Members[2].Voter {
			return fmt.Errorf("%+v", s.Members)
		}
		return p.knock(t, "cp1", peers.Client())
	})
}

func (p *plane) testRebuild(t *testing.T) {
	p.stop("cp2")
	cfg := p.members["cp2"].cfg
	// The disk is lost: without being told, the replica does not vote with an empty log.
	if err := os.RemoveAll(filepath.Join(cfg.DataDir, datadir.RaftFolder)); err != nil {
		t.Fatal(err)
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	if err := Run(context.Background(), cfg); !errors.Is(err, datadir.ErrDataGone) {
		t.Fatalf("a replica whose data is gone: %v", err)
	}
	p.put("cp1", "without-cp2")
	r, err := recovery.Rebuild(cfg.Dir(), nil)
	if err != nil || len(r.Asks) != 2 {
		t.Fatalf("%v %+v", err, r)
	}
	p.again("cp2")
	p.holds("cp2", "a", "without-cp3", "without-cp2")
	i, err := recovery.Inspect(p.members["cp2"].cfg.Dir())
	if !errors.Is(err, datadir.ErrInUse) {
		t.Errorf("%v %+v", err, i)
	}
	p.isNoNewcomer(t, cfg)
	// As one that is killed after it was taken in, and before it has all that the group has.
	p.stop("cp2")
	if err := datadir.WriteJSON(filepath.Join(cfg.DataDir, datadir.NewcomerFile), map[string]string{}); err != nil {
		t.Fatal(err)
	}
	p.again("cp2")
	p.isNoNewcomer(t, cfg)
}

func (p *plane) isNoNewcomer(t *testing.T, cfg Config) {
	t.Helper()
	eventually(t, func() error {
		if joins, err := cfg.Dir().IsJoining(); err != nil || joins {
			return fmt.Errorf("%s has what the group has and joins still: %v, %v", cfg.Name, joins, err)
		}
		return nil
	})
}

func (p *plane) testLostMajority(t *testing.T) {
	before := p.put("cp1", "last")
	_ = p.members["cp3"].stop()
	_ = p.members["cp2"].stop()
	eventually(t, func() error { // the one that is left says how it stands
		s := p.status("cp1")
		if s.Leader != "" || len(s.Members) != 3 || s.Members[1].Ready == "yes" || s.Members[2].Ready == "yes" {
			return fmt.Errorf("without a majority: %+v", s)
		}
		return nil
	})
	_ = p.members["cp1"].stop()
	notWhileOthersAnswer(t, p.members["cp1"].cfg)
	for _, name := range []string{"cp2", "cp3"} {
		if err := os.RemoveAll(p.members[name].cfg.DataDir); err != nil {
			t.Fatal(err)
		}
	}
	cfg := p.members["cp1"].cfg
	lost, err := recovery.Recover(cfg.Dir(), false)
	if index, term := recovery.LastEntry(lost.Disk); !errors.Is(err, recovery.ErrUnsafe) || len(lost.Members) != 2 || index == 0 || term == 0 {
		t.Fatalf("without being told: %v %+v", err, lost)
	}
	if _, err := recovery.Recover(cfg.Dir(), true); err != nil {
		t.Fatal(err)
	}
	p.again("cp1")
	p.holds("cp1", "a", "last")
	if s := p.status("cp1"); len(s.Members) != 1 || s.Leader != "cp1" {
		t.Errorf("%+v", s)
	}
	now := p.put("cp1", "recovered")
	if len(now.ResourceVersion) < len(before.ResourceVersion) {
		t.Errorf("time went back: %s after %s", now.ResourceVersion, before.ResourceVersion)
	}
	// The others begin anew.
	p.join(p.config(2))
	p.start(p.config(2))
	p.ready("cp2")
	p.holds("cp2", "a", "last", "recovered")
}

// notWhileOthersAnswer sees to it that a replica does not go on alone, told to or not, when another of three answers.
func notWhileOthersAnswer(t *testing.T, cfg Config) {
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
	for _, really := range []bool{false, true} {
		if _, err := recovery.Recover(cfg.Dir(), really); !errors.Is(err, recovery.ErrNotLost) || !strings.Contains(err.Error(), "cp3 of 3 members answer") {
			t.Errorf("while cp3 answers, told to: %v: %v", really, err)
		}
	}
}
