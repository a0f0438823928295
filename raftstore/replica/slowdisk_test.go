package replica_test

import (
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// Heartbeats do not wait behind a disk: one that takes much longer for a flush
// than followers wait for their leader makes writes slow, costs no leadership and
// holds up no read at the leader.
func TestSlowDisksCostNoLeadership(t *testing.T) {
	for _, kind := range []disk.LogStoreKind{disk.LogBolt, disk.LogWAL} {
		t.Run(string(kind), func(t *testing.T) {
			const flush = time.Second // heartbeats are missed after 600 ms
			disks := make(map[string]*replica.PowerCut)
			c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
				cfg.Storage.LogStore = kind
				disks[cfg.Name] = replica.NewPowerCut(1)
				disks[cfg.Name].Put(cfg)
			})
			commit(t, c.Replica("r1"), raftstore.Put("/a", nil))
			leader := c.Leader()
			term := c.Replica(leader).Status().Term
			for _, d := range disks {
				d.Slow(flush)
			}
			written := make(chan struct{})
			go func() {
				defer close(written)
				for _, name := range []string{leader, c.Other(leader).Status().ID} {
					began := time.Now()
					if _, err := c.Replica(name).Commit(within(t, patience),
						raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", []byte(name))}}); err != nil {
						t.Errorf("commit through %s: %v", name, err)
					}
					if took := time.Since(began); took < flush {
						t.Errorf("a commit through %s took %s: the disks are not slow", name, took)
					}
				}
			}()
			reads := 0
			for over := false; !over; reads++ {
				if _, _, err := c.Replica(leader).Get(within(t, patience), "/a", raftstore.ReadOptions{}); err != nil {
					t.Fatal(err)
				}
				select {
				case <-written:
					over = true
				default:
				}
			}
			for _, d := range disks {
				d.Slow(0)
			}
			if reads < 10 { // one that waits for a disk takes a second
				t.Errorf("%d reads during two commits", reads)
			}
			for _, name := range c.Names() {
				if s := c.Replica(name).Status(); s.Term != term || s.Leader != leader {
					t.Errorf("%s: %s leads in term %d, was %s in term %d", name, s.Leader, s.Term, leader, term)
				}
			}
		})
	}
}
