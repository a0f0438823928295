package replica_test

import (
	"context"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// After a cut a follower does not wait for what TCP still holds back: its
// connection to the leader has been given up meanwhile, and a new one is made as
// soon as the line is whole.
func TestFollowerGivesUpWhatACutHolds(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	leader, follower := c.Leader(), c.Followers()[0]
	r := c.Replica(follower)
	rev := commit(t, r, raftstore.Put("/a", []byte("x"))) // there is a connection
	given := c.Network.GivenUp(follower, leader)
	c.Isolate(follower)
	asking, stop := context.WithCancel(within(t, patience))
	defer stop()
	answered := make(chan error, 1)
	go func() {
		it, _, err := r.Get(asking, "/a", raftstore.ReadOptions{})
		if err == nil && it.Modified != rev {
			t.Errorf("read %+v, want revision %d", it, rev)
		}
		answered <- err
	}()
	giving := within(t, patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for c.Network.GivenUp(follower, leader) == given {
		select {
		case <-tick.C:
		case <-giving.Done():
			t.Fatal("the follower holds on to a connection on which nothing is heard")
		}
	}
	c.Rejoin(follower)
	if err := <-answered; err != nil {
		t.Errorf("read: %v", err)
	}
}
