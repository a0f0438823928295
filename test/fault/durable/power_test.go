package durable

import (
	"context"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/test/testenv/lossy"
	"keelson.dev/keelson/test/testenv/storeproc"
)

// logStores are the ways to keep the log.
var logStores = []string{"bolt", "wal"}

// All replicas lose their power at once, each disk loses unsynced data in its own way, and the
// replicas come back with all acknowledged commits. Meanwhile they take snapshots and truncate
// their logs, rotate their journals, add and remove members, transfer leadership, compact history,
// and start. F52
func TestPowerCut(t *testing.T) {
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			s := shortSettings()
			s.LogStore = store
			b := newTestGroup(t, true, 3, s)
			b.load.bytes = 64 << 10
			tried := make(map[string]int)
			for round := range roundCount(12) {
				if b.rand.IntN(4) == 0 { // the data that is read back may never have been synced
					b.startWriters()
					b.waitRandomly(50 * time.Millisecond)
					b.killAll()
					b.stopWriters()
					b.startAll()
				}
				b.slowDisks()
				b.startWriters()
				if b.rand.IntN(5) > 0 {
					b.awaitProgress(b.ledger.Acknowledged())
				}
				what := upheavals[b.rand.IntN(len(upheavals))]
				tried[what.name]++
				over := b.startAction(what)
				b.waitRandomly(200 * time.Millisecond)
				b.cutPower(over, b.lossPlans(round))
				for b.rand.IntN(4) == 0 { // the power goes again while they start
					b.cutPower(b.startReplicas(100*time.Millisecond), b.lossPlans(round))
				}
				b.startAll()
				b.finishMembershipChange()
				b.checkLedger()
			}
			t.Logf("%d revisions, power cut during %v", b.ledger.Acknowledged(), tried)
		})
	}
}

// lossPlans returns a function that gives each disk its own kind of loss. All kinds occur over the
// rounds.
func (b *testGroup) lossPlans(round int) func() lossy.Loss {
	n := round
	return func() lossy.Loss {
		ways := lossy.Losses(b.rand.Uint64())
		n++
		return ways[n%len(ways)]
	}
}

// slowDisks gives every disk its own sync delay: during a slow sync much data is written and not
// yet synced.
func (b *testGroup) slowDisks() {
	for _, d := range b.allDisks() {
		d.SlowSync(time.Duration(b.rand.IntN(3)*b.rand.IntN(8)) * time.Millisecond)
	}
}

// groupAction is an action of a group during which the power is cut.
type groupAction struct {
	name string
	do   func(context.Context, *testGroup)
}

var upheavals = []groupAction{
	{"writing", func(context.Context, *testGroup) {}},
	{"snapshot", func(ctx context.Context, b *testGroup) {
		for _, m := range b.group.Members() {
			_ = m.Snapshot(ctx)
		}
	}},
	{"snapshot on all at once", func(ctx context.Context, b *testGroup) {
		for _, m := range b.group.Members() {
			go func() { _ = m.Snapshot(ctx) }()
		}
	}},
	{"compaction", func(ctx context.Context, b *testGroup) {
		if m, err := b.group.Leader(ctx); err == nil && b.ledger.Checked() > 500 {
			_ = m.Compact(ctx, b.ledger.Checked()-400)
		}
	}},
	{"transfer", func(ctx context.Context, b *testGroup) {
		if m, err := b.group.Leader(ctx); err == nil {
			_ = m.Transfer(ctx)
		}
	}},
	{"return of an absent replica", func(ctx context.Context, b *testGroup) {
		leader, err := b.group.Leader(ctx)
		if err != nil {
			return
		}
		for _, m := range b.group.Members() {
			if m != leader {
				_ = m.Kill()
				b.awaitRevision(ctx, b.ledger.Acknowledged()+20)
				_ = leader.Snapshot(ctx) // the entries that it has missed are not in the log
				_ = m.Start(ctx)
				return
			}
		}
	}},
	{"new member", func(ctx context.Context, b *testGroup) {
		if len(b.group.Members()) == 3 {
			_, _ = b.group.Add(ctx)
		}
	}},
	{"lost member", func(ctx context.Context, b *testGroup) {
		if all := b.group.Members(); len(all) > 3 {
			_ = b.group.Remove(ctx, all[0])
		}
	}},
}

// awaitRevision waits until a revision is acknowledged or ctx ends.
func (b *testGroup) awaitRevision(ctx context.Context, rev raftstore.Revision) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for b.ledger.Acknowledged() < rev {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// startAction starts an action and returns a function that waits for its end.
func (b *testGroup) startAction(what groupAction) (over func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		what.do(ctx, b)
	}()
	return func() {
		cancel()
		<-done
	}
}

// startReplicas starts all replicas, for at most this time. The returned function ends the attempt.
func (b *testGroup) startReplicas(most time.Duration) (over func()) {
	over = b.startAction(groupAction{"starting", func(ctx context.Context, b *testGroup) {
		var all sync.WaitGroup
		for _, m := range b.group.Members() {
			all.Go(func() { _ = m.Start(ctx) })
		}
		all.Wait()
	}})
	b.waitRandomly(most)
	return over
}

// finishMembershipChange completes a membership change that a power cut has interrupted.
func (b *testGroup) finishMembershipChange() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	leader, err := b.group.Leader(ctx)
	b.requireNoError("after a power cut", err)
	for _, m := range b.group.Members() {
		if m != leader {
			b.requireNoError("joining again", b.joinIfMissing(ctx, m))
		}
	}
}

// joinIfMissing makes a replica a member if it is not a member.
func (b *testGroup) joinIfMissing(ctx context.Context, m *storeproc.Member) error {
	for {
		leader, err := b.group.Leader(ctx)
		if err != nil {
			return err
		}
		s, _, err := leader.Status(ctx)
		if err != nil {
			return err
		}
		for _, is := range s.Members {
			if is.ID == m.Name && is.Voter {
				return nil
			}
		}
		if err := leader.AddMember(ctx, m); err != nil && ctx.Err() != nil {
			return err
		}
	}
}
