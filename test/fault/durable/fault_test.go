package durable

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/test/testenv/lossy"
	"keelson.dev/keelson/test/testenv/storeproc"
)

// synced are the files that a replica syncs while it takes commits.
var synced = map[string][]string{
	"bolt": {"raft.journal.*", "raft.db"},
	"wal":  {"*.wal", "raft.db"},
}

// onDisks starts three replicas on lossy disks, under load.
func onDisks(t *testing.T, store string) *bed {
	t.Helper()
	s := quick()
	s.LogStore = store
	b := newBed(t, true, 3, s)
	b.load.bytes = 64 << 10
	b.write()
	b.awaitProgress(b.ledger.Acknowledged())
	return b
}

// who picks the leader, or one that does not lead.
func (b *bed) who(leads bool) *storeproc.Member {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	leader, err := b.group.Leader(ctx)
	b.must("leader", err)
	if leads {
		return leader
	}
	for _, m := range b.group.Members() {
		if m != leader {
			return m
		}
	}
	b.t.Fatal("there is only one")
	return nil
}

// awaitEnd waits until a replica has ended by itself and has said of which file
// it was, and why.
func (b *bed) awaitEnd(m *storeproc.Member, why string, files ...string) {
	b.t.Helper()
	select {
	case <-m.Ended():
	case <-time.After(patience):
		b.t.Fatalf("%s goes on", m.Name)
	}
	b.said(m, why, files...)
	if err := m.Forgive(); err == nil {
		b.t.Errorf("%s has ended as if all were well", m.Name)
	}
}

// said looks for the reason and the file in the last words of a replica.
func (b *bed) said(m *storeproc.Member, why string, files ...string) {
	b.t.Helper()
	text, err := os.ReadFile(m.LogFile)
	b.must("log", err)
	last := strings.TrimSpace(string(text))
	last = last[strings.LastIndexByte(last, '\n')+1:]
	named := false
	for _, f := range files {
		named = named || strings.Contains(last, "/data/"+f)
	}
	if !strings.Contains(last, why) || !named {
		b.t.Errorf("%s ended with %q; want it to name %s and to say %q", m.Name, last, strings.Join(files, " or "), why)
	}
}

// again starts a replica that has ended, and checks that all is well; then all
// lose their power, and all is still well.
func (b *bed) again(round int) {
	b.t.Helper()
	b.quiet()
	for _, d := range b.allDisks() {
		d.Heal()
	}
	b.start()
	b.check()
	b.write()
	b.awaitProgress(b.ledger.Acknowledged())
	b.cut(func() {}, b.losses(round))
	b.start()
	b.check()
}

// A replica that fails to sync stops and says which file; the group goes on.
// Started again it does not build on what is readable only because the kernel
// has not dropped it yet.
func TestFailedSync(t *testing.T) {
	for _, store := range logStores {
		for i, pattern := range synced[store] {
			t.Run(store+" "+pattern, func(t *testing.T) {
				b := onDisks(t, store)
				for n, leads := range []bool{true, false} {
					m := b.who(leads)
					b.disk(m.Name).Fail(lossy.Sync, pattern, 1)
					if pattern == "raft.db" {
						b.shake(m)
					}
					b.awaitEnd(m, "input/output error", strings.TrimSuffix(pattern, "*"), "wal/", "raft.db")
					b.awaitProgress(b.ledger.Acknowledged())
					b.again(i + n)
					b.write()
					b.awaitProgress(b.ledger.Acknowledged())
				}
			})
		}
	}
}

// shake makes the replicas write their terms and votes, and their entries into
// raft.db, until one of them ends.
func (b *bed) shake(m *storeproc.Member) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		select {
		case <-m.Ended():
			return
		case <-ctx.Done():
			b.t.Fatalf("%s goes on", m.Name)
		default:
		}
		if leader, err := b.group.Leader(ctx); err == nil {
			_ = leader.Transfer(ctx)
		}
	}
}

// A full disk stops its replica, which says so; the others go on. When all are
// full nobody acknowledges anything, and when there is space again nothing is missing. F53
func TestFullDisk(t *testing.T) {
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			b := onDisks(t, store)
			b.quiet()
			b.load.bytes = 512 << 10
			b.write()
			for n, leads := range []bool{false, true} {
				m := b.who(leads)
				d := b.disk(m.Name)
				d.Limit(d.Used() + 1<<20)
				b.awaitEnd(m, "no space left on device", "")
				b.awaitProgress(b.ledger.Acknowledged())
				b.again(n)
				b.write()
				b.awaitProgress(b.ledger.Acknowledged())
			}
			for _, d := range b.allDisks() {
				d.Limit(d.Used() + 1<<20)
			}
			b.await("two replicas to stop", func() bool {
				up := 0
				for _, m := range b.group.Members() {
					if m.PID() != 0 {
						up++
					}
				}
				return up < 2
			})
			b.quiet()
			// What begins now: of what began before, the answer may have been under way.
			b.late()
			b.kill()
			for _, m := range b.group.Members() {
				if m.Forgive() != nil {
					b.said(m, "no space left on device", "")
				}
			}
			b.again(2)
		})
	}
}

// late has every replica that is left asked for a commit, which none may acknowledge.
func (b *bed) late() {
	b.t.Helper()
	for n, m := range b.group.Members() {
		if m.PID() == 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		token, c := b.ledger.Next("late", n, 100)
		rev, err := m.Store().Commit(ctx, c)
		cancel()
		b.ledger.Done(token, rev, err)
		if err == nil {
			b.t.Errorf("%s acknowledged revision %d, with one replica left", m.Name, rev)
		}
	}
}

// What cannot be read at the start is named, and nothing is served. When it can
// be read again the replica is as before.
func TestUnreadable(t *testing.T) {
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			b := onDisks(t, store)
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			m := b.who(false)
			b.must("snapshot", m.Snapshot(ctx))
			b.awaitProgress(b.ledger.Acknowledged())
			b.must("kill", m.Kill())
			d := b.disk(m.Name)
			for _, pattern := range map[string][]string{
				"bolt": {"raft.db", "raft.journal.*", "*.snap"},
				"wal":  {"raft.db", "*.wal", "meta", "*.snap"},
			}[store] {
				b.must("restart of the machine", d.Crash(lossy.Loss{Data: lossy.Kept, Entries: lossy.Kept}))
				d.Fail(lossy.Read, pattern, -1)
				_ = m.Start(ctx) // it may answer before it ends, or fail to while it is ending
				select {
				case <-m.Ended():
				case <-time.After(patience):
					t.Fatalf("%s serves without reading %s", m.Name, pattern)
				}
				m.Forgive()
				b.said(m, "input/output error", strings.Trim(pattern, "*"), "wal/", "snapshots/")
				d.Heal()
			}
			b.again(1)
		})
	}
}
