package replica_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk"
	"keelson.dev/keelson/raftstore/replica"
	"keelson.dev/keelson/raftstore/storetest"
)

func TestKilledLeaderLosesNothing(t *testing.T) { // F53
	c := storetest.NewCluster(t, 3, nil)
	for round := range 3 {
		leader := c.Leader()
		w := write(t, c, c.Followers(), 8)
		watcher, err := c.Replica(c.Followers()[0]).Watch(within(t, patience), "/writer/", 0)
		if err != nil {
			t.Fatal(err)
		}
		w.await(c, 200)
		killed := time.Now()
		c.Kill(leader)
		before := w.done.Load()
		c.Await("writes to resume", func() bool { return w.done.Load() > before+8 })
		t.Logf("round %d: writes resumed after %s", round, time.Since(killed))
		w.await(c, 200)
		close(w.stop)
		w.wg.Wait()
		inOrder(t, watcher, c.Replica(c.Followers()[0]).Applied())
		c.Start(leader)
		sameHistory(t, c)
		// The next round has new writers.
		for i := range 8 {
			commit(t, c.Replica(leader), raftstore.Delete(fmt.Sprintf("/writer/%d", i)))
		}
	}
}

func TestRestartOfAllKeepsEverything(t *testing.T) { // F52
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { cfg.Storage.NoSync = false })
	w := write(t, c, c.Names(), 8)
	w.await(c, 300)
	close(w.stop)
	w.wg.Wait()
	before, err := c.Replica("r1").List(within(t, patience), "/", raftstore.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range c.Names() {
		c.Kill(name)
	}
	for _, name := range c.Names() {
		c.Start(name)
	}
	c.AwaitReady()
	for _, r := range c.Replicas() {
		after, err := r.List(within(t, patience), "/", raftstore.ListOptions{})
		if err != nil || fmt.Sprint(after) != fmt.Sprint(before) {
			t.Errorf("after restart: %v, error %v, want %v", after, err, before)
		}
		// History survives as well: a watch goes on where it was.
		if _, err := r.Watch(within(t, patience), "/", 1); err != nil {
			t.Errorf("watch from before the restart: %v", err)
		}
	}
}

func TestIsolatedLeaderIsFenced(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	old := c.Leader()
	type led struct {
		fence raftstore.Fence
		ctx   context.Context
	}
	terms := make(chan led, 16)
	ctx, cancel := context.WithCancel(context.Background())
	var leading sync.WaitGroup
	defer leading.Wait()
	defer cancel()
	for _, r := range c.Replicas() {
		leading.Add(1)
		go func() {
			defer leading.Done()
			if err := r.Lead(ctx, func(ctx context.Context, f raftstore.Fence) error {
				terms <- led{f, ctx}
				<-ctx.Done()
				return nil
			}); err != nil {
				t.Errorf("lead: %v", err)
			}
		}()
	}
	first := <-terms
	put := []raftstore.Op{raftstore.Put("/fenced", []byte("old"))}
	if _, err := c.Replica(old).Commit(within(t, patience), raftstore.Commit{Ops: put, Fence: first.fence}); err !=
		nil {
		t.Fatalf("fenced commit of the leader: %v", err)
	}
	if _, err := c.Replica(c.Followers()[0]).Commit(within(t, patience),
		raftstore.Commit{Ops: put, Fence: first.fence}); !errors.Is(err, raftstore.ErrFenced) {
		t.Errorf("fenced commit on a follower: %v, want it refused and not forwarded", err)
	}

	c.Isolate(old)
	caught := make(chan error, 1)
	go func() {
		_, err := c.Replica(old).Commit(within(t, patience),
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/fenced", []byte("late"))}, Fence: first.fence})
		caught <- err
	}()
	second := <-terms
	if second.fence <= first.fence {
		t.Errorf("fence %d after %d", second.fence, first.fence)
	}
	select {
	case <-first.ctx.Done():
	case <-time.After(patience):
		t.Error("the isolated leader still leads")
	}
	// A linearizable read on the isolated replica must not answer.
	if _, _, err := c.Replica(old).Get(within(t, 300*time.Millisecond), "/fenced",
		raftstore.ReadOptions{}); !errors.Is(err, raftstore.ErrUnavailable) {
		t.Errorf("read on the isolated replica: %v", err)
	}
	if _, _, err := c.Replica(old).Get(within(t, patience), "/fenced", raftstore.ReadOptions{Local: true}); err != nil {
		t.Errorf("local read on the isolated replica: %v", err)
	}
	c.Rejoin(old)
	if err := <-caught; !errors.Is(err, raftstore.ErrFenced) {
		t.Errorf("commit under the old fence: %v, want fenced", err)
	}
	if _, err := c.Replica(old).Commit(within(t, patience),
		raftstore.Commit{Ops: put, Fence: first.fence}); !errors.Is(err, raftstore.ErrFenced) {
		t.Errorf("commit under the old fence: %v, want fenced", err)
	}
	it, _, err := c.Replica(old).Get(within(t, patience), "/fenced", raftstore.ReadOptions{})
	if err != nil || string(it.Value) != "old" {
		t.Errorf("value %q, error %v", it.Value, err)
	}
}

// Two of three down: writes are refused after their deadline, and go through
// when a majority is back. F53
func TestWithoutMajorityWritesWait(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	commit(t, c.Replica("r1"), raftstore.Put("/a", []byte("1")))
	survivor := c.Followers()[0]
	for _, name := range c.Names() {
		if name != survivor {
			c.Kill(name)
		}
	}
	s := c.Replica(survivor)
	_, err := s.Commit(within(t, 300*time.Millisecond), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/b", nil)}})
	if !errors.Is(err, raftstore.ErrUnavailable) && !errors.Is(err, raftstore.ErrOutcomeUnknown) {
		t.Errorf("commit without a majority: %v", err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := s.Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{raftstore.Create("/c", nil)}})
		waiting <- err
	}()
	for _, name := range c.Names() {
		if name != survivor {
			c.Start(name)
		}
	}
	if err := <-waiting; err != nil {
		t.Errorf("commit that waited for the majority: %v", err)
	}
	sameHistory(t, c)
}

// A follower shows a commit promptly although raft's own means of telling it
// is as good as switched off.
func TestFollowersAreToldAtOnce(t *testing.T) {
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) { cfg.Timeouts.CommitTimeout = time.Hour })
	leader := c.Replica(c.Leader())
	for range 20 {
		rev := commit(t, leader, raftstore.Put("/a", nil))
		c.AwaitRevision(rev)
	}
}

