package replica_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

func alarmsEverywhere(c *storetest.Cluster, what string, holds func([]raftstore.Alarm) bool) {
	c.Await(what, func() bool {
		for _, r := range c.Replicas() {
			if !holds(r.Status().Alarms) {
				return false
			}
		}
		return true
	})
}

func none(a []raftstore.Alarm) bool { return len(a) == 0 }

func onlyAbout(kind raftstore.AlarmKind, member string) func([]raftstore.Alarm) bool {
	return func(a []raftstore.Alarm) bool { return len(a) == 1 && a[0].Kind == kind && a[0].Member == member }
}

// A store at its quota gives up history first, then refuses puts with a reason,
// takes deletes, and is itself again once there is room: on every replica, under
// every leader, also after a restart.
func TestQuotaMakesReadOnly(t *testing.T) {
	const quota, block = 1 << 20, 32 << 10
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { cfg.Quota = quota })
	value := bytes.Repeat([]byte("x"), block)
	leader := c.Leader()
	for range 3 * quota / block {
		commit(t, c.Replica(leader), raftstore.Put("/same", value))
	}
	s := c.Replica(leader).Status()
	if s.Compacted == 0 || s.Bytes+s.HistoryBytes > quota+4*block || s.Quota != quota {
		t.Errorf("after many versions of one key: %d bytes of state, %d of history, compacted up to %d, quota %d", s.Bytes, s.HistoryBytes, s.Compacted, s.Quota)
	}
	alarmsEverywhere(c, "no alarm", none)

	follower := c.Followers()[0]
	var err error
	n := 0
	for ; err == nil; n++ {
		_, err = c.Replica(follower).Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/k/%d", n), value)}})
		if n > 4*quota/block {
			t.Fatalf("%d puts of %d bytes went into a quota of %d", n, block, quota)
		}
	}
	if !errors.Is(err, raftstore.ErrNoSpace) || !strings.Contains(err.Error(), fmt.Sprint(quota)) || !strings.Contains(err.Error(), "delete") {
		t.Errorf("put beyond the quota: %v", err)
	}
	alarmsEverywhere(c, "the alarm everywhere", onlyAbout(raftstore.AlarmSpace, ""))
	if s := c.Replica(follower).Status(); s.Bytes > quota+4*block {
		t.Errorf("%d bytes of state with a quota of %d", s.Bytes, quota)
	}

	// It outlives its leader and a restart from a snapshot.
	next, err := c.Replica(follower).StepDown(within(t, patience), "")
	if err != nil || next == leader {
		t.Fatalf("stepping down: %s leads, %v", next, err)
	}
	if err := c.Replica(follower).Snapshot(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	c.Stop(follower)
	c.Start(follower)
	c.AwaitReady()
	if _, err := c.Replica(follower).Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/more", nil)}}); !errors.Is(err, raftstore.ErrNoSpace) {
		t.Errorf("put under the next leader: %v", err)
	}
	alarmsEverywhere(c, "the alarm everywhere", onlyAbout(raftstore.AlarmSpace, ""))

	// What is refused fills nothing.
	entries := c.Replica(follower).Status().AppliedIndex
	for range 50 {
		if _, err := c.Replica(follower).Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/more", value)}}); !errors.Is(err, raftstore.ErrNoSpace) {
			t.Fatalf("put while space is short: %v", err)
		}
	}
	if now := c.Replica(follower).Status().AppliedIndex; now > entries+10 {
		t.Errorf("50 refused puts made %d entries of the log", now-entries)
	}

	for i := range n/4 + 2 {
		commit(t, c.Replica(follower), raftstore.Delete(fmt.Sprintf("/k/%d", i)))
	}
	alarmsEverywhere(c, "the end of the alarm", none)
	commit(t, c.Replica(follower), raftstore.Put("/more", nil))
}
