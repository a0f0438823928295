package replica_test

import (
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// A leader whose disk does not answer any more makes room for another, and what
// was under way applies once. When its disk answers again it follows.
func TestLeaderWhoseDiskHangsIsReplaced(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		t.Run(string(kind), func(t *testing.T) {
			disks := make(map[string]*replica.PowerCut)
			c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
				cfg.LogStore, cfg.DiskPatience = kind, time.Second
				disks[cfg.Name] = replica.NewPowerCut(1)
				disks[cfg.Name].Put(cfg)
			})
			rev := commit(t, c.Replica("r1"), raftstore.Put("/a", nil))
			old, through := c.Leader(), c.Followers()[0]
			hangs, goOn := disks[old].Hold()
			defer goOn()
			commit(t, c.Replica(through), raftstore.Update("/a", []byte("once"), rev)) // would conflict if it applied twice
			<-hangs
			if now := c.Replica(through).Status().Leader; now == old {
				t.Errorf("%s still leads", now)
			}
			if c.Replica(old).Ready() {
				t.Errorf("%s says that it is ready", old)
			}
			const pending = "disk_write_pending_seconds"
			if took := scrape(t, c.Replica(old))[pending]; took < 1 {
				t.Errorf("the write of %s that hangs has taken %v s, it says", old, took)
			}
			goOn()
			c.AwaitReady()
			c.Await("the write to be over", func() bool {
				took, there := scrape(t, c.Replica(old))[pending]
				return there && took == 0
			})
			sameHistory(t, c)
			if it, _, err := c.Replica(old).Get(within(t, patience), "/a", raftstore.ReadOptions{}); err != nil || string(it.Value) != "once" {
				t.Errorf("%s has %q, error %v", old, it.Value, err)
			}
		})
	}
}