func TestLaggingReplicaGetsSnapshot(t *testing.T) {
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Snapshots.SnapshotBytes, cfg.Snapshots.TrailingBytes = 256<<10, 1
	})
	lagging := c.Followers()[0]
	for i := range 50 {
		commit(t, c.Replica(lagging), raftstore.Put(fmt.Sprintf("/before/%d", i), []byte("x")))
	}
	ttl := raftstore.Put("/ttl", nil)
	ttl.TTL = time.Hour
	commit(t, c.Replica(lagging), ttl)
	watcher, err := c.Replica(lagging).Watch(within(t, patience), "/", 1)
	if err != nil {
		t.Fatal(err)
	}
	c.Isolate(lagging)
	value := make([]byte, 8<<10)
	var rev raftstore.Revision
	for i := range 400 {
		rev = commit(t, c.Other(lagging), raftstore.Put(fmt.Sprintf("/k/%d", i%20), value))
	}
	for _, r := range c.Replicas() {
		if err := r.Snapshot(within(t, patience)); err != nil {
			t.Fatal(err)
		}
	}
	c.Rejoin(lagging)
	c.AwaitRevision(rev)
	// The watch goes on through the installation: the history came with it.
	inOrder(t, watcher, rev)
	sameHistory(t, c)

	// A new replica gets it all as well, while writes go on.
	w := write(t, c, c.Names(), 4)
	c.AddHost("r4", false)
	c.Start("r4")
	c.Join("r4")
	w.await(c, 100)
	close(w.stop)
	w.wg.Wait()
	sameHistory(t, c)
	if it, _, err := c.Replica("r4").Get(within(t, patience), "/ttl", raftstore.ReadOptions{}); err != nil ||
		it.Expires == 0 {
		t.Errorf("item with TTL on the new replica: %+v, error %v", it, err)
	}
	if err := c.Replica("r4").RemoveMember(within(t, patience), lagging); err != nil {
		t.Errorf("remove: %v", err)
	}
	c.Stop(lagging)
	c.Await("three members, as the new replica sees it", func() bool {
		return len(c.Replica("r4").Status().Members) == 3
	})
}

// A replica that was away for long serves again as soon as it is back: raft's own patience with it, which grows with every
// attempt to replicate that fails, would have run into seconds. So none fails: how long a return takes depends on the
// machine, and this does not.
func TestReturnAfterLongAbsence(t *testing.T) {
	failed := &raftLines{about: "failed to appendEntries to"}
	c := storetest.NewCluster(t, 3, func(cfg *replica.Config) {
		cfg.Logger = slog.New(raftHandler{of: cfg.Name, into: failed})
	})
	away := c.Followers()[0]
	leader := c.Leader()
	c.Kill(away)
	w := write(t, c, []string{leader}, 4)
	gone := time.After(2 * time.Second) // raft's own patience would have met with eight failures
	<-gone
	c.Start(away)
	back := time.Now()
	c.AwaitReadyOf(away)
	t.Logf("ready %s after its start", time.Since(back))
	close(w.stop)
	w.wg.Wait()
	// A leader that is deposed gives up what it had begun: whoever leads now has had nothing to give up.
	if n := failed.count(c.Leader()); n > 0 {
		t.Errorf("%d attempts to replicate to the replica that was away failed", n)
	}
	sameHistory(t, c)
}

