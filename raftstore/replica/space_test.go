package replica_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
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
// takes deletes and updates, and is itself again once there is room: on every replica, under
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
		t.Errorf("after many versions of one key: %d bytes of state, %d of history, compacted up to %d, quota %d",
			s.Bytes, s.HistoryBytes, s.Compacted, s.Quota)
	}
	alarmsEverywhere(c, "no alarm", none)

	follower := c.Followers()[0]
	var err error
	n := 0
	for ; err == nil; n++ {
		_, err = c.Replica(follower).Commit(within(t, patience),
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/k/%d", n), value)}})
		if n > 4*quota/block {
			t.Fatalf("%d puts of %d bytes went into a quota of %d", n, block, quota)
		}
	}
	if !errors.Is(err, raftstore.ErrNoSpace) || !strings.Contains(err.Error(), fmt.Sprint(quota)) ||
		!strings.Contains(err.Error(), "delete") {
		t.Errorf("put beyond the quota: %v", err)
	}
	alarmsEverywhere(c, "the alarm everywhere", onlyAbout(raftstore.AlarmSpace, ""))
	if s := c.Replica(follower).Status(); s.Bytes > quota+4*block {
		t.Errorf("%d bytes of state with a quota of %d", s.Bytes, quota)
	}

	// It outlives its leader and a restart from a snapshot.
	// A transfer may fail on a busy machine, and is requested again.
	c.Await("another leader", func() bool {
		next, err := c.Replica(follower).StepDown(within(t, patience), "")
		return err == nil && next != leader
	})
	if err := c.Replica(follower).Snapshot(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	c.Stop(follower)
	c.Start(follower)
	c.AwaitReady()
	if _, err := c.Replica(follower).Commit(within(t, patience),
		raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/more", nil)}}); !errors.Is(err, raftstore.ErrNoSpace) {
		t.Errorf("put under the next leader: %v", err)
	}
	alarmsEverywhere(c, "the alarm everywhere", onlyAbout(raftstore.AlarmSpace, ""))

	// What is refused fills nothing.
	entries := c.Replica(follower).Status().AppliedIndex
	for range 50 {
		if _, err := c.Replica(follower).Commit(within(t, patience),
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/more", value)}}); !errors.Is(err,
			raftstore.ErrNoSpace) {
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

// However many update a full store at once, through every replica, none of them is
// refused, nothing comes near to filling a disk, and all replicas stay the same.
func TestUpdatesOfAFullStoreAreBounded(t *testing.T) {
	const quota, block, writers, rounds = 1 << 20, 64 << 10, 12, 24
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { cfg.Quota = quota })
	value := bytes.Repeat([]byte("x"), block)
	for i := 0; len(c.Replica("r1").Status().Alarms) == 0; i++ {
		_, err := c.Replica("r1").Commit(within(t, patience),
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/k/%d", i), value)}})
		if err != nil && !errors.Is(err, raftstore.ErrNoSpace) || i > 100 {
			t.Fatalf("put %d: %v", i, err)
		}
	}
	alarmsEverywhere(c, "the alarm everywhere", onlyAbout(raftstore.AlarmSpace, ""))
	limit := c.Replica("r1").Status().Alarms[0]
	if limit.StateLimit < quota || limit.StateLimit > 4*quota ||
		limit.TotalLimit != limit.StateLimit+raftstore.MaxCommitBytes {
		t.Fatalf("limits of the alarm: %+v, quota %d", limit, quota)
	}
	var group sync.WaitGroup
	for w := range writers {
		r := c.Replica(c.Names()[w%3])
		group.Go(func() {
			for range rounds {
				_, err := r.Commit(within(t, patience),
					raftstore.Commit{Ops: []raftstore.Op{raftstore.Put(fmt.Sprintf("/k/%d", w), value)}})
				if s := r.Status(); err != nil || s.Bytes > limit.StateLimit ||
					s.Bytes+s.HistoryBytes > limit.TotalLimit {
					t.Errorf("update of a full store: %v; %d bytes of state and %d of history, limits %+v", err,
						s.Bytes, s.HistoryBytes, limit)
					return
				}
			}
		})
	}
	group.Wait()
	leader := c.Replica(c.Leader())
	if s := leader.Status(); s.Compacted == 0 || writers*rounds*block < 2*raftstore.MaxCommitBytes {
		t.Errorf("%d MiB were replaced and no history gave way", writers*rounds*block>>20)
	}
	// Each replica has let go of history by itself, and of the same.
	c.AwaitRevision(leader.Applied())
	want := leader.Status()
	for _, r := range c.Replicas() {
		if s := r.Status(); s.Compacted != want.Compacted || s.Bytes != want.Bytes ||
			s.HistoryBytes != want.HistoryBytes {
			t.Errorf("%s: compacted up to %d, %d and %d bytes; the leader: %d, %d, %d",
				s.ID, s.Compacted, s.Bytes, s.HistoryBytes, want.Compacted, want.Bytes, want.HistoryBytes)
		}
	}
}
