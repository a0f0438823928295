package replica_test

import (
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// patient replicas have the longest HeartbeatTimeout of all, so that they speak once in one or two seconds when they lead; the
// others have the shortest, and miss a leader that speaks so seldom.
func patient(names ...string) func(*replica.Config) {
	return func(cfg *replica.Config) {
		cfg.Timeouts.HeartbeatTimeout = 200 * time.Millisecond
		for _, name := range names {
			if cfg.Name == name {
				cfg.Timeouts.HeartbeatTimeout = 10 * time.Second
			}
		}
	}
}

// While HeartbeatTimeout is being changed, a follower alone that waits for less long than its leader misses it again and again,
// and deposes nobody: the other one hears it.
func TestOneFollowerWaitsLess(t *testing.T) {
	c := storetest.NewCluster(t, 3, patient("r1", "r2"))
	c.Await("r1 to lead", func() bool {
		l := c.Leader()
		if l != "r1" {
			_, _ = c.Replica(l).StepDown(within(t, patience), "r1")
		}
		return l == "r1"
	})
	before := c.Replica("r1").Status()
	asked := scrape(t, c.Replica("r3"))["elections_started_total"]
	c.Await("r3 to miss its leader, and again", func() bool {
		return scrape(t, c.Replica("r3"))["elections_started_total"] >= asked+3
	})
	for _, through := range []string{"r1", "r2", "r3"} {
		commit(t, c.Replica(through), raftstore.Put("/"+through, nil))
	}
	if now := c.Replica("r1").Status(); now.Leader != "r1" || now.Term != before.Term {
		t.Errorf("%s leads in term %d, it was r1 in term %d", now.Leader, now.Term, before.Term)
	}
	sameHistory(t, c)
}

// Changed in the wrong order, a leader that both miss is replaced by one of them: that costs an election, and no write.
func TestBothFollowersWaitLess(t *testing.T) {
	c := storetest.NewCluster(t, 3, patient("r1"))
	w := write(t, c, []string{"r1", "r2", "r3"}, 3)
	w.await(c, 60) // r1, which made the group, is heard with each of them
	close(w.stop)
	w.wg.Wait()
	c.Await("another one to lead than r1, which nobody hears any more", func() bool {
		l := c.Leader()
		return l != "" && l != "r1"
	})
	sameHistory(t, c)
}
