package replica_test

import (
	"errors"
	"fmt"
	"io/fs"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// The state of a replica that is stopped is read from its disk, snapshot and log, without being changed: it starts again as it was.
func TestStateOfAStoppedReplica(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		t.Run(string(kind), func(t *testing.T) {
			c := storetest.NewCluster(t, 1, func(cfg *replica.Config) { cfg.Storage.LogStore = kind })
			for round, snapshot := range []bool{false, true, false} {
				for i := range 30 {
					commit(t, c.Replica("r1"), raftstore.Put(fmt.Sprintf("/k/%d", i%20), []byte(fmt.Sprint(round, i))))
				}
				if snapshot {
					if err := c.Replica("r1").Snapshot(within(t, patience)); err != nil {
						t.Fatal(err)
					}
				}
				want, err := c.Replica("r1").List(within(t, patience), "/", raftstore.ListOptions{})
				if err != nil {
					t.Fatal(err)
				}
				c.Stop("r1")
				for range 2 {
					v, err := replica.State(c.Config("r1"))
					if err != nil {
						t.Fatal(err)
					}
					have, err := v.List("/", raftstore.ListOptions{})
					if err != nil || v.Revision() != want.Revision || fmt.Sprint(have.Items) != fmt.Sprint(want.Items) {
						t.Errorf("round %d: revision %d with %v, error %v; want %d with %v", round, v.Revision(),
							have.Items, err, want.Revision, want.Items)
					}
				}
				c.Start("r1")
				c.AwaitReadyOf("r1")
			}
		})
	}
	missing := replica.Config{Name: "r1", Storage: replica.Storage{DataDir: t.TempDir() + "/missing"}}
	if _, err := replica.State(missing); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder that is not there: %v", err)
	}
}
