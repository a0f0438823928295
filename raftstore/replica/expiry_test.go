package replica_test

import (
	"fmt"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// Keys live as long as their TTL says, not shorter and not for ever, although
// the clocks of the leaders that they see are hours apart and jump.
func TestTTLWithLeadersOfDifferentClocks(t *testing.T) {
	c := storetest.NewCluster(t, 1, nil)
	for i, offset := range []time.Duration{3 * time.Hour, -3 * time.Hour} {
		name := fmt.Sprintf("r%d", i+2)
		c.AddHost(name, false)
		c.Clock(name).Set(offset)
		c.Start(name)
		c.Join(name)
	}
	c.AwaitReady()
	const ttl = 3 * time.Second
	w, err := c.Replica("r1").Watch(within(t, patience), "/ttl/", 0)
	if err != nil {
		t.Fatal(err)
	}
	born := map[string]time.Time{}
	put := func(leader string) {
		if _, err := c.Replica("r1").StepDown(within(t, patience), leader); err != nil {
			t.Fatal(err)
		}
		key := "/ttl/by-" + leader
		born[key] = time.Now()
		commit(t, c.Replica("r1"), raftstore.Op{Kind: raftstore.OpPut, Key: key, TTL: ttl})
		// Backwards: what is written already must not live longer for it.
		c.Clock(leader).Set(-24 * time.Hour)
	}
	put("r1")
	put("r2")
	put("r3")
	for n := 0; n < len(born); {
		select {
		case ev := <-w.C():
			for _, e := range ev.Events {
				if e.Kind != raftstore.EventDelete {
					continue
				}
				n++
				if lived := time.Since(born[e.Item.Key]); lived < ttl {
					t.Errorf("%s expired after %s, its TTL is %s", e.Item.Key, lived, ttl)
				}
			}
		case <-time.After(patience):
			t.Fatalf("%d of %d keys have expired", n, len(born))
		}
	}
}

// A group that was down as a whole looks at its clocks again: what expired in
// the meantime goes.
func TestTTLRunsOutWhileAllAreDown(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	rev := commit(t, c.Replica("r1"), raftstore.Op{Kind: raftstore.OpPut, Key: "/short", TTL: time.Hour},
		raftstore.Op{Kind: raftstore.OpPut, Key: "/long", TTL: 10 * time.Hour})
	c.AwaitRevision(rev)
	for _, name := range c.Names() {
		c.Stop(name)
	}
	for _, name := range c.Names() {
		c.Clock(name).Set(2 * time.Hour)
		c.Start(name)
	}
	c.AwaitReady()
	c.Await("the short-lived key to go", func() bool {
		l, err := c.Replica("r2").List(within(t, patience), "/", raftstore.ListOptions{})
		return err == nil && len(l.Items) == 1 && l.Items[0].Key == "/long"
	})
}

// A jump of the leader's clock by a day does not expire what has an hour to live.
func TestJumpingClockExpiresNothing(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	leader := c.Leader()
	commit(t, c.Replica(leader), raftstore.Op{Kind: raftstore.OpPut, Key: "/hour", TTL: time.Hour})
	before := c.Replica(leader).StoreTime()
	c.Clock(leader).Set(24 * time.Hour)
	// A short-lived key shows that expiry has been looked at since.
	commit(t, c.Replica(leader), raftstore.Op{Kind: raftstore.OpPut, Key: "/second", TTL: 50 * time.Millisecond})
	c.Await("the short-lived key to go", func() bool {
		l, err := c.Replica(leader).List(within(t, patience), "/", raftstore.ListOptions{})
		return err == nil && len(l.Items) == 1 && l.Items[0].Key == "/hour"
	})
	if ahead := c.Replica(leader).StoreTime() - before; ahead > time.Hour.Milliseconds()/2 {
		t.Errorf("the store's time went %d ms ahead", ahead)
	}
}
