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

// A key is exchanged on replicas that serve: afterwards none needs the former key, one that
// was away catches up with what the others have left, and nothing that was written is lost. F51
func TestRewrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	load := func() *disk.Keyring {
		t.Helper()
		ring, err := disk.LoadKeyring(path)
		if err != nil {
			t.Fatal(err)
		}
		return ring
	}
	if err := disk.CreateKeyFile(path, "old"); err != nil {
		t.Fatal(err)
	}
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		t.Run(string(kind), func(t *testing.T) {
			keys := load()
			c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
				cfg.Storage.LogStore, cfg.Storage.Keys = kind, keys
			})
			write := func(n int) {
				t.Helper()
				for range n {
					commit(t, c.Replica(c.Leader()), raftstore.Put("/a", bytes.Repeat([]byte("x"), 1000)))
				}
			}
			write(50)
			late := c.Followers()[0]
			c.Kill(late)
			write(50)
			young := filepath.Join(t.TempDir(), "keys")
			if err := disk.CreateKeyFile(young, "new"); err != nil {
				t.Fatal(err)
			}
			only, err := disk.LoadKeyring(young)
			if err != nil {
				t.Fatal(err)
			}
			both, err := only.Merge(keys)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range c.Replicas() {
				if err := r.ReloadKeys(both); err != nil {
					t.Fatal(err)
				}
			}
			write(10)
			for _, r := range c.Replicas() {
				if err := r.Rewrite(within(t, patience)); err != nil {
					t.Fatal(err)
				}
			}
			write(10)
			keys = both
			c.Start(late)
			sameHistory(t, c)
			if err := c.Replica(late).Rewrite(within(t, patience)); err != nil {
				t.Fatal(err)
			}
			keys = only
			for _, name := range c.Names() {
				c.Kill(name)
				c.Start(name)
				c.AwaitReadyOf(name)
			}
			write(10)
			sameHistory(t, c)
		})
	}
}
