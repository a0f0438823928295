package membership_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/membership"
	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
	"keelson.dev/keelson/raftstore/disk"
)

// The error of a replica with a damaged journal names the file and the command that repairs the
// replica. The replica has the addresses of the other members from the moment at which it requests
// membership.
func TestDamagedJoiningReplicaIsRebuilt(t *testing.T) {
	p := newPlane(t, 3, nil)
	p.PutConfigMap("cp1", "a")
	p.StopReplica("cp2")
	cfg := p.Members["cp2"].Config
	journals, err := filepath.Glob(filepath.Join(cfg.DataDir, datadir.RaftFolder, "raft.journal.*"))
	if err != nil || len(journals) == 0 {
		t.Fatalf("the data directory of cp2 has the journals %v, error %v", journals, err)
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
	// As if the replica had stopped before it received the list of members.
	if err := os.Remove(filepath.Join(cfg.DataDir, datadir.MembersFile)); err != nil {
		t.Fatal(err)
	}
	if err := membership.RecordPeers(cfg.Dir(), p.Cluster,
		map[string]string{"cp1": datadir.HostPort(servertest.Address(1), p.Cluster.PeerPort),
			"cp3": datadir.HostPort(servertest.Address(3), p.Cluster.PeerPort)}); err != nil {
		t.Fatal(err)
	}
	cfg.Process.Log = slog.New(slog.DiscardHandler)
	err = server.Run(context.Background(), cfg)
	if !errors.Is(err, disk.ErrCorruptLog) || !strings.Contains(err.Error(), "raft.journal.") ||
		!strings.Contains(err.Error(), "'keelson-controlplane rebuild'") {
		t.Errorf("starting with a damaged journal: %v", err)
	}
	rebuilt, err := recovery.Rebuild(cfg.Dir(), nil)
	if err != nil || !slices.Equal(rebuilt.JoinVia, []string{"cp1", "cp3"}) {
		t.Fatalf("rebuild: error %v, joins through %q", err, rebuilt.JoinVia)
	}
	p.Restart("cp2")
	p.CheckConfigMaps("cp2", "a")
}
