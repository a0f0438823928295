package replica_test

import (
	"bytes"
	"path/filepath"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

func sealing(t testing.TB) *disk.Keyring {
	path := filepath.Join(t.TempDir(), "keys")
	if err := disk.CreateKeyFile(path, "k1"); err != nil {
		t.Fatal(err)
	}
	keys, err := disk.LoadKeyring(path)
	if err != nil {
		t.Fatal(err)
	}
	return keys
}

// The contract holds on raft-wal, sealed, too.
func TestSealedWALConforms(t *testing.T) {
	keys := sealing(t)
	storetest.Run(t, func(t *testing.T) storetest.Subject {
		c := storetest.NewCluster(t, 1, func(cfg *replica.Config) {
			cfg.Storage.LogStore, cfg.Storage.Keys = disk.LogWAL, keys
		})
		return storetest.Subject{Store: c.Replica("r1"), Compact: c.Compact}
	})
}

// A follower that lags so far that it is sent a snapshot catches up on raft-wal,
// whose log knows no gaps, and starts again from what it then has.
func TestSnapshotInstalledOnWAL(t *testing.T) {
	keys := sealing(t)
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Storage.LogStore, cfg.Storage.Keys = disk.LogWAL, keys
		cfg.Snapshots.TrailingBytes = 1
	})
	late := c.Followers()[0]
	c.Kill(late)
	leader := c.Replica(c.Leader())
	for range 200 {
		commit(t, leader, raftstore.Put("/a", bytes.Repeat([]byte("x"), 1000)))
	}
	for _, r := range c.Replicas() {
		if err := r.Snapshot(within(t, patience)); err != nil {
			t.Fatal(err)
		}
	}
	commit(t, leader, raftstore.Put("/b", []byte("after the snapshot")))
	c.Start(late)
	c.AwaitReadyOf(late)
	sameHistory(t, c)
	c.Kill(late)
	c.Start(late)
	c.AwaitReadyOf(late)
	commit(t, c.Replica(late), raftstore.Put("/b", []byte("after the restart")))
	sameHistory(t, c)
}
