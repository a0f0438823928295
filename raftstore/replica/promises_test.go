package replica_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

// Each test here takes one promise to the point at which it is hardest to keep.

// A leader that takes long to notice that it is none any more, as one does that
// was paused, answers no linearizable read with what it has.
func TestSleepyLeaderReadsNothingStale(t *testing.T) { // F53
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Timeouts.HeartbeatTimeout, cfg.Timeouts.ElectionTimeout = 900*time.Millisecond, 900*time.Millisecond
		if cfg.Name == "r1" { // the others elect long before it doubts itself
			cfg.Timeouts.HeartbeatTimeout, cfg.Timeouts.ElectionTimeout = 4*time.Second, 4*time.Second
		}
	})
	if c.Leader() != "r1" { // the founder, unless the machine was so slow that it was missed
		if _, err := c.Replica("r1").StepDown(within(t, patience), "r1"); err != nil {
			t.Fatal(err)
		}
	}
	sleepy := c.Replica("r1")
	rev := commit(t, sleepy, raftstore.Put("/a", []byte("old")))
	c.AwaitRevision(rev)
	c.Isolate("r1")
	commit(t, c.Replica("r2"), raftstore.Put("/a", []byte("new")))
	if c.Replica("r1").Status().Leader != "r1" {
		t.Log("it has noticed already")
	}
	it, at, err := sleepy.Get(within(t, 200*time.Millisecond), "/a", raftstore.ReadOptions{})
	if !errors.Is(err, raftstore.ErrUnavailable) {
		t.Errorf("get: %q at revision %d, error %v", it.Value, at, err)
	}
	if l, err := sleepy.List(within(t, 200*time.Millisecond), "/", raftstore.ListOptions{}); !errors.Is(err,
		raftstore.ErrUnavailable) {
		t.Errorf("list: %v, error %v", l, err)
	}
	if rev, err := sleepy.Sync(within(t, 200*time.Millisecond)); !errors.Is(err, raftstore.ErrUnavailable) {
		t.Errorf("sync: revision %d, error %v", rev, err)
	}
	c.Rejoin("r1")
	if it, _, err := sleepy.Get(within(t, patience), "/a", raftstore.ReadOptions{}); err != nil ||
		string(it.Value) != "new" {
		t.Errorf("get after its return: %q, error %v", it.Value, err)
	}
}

// A forwarded commit whose reply is lost together with the leader is sent again
// to the next one: it is in the history once, and its caller learns where.
func TestLostReplyAppliesOnce(t *testing.T) { // F53
	c := storetest.NewCluster(t, 3, nil)
	leader, followers := c.Leader(), c.Followers()
	asking, other := followers[0], followers[1]
	before := commit(t, c.Replica(asking), raftstore.Put("/a", []byte("0")))
	c.AwaitRevision(before)
	w, err := c.Replica(other).Watch(within(t, patience), "/a", before)
	if err != nil {
		t.Fatal(err)
	}
	// The follower is heard and hears nothing.
	c.Network.CutOneWay(leader, asking)
	const n = 3                   // as many as a replica has under way at once
	large := make([]byte, 64<<10) // each makes a batch of its own
	type reply struct {
		rev raftstore.Revision
		err error
	}
	replies := make([]chan reply, n)
	for i := range n {
		replies[i] = make(chan reply, 1)
		go func() {
			rev, err := c.Replica(asking).Commit(within(t, patience),
				raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/a", fmt.Append(nil, i)),
					raftstore.Put(fmt.Sprintf("/b/%d", i), large)}})
			replies[i] <- reply{rev, err}
		}()
	}
	c.Await("the commits without their replies", func() bool {
		return c.Replica(leader).Applied() >= before+n && c.Replica(other).Applied() >= before+n
	})
	c.Kill(leader)
	c.Network.Heal()
	told := make(map[raftstore.Revision]string)
	for range n {
		ev := <-w.C()
		told[ev.Revision] = string(ev.Events[0].Item.Value)
	}
	for i, ch := range replies {
		r := <-ch
		if r.err != nil || told[r.rev] != fmt.Sprint(i) {
			t.Errorf("commit %d: revision %d, error %v; the history has %v", i, r.rev, r.err, told)
		}
	}
	last := commit(t, c.Replica(asking), raftstore.Put("/a", []byte("end")))
	if ev := <-w.C(); ev.Revision != last || last != before+n+1 {
		t.Errorf("revision %d with %q follows; want %d with the end, at %d", ev.Revision, ev.Events[0].Item.Value,
			before+n+1, last)
	}
}

// A follower that receives commits late, but the leader's read index in time, serves reads only
// after it has applied that index.
func TestReadsWaitForWhatWasCommitted(t *testing.T) { // F53
	c := storetest.NewCluster(t, 3, nil)
	leader, follower := c.Replica(c.Leader()), c.Replica(c.Followers()[0])
	c.SlowAll(0, 12*time.Millisecond) // each connection by itself
	for i := range 25 {
		rev := commit(t, leader, raftstore.Put("/a", fmt.Append(nil, i)))
		it, at, err := follower.Get(within(t, patience), "/a", raftstore.ReadOptions{})
		if err != nil || string(it.Value) != fmt.Sprint(i) || at < rev {
			t.Fatalf("get on a follower after commit %d at revision %d: %q at %d, error %v", i, rev, it.Value, at, err)
		}
	}
}

// A replica that starts again shows in linearizable reads nothing older than
// what it had acknowledged, however much it has to replay.
func TestReadsWaitForReplay(t *testing.T) { // F52
	c := storetest.NewCluster(t, 3, nil)
	again := c.Followers()[0]
	value := make([]byte, 64<<10)
	var rev raftstore.Revision
	for i := range 60 {
		rev = commit(t, c.Replica(again), raftstore.Put(fmt.Sprintf("/k/%d", i), value))
	}
	c.Kill(again)
	r := c.Start(again)
	_, at, err := r.Get(within(t, patience), "/k/59", raftstore.ReadOptions{})
	if err != nil || at < rev {
		t.Errorf("first read after the start: revision %d, error %v; want revision %d", at, err, rev)
	}
}

// A new leader that holds an entry and was not told that it is committed finds
// out before it answers a read: the old leader has acknowledged it.
func TestNewLeaderReadsWhatTheOldAcknowledged(t *testing.T) { // F53
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		// On a machine that is busy, over these lines, none is heard as often as usual.
		cfg.Timeouts.HeartbeatTimeout, cfg.Timeouts.ElectionTimeout = 2*time.Second, 2*time.Second
	})
	old, next, behind := c.Leader(), c.Followers()[0], c.Followers()[1]
	c.AwaitRevision(commit(t, c.Replica(old), raftstore.Put("/a", []byte("old"))))
	// What is committed now is with two of three, and large: it takes the next
	// leader long to bring it to the third, on whom its own first entry waits.
	c.Isolate(behind)
	slow := func() { c.SlowAll(30*time.Millisecond, 0) }
	slow()
	large := make([]byte, 1<<20)
	rev := commit(t, c.Replica(old), raftstore.Put("/a", []byte("new")), raftstore.Put("/b", large),
		raftstore.Put("/c", large), raftstore.Put("/d", large))
	// The notice of the commit is still under way when its sender dies.
	c.Kill(old)
	c.Network.Heal()
	slow()
	it, at, err := c.Replica(next).Get(within(t, patience), "/a", raftstore.ReadOptions{})
	if err != nil || string(it.Value) != "new" || at < rev {
		t.Errorf("get after the commit at revision %d: %q at %d, error %v", rev, it.Value, at, err)
	}
}