func TestLeadershipMovesWithoutPause(t *testing.T) {
	c := storetest.NewCluster(t, 3, nil)
	leader := c.Leader()
	w := write(t, c, c.Followers(), 4)
	w.await(c, 50)
	began := time.Now()
	if err := c.Replica(leader).TransferLeadership(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	before := w.done.Load()
	c.Await("writes under the new leader", func() bool { return w.done.Load() > before })
	t.Logf("writes resumed %s after the transfer was asked for", time.Since(began))
	next := c.Leader()
	if next == leader {
		t.Error("leadership did not move")
	}
	w.await(c, 50)
	// An orderly stop hands over as well.
	close(w.stop)
	w.wg.Wait()
	c.Stop(next)
	commit(t, c.Replicas()[0], raftstore.Put("/after", nil))
}

// An idle group writes nothing, even with keys that will expire one day. Nor does it elect: a leader that is missed because
// the machine is slow is no write of an idle group.
func TestIdleWritesNothing(t *testing.T) {
	c := storetest.NewCluster(t, 3, slowToMiss)
	ttl := raftstore.Put("/t", nil)
	ttl.TTL = time.Hour
	rev := commit(t, c.Replica("r1"), ttl)
	c.AwaitRevision(rev)
	leader := c.Replica(c.Leader())
	before := leader.Status().CommitIndex
	idle := time.After(1500 * time.Millisecond)
	<-idle
	if after := leader.Status().CommitIndex; after != before {
		t.Errorf("commit index went from %d to %d", before, after)
	}
}

func TestDataDirectoryIsGuarded(t *testing.T) {
	c := storetest.NewCluster(t, 1, nil)
	for i := range 50 {
		commit(t, c.Replica("r1"), raftstore.Put(fmt.Sprintf("/k/%d", i), []byte("precious value")))
	}
	cfg := c.Config("r1")
	c.Stop("r1")

	cfg.Name = "stranger"
	run := func() error {
		r, err := replica.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return r.Run(within(t, patience))
	}
	if err := run(); !errors.Is(err, disk.ErrForeignData) {
		t.Errorf("start on another replica's data: %v", err)
	}

	cfg.Name = "r1"
	// Flip one bit in every copy of a value. What the journal holds would mend
	// the log.
	flipped := 0
	for _, name := range []string{"raft.db", "raft.journal.0", "raft.journal.1"} {
		path := filepath.Join(cfg.Storage.DataDir, name)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i+14 <= len(data); i++ {
			if string(data[i:i+14]) == "precious value" {
				data[i+3] ^= 1
				flipped++
			}
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if flipped == 0 {
		t.Fatal("value not found on disk")
	}
	if err := run(); !errors.Is(err, disk.ErrCorruptLog) {
		t.Errorf("start on a damaged log: %v", err)
	}
}

func TestConfigIsChecked(t *testing.T) {
	c := storetest.NewCluster(t, 1, nil)
	good := c.Config("r1")
	for name, spoil := range map[string]func(*replica.Config){
		"name":                       func(c *replica.Config) { c.Name = "" },
		"a name that can be sent":    func(c *replica.Config) { c.Name = "r\xff" },
		"a name that can be printed": func(c *replica.Config) { c.Name = "r\x00" },
		"a short name":               func(c *replica.Config) { c.Name = strings.Repeat("r", 257) },
		"an address to tell":         func(c *replica.Config) { c.Network.Advertise = "nowhere" },
		"a port to tell":             func(c *replica.Config) { c.Network.Advertise = "127.0.0.1:0" },
		"a past":                     func(c *replica.Config) { c.History.HistoryRevisions = -1 },
		"a log":                      func(c *replica.Config) { c.Snapshots.TrailingBytes = -1 },
		"data":                       func(c *replica.Config) { c.Storage.DataDir = "" },
		"listener":                   func(c *replica.Config) { c.Network.ListenAddr, c.Network.Listener = "", nil },
		"tls":                        func(c *replica.Config) { c.Network.ServerTLS = nil },
		"client authentication": func(c *replica.Config) {
			c.Network.ServerTLS = c.Network.ServerTLS.Clone()
			c.Network.ServerTLS.ClientAuth = 0
		},
	} {
		bad := good
		spoil(&bad)
		if _, err := replica.New(bad); !errors.Is(err, raftstore.ErrInvalid) {
			t.Errorf("configuration without %s: %v", name, err)
		}
	}
}
