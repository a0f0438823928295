package replica_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"keelson.dev/keelson/internal/await"
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
	await.Until(t.Context(), t, patience, 10*time.Millisecond,
		"the end of the follower's silent connection", func() error {
			if c.Network.GivenUp(follower, leader) == given {
				return errors.New("the follower keeps a connection without data")
			}
			return nil
		})
	c.Rejoin(follower)
	if err := <-answered; err != nil {
		t.Errorf("read: %v", err)
	}
}
