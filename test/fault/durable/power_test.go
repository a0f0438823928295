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

// All replicas lose their power at once, each disk loses what was not synced in
// a way of its own, and they come back with all they acknowledged. Meanwhile
// they take snapshots and shorten their logs, turn their journals, get and lose
// members, hand leadership over, forget history, and start. F52
func TestPowerCut(t *testing.T) {
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			s := quick()
			s.LogStore = store
			b := newBed(t, true, 3, s)
			b.load.bytes = 64 << 10
			tried := make(map[string]int)
			for round := range times(12) {
				if b.rand.IntN(4) == 0 { // what is read back then was perhaps never synced
					b.write()
					b.moment(50 * time.Millisecond)
					b.kill()
					b.quiet()
					b.start()
				}
				b.slowDown()
				b.write()
				if b.rand.IntN(5) > 0 {
					b.awaitProgress(b.ledger.Acknowledged())
				}
				what := upheavals[b.rand.IntN(len(upheavals))]
				tried[what.name]++
				over := b.begin(what)
				b.moment(200 * time.Millisecond)
				b.cut(over, b.losses(round))
				for b.rand.IntN(4) == 0 { // the power goes again while they start
					b.cut(b.starting(100*time.Millisecond), b.losses(round))
				}
				b.start()
				b.settle()
				b.check()
			}
			t.Logf("%d revisions, power cut during %v", b.ledger.Acknowledged(), tried)
		})
	}
}

// losses gives every disk a way of its own to lose what was not synced, and
// all of them over the rounds.
func (b *bed) losses(round int) func() lossy.Loss {
	n := round
	return func() lossy.Loss {
		ways := lossy.Losses(b.rand.Uint64())
		n++
		return ways[n%len(ways)]
	}
}

// slowDown gives every disk a speed of its own: while a sync takes its time
// there is much that is written and not synced.
func (b *bed) slowDown() {
	for _, d := range b.allDisks() {
		d.SlowSync(time.Duration(b.rand.IntN(3)*b.rand.IntN(8)) * time.Millisecond)
	}
}

// upheaval is something that a group does while the power goes.
type upheaval struct {
	name string
	do   func(context.Context, *bed)
}

var upheavals = []upheaval{
	{"writing", func(context.Context, *bed) {}},
	{"snapshot", func(ctx context.Context, b *bed) {
		for _, m := range b.group.Members() {
			_ = m.Snapshot(ctx)
		}
	}},
	{"snapshot on all at once", func(ctx context.Context, b *bed) {
		for _, m := range b.group.Members() {
			go func() { _ = m.Snapshot(ctx) }()
		}
	}},
	{"compaction", func(ctx context.Context, b *bed) {
		if m, err := b.group.Leader(ctx); err == nil && b.ledger.Checked() > 500 {
			_ = m.Compact(ctx, b.ledger.Checked()-400)
		}
	}},
	{"transfer", func(ctx context.Context, b *bed) {
		if m, err := b.group.Leader(ctx); err == nil {
			_ = m.Transfer(ctx)
		}
	}},
	{"return of one who was away", func(ctx context.Context, b *bed) {
		leader, err := b.group.Leader(ctx)
		if err != nil {
			return
		}
		for _, m := range b.group.Members() {
			if m != leader {
				_ = m.Kill()
				b.until(ctx, b.ledger.Acknowledged()+20)
				_ = leader.Snapshot(ctx) // what it has missed is not in the log
				_ = m.Start(ctx)
				return
			}
		}
	}},
	{"new member", func(ctx context.Context, b *bed) {
		if len(b.group.Members()) == 3 {
			_, _ = b.group.Add(ctx)
		}
	}},
	{"lost member", func(ctx context.Context, b *bed) {
		if all := b.group.Members(); len(all) > 3 {
			_ = b.group.Remove(ctx, all[0])
		}
	}},
}

// until waits until a revision is acknowledged, or ctx ends.
func (b *bed) until(ctx context.Context, rev raftstore.Revision) {
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

// begin lets an upheaval happen and returns how to wait for its end.
func (b *bed) begin(what upheaval) (over func()) {
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

// starting lets all replicas start, for up to so long, and returns how to end that.
func (b *bed) starting(most time.Duration) (over func()) {
	over = b.begin(upheaval{"starting", func(ctx context.Context, b *bed) {
		var all sync.WaitGroup
		for _, m := range b.group.Members() {
			all.Go(func() { _ = m.Start(ctx) })
		}
		all.Wait()
	}})
	b.moment(most)
	return over
}

// settle finishes what a power cut has left half done of a change of members.
func (b *bed) settle() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	leader, err := b.group.Leader(ctx)
	b.must("after a power cut", err)
	for _, m := range b.group.Members() {
		if m != leader {
			b.must("joining again", b.join(ctx, m))
		}
	}
}

// join makes a replica a member if it is none.
func (b *bed) join(ctx context.Context, m *storeproc.Member) error {
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
