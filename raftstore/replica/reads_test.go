package replica_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// Reads that are made at the same time share the questions to the leader: there
// are as many of these as follow one another, however many readers there are.
func TestReadsShareRounds(t *testing.T) {
	const reads = 1000
	c := storetest.NewCluster(t, 3, slowToMiss) // who leads goes on
	leader := c.Leader()
	follower := c.Followers()[0]
	r := c.Replica(follower)
	rev := commit(t, c.Replica(leader), raftstore.Put("/a", []byte("x")))
	// While a round is on its way all the others have time to ask.
	c.Network.Slow(follower, leader, 50*time.Millisecond, 0)
	c.Network.Slow(leader, follower, 50*time.Millisecond, 0)
	before := r.ReadRounds()
	ctx := within(t, patience)
	var wg sync.WaitGroup
	var read atomic.Int64
	for range reads {
		wg.Go(func() {
			if it, _, err := r.Get(ctx, "/a", raftstore.ReadOptions{}); err != nil || it.Modified < rev {
				t.Errorf("read %+v, error %v", it, err)
				return
			}
			read.Add(1)
		})
	}
	wg.Wait()
	rounds := r.ReadRounds() - before
	t.Logf("%d rounds for %d reads", rounds, read.Load())
	if rounds == 0 || rounds > reads/20 {
		t.Errorf("%d reads took %d rounds to the leader", reads, rounds)
	}
}
