package server

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/recovery"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
	"keelson.dev/keelson/raftstore/disk"
)

// A newcomer is told where the replicas are by their addresses; what is none is
// refused at once, and not asked for a minute.
func TestAddressesToJoinAt(t *testing.T) {
	got, err := fleetAddresses([]string{"192.0.2.11", "192.0.2.11:7000", "cp1.example.com", "cp1:6444", "2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:7"})
	want := []string{"192.0.2.11:6444", "192.0.2.11:7000", "cp1.example.com:6444", "cp1:6444", "[2001:db8::1]:6444", "[2001:db8::1]:6444", "[2001:db8::1]:7"}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	for _, bad := range []string{"", ":6444", "cp1:", "https://cp1:6444", "a:b:c"} {
		if got, err := fleetAddresses([]string{bad}); err == nil || !strings.Contains(err.Error(), "--server") {
			t.Errorf("%q: %q, %v", bad, got, err)
		}
	}
}

// Who joins as a standby notes that it waits for a vote; who then joins with one, since that was cut off, does not. F53
func TestJoinedAsStandby(t *testing.T) {
	trust, err := pki.NewTrust("prod", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	bundle, err := trust.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	answer := &fleetv1.EnrollReplicaResponse{Files: map[string][]byte{bundleName: bundle}, ClusterConfigJson: `{"name":"prod"}`,
		Replicas: []*fleetv1.Replica{{Name: "cp1", ApiAddress: "192.0.2.11:6443"}}}
	c := Config{DataDir: t.TempDir()}
	for _, c.Standby = range []bool{true, false} {
		if err := keepJoined(c, answer); err != nil {
			t.Fatal(err)
		}
		if waits, err := c.Dir().JoinedAsStandby(); err != nil || waits != c.Standby {
			t.Errorf("joined with --standby=%v it waits for a vote: %v, %v", c.Standby, waits, err)
		}
	}
}

// A replica that is damaged says which file it is and what to do; it knows the
// others from the moment on which it asked to be one of them.
func TestDamagedNewcomerIsRebuilt(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.put("cp1", "a")
	p.stop("cp2")
	cfg := p.members["cp2"].cfg
	journals, err := filepath.Glob(filepath.Join(cfg.DataDir, datadir.RaftFolder, "raft.journal.*"))
	if err != nil || len(journals) == 0 {
		t.Fatalf("journals: %v, %v", journals, err)
	}
	for _, path := range journals {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		copy(raw[600:], "damage")
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	// As it would be, had it fallen before it saw the list of members.
	if err := os.Remove(filepath.Join(cfg.DataDir, datadir.MembersFile)); err != nil {
		t.Fatal(err)
	}
	r := &Replica{cfg: cfg, cluster: p.cluster}
	if err := r.knowBefore(map[string]string{"cp1": datadir.HostPort(address(1), p.cluster.PeerPort), "cp3": datadir.HostPort(address(3), p.cluster.PeerPort)}); err != nil {
		t.Fatal(err)
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	err = Run(context.Background(), cfg)
	if !errors.Is(err, disk.ErrCorruptLog) || !strings.Contains(err.Error(), "raft.journal.") || !strings.Contains(err.Error(), "'keelson-controlplane rebuild'") {
		t.Errorf("a damaged journal: %v", err)
	}
	rebuilt, err := recovery.Rebuild(cfg.Dir(), nil)
	if err != nil || !slices.Equal(rebuilt.Asks, []string{"cp1", "cp3"}) {
		t.Fatalf("rebuild: %v, asks %q", err, rebuilt.Asks)
	}
	p.again("cp2")
	p.holds("cp2", "a")
}
