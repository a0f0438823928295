package replica_test

import (
	"testing"
	"time"

	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
	"keelson.dev/keelson/raftstore/storetest/linear"
	"keelson.dev/keelson/raftstore/storetest/nemesis"
)

// powerless is a group whose replicas lose their power when they are killed.
type powerless struct {
	nemesis.Group
	t     *testing.T
	c     *storetest.Cluster
	disks map[string]*replica.PowerCut
	lost  int
}

func (g *powerless) Kill(name string) {
	r := g.c.Replica(name)
	if r == nil {
		return
	}
	// One that is still reading its disk would rightly complain of it.
	g.c.Await(name+" to be up", func() bool { return len(r.Status().Members) > 0 })
	disk := g.disks[name]
	select {
	case <-disk.Fade(): // in the middle of an append
	case <-time.After(300 * time.Millisecond):
	}
	r.Abort()
	disk.Fail()
	g.Group.Kill(name)
	lost, err := disk.Cut()
	if err != nil {
		g.t.Errorf("power cut at %s: %v", name, err)
	}
	if lost {
		g.lost++
	}
}

// What a replica has not synced when its power goes is gone, and nothing that
// was acknowledged is, on either kind of log. F52
func TestLinearizableThroughPowerCuts(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{"bolt", "wal"} {
		t.Run(string(kind), func(t *testing.T) {
			plan := nemesis.New(*linearSeed, *linearFor/3, []nemesis.Fault{
				nemesis.KillLeader, nemesis.KillFollower, nemesis.KillFollowers, nemesis.KillAll, nemesis.KillAll,
				nemesis.Install, nemesis.SnapshotAll,
			})
			disks := map[string]*replica.PowerCut{}
			for i, name := range []string{"r1", "r2", "r3"} {
				disks[name] = replica.NewPowerCut(*linearSeed + uint64(i))
			}
			t.Cleanup(func() {
				for _, d := range disks {
					if _, err := d.Cut(); err != nil {
						t.Error(err)
					}
				}
			})
			c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
				cfg.Storage.LogStore = kind
				disks[cfg.Name].Put(cfg)
				replica.SmallFiles(cfg) // after each start a new one is made, sector by sector
				cfg.Snapshots.SnapshotBytes, cfg.Snapshots.TrailingBytes = 64<<10, 1
				cfg.Timeouts.HeartbeatTimeout, cfg.Timeouts.ElectionTimeout = 250*time.Millisecond, 250*time.Millisecond
			})
			g := &powerless{Group: c.Target(), t: t, c: c, disks: disks}
			disturbed(t, c, g, linear.Options{Seed: *linearSeed, Clients: 2, Pace: 5 * time.Millisecond}, plan)
			sameHistory(t, c)
			t.Logf("%d power cuts lost something", g.lost)
			if g.lost == 0 {
				t.Error("no power cut lost anything: nothing was tried")
			}
		})
	}
}
