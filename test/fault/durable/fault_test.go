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

// newGroupOnDisks starts three replicas on lossy disks, under load.
func newGroupOnDisks(t *testing.T, store string) *testGroup {
	t.Helper()
	s := shortSettings()
	s.LogStore = store
	b := newTestGroup(t, true, 3, s)
	b.load.bytes = 64 << 10
	b.startWriters()
	b.awaitProgress(b.ledger.Acknowledged())
	return b
}

// pickMember returns the leader, or a replica that is not the leader.
func (b *testGroup) pickMember(leads bool) *storeproc.Member {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	leader, err := b.group.Leader(ctx)
	b.requireNoError("leader", err)
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

// awaitExit waits until a replica has exited by itself and has logged the file and the reason.
func (b *testGroup) awaitExit(m *storeproc.Member, why string, files ...string) {
	b.t.Helper()
	select {
	case <-m.Exited():
	case <-time.After(patience):
		b.t.Fatalf("%s goes on", m.Name)
	}
	b.checkLog(m, why, files...)
	if err := m.ClearErr(); err == nil {
		b.t.Errorf("%s has ended as if all were well", m.Name)
	}
}

// checkLog requires the reason and the file in the last lines of a replica's log.
func (b *testGroup) checkLog(m *storeproc.Member, why string, files ...string) {
	b.t.Helper()
	text, err := os.ReadFile(m.LogFile)
	b.requireNoError("log", err)
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

// restartAndCheck starts a replica that has exited and checks the group. Then it cuts the power of
// all replicas and checks the group again.
func (b *testGroup) restartAndCheck(round int) {
	b.t.Helper()
	b.stopWriters()
	for _, d := range b.allDisks() {
		d.Heal()
	}
	b.startAll()
	b.checkLedger()
	b.startWriters()
	b.awaitProgress(b.ledger.Acknowledged())
	b.cutPower(func() {}, b.lossPlans(round))
	b.startAll()
	b.checkLedger()
}

// A replica with a failed sync exits and logs the file; the group continues. After a restart it
// does not rely on data that is readable only because the kernel still caches it.
func TestFailedSync(t *testing.T) {
	for _, store := range logStores {
		for i, pattern := range synced[store] {
			t.Run(store+" "+pattern, func(t *testing.T) {
				b := newGroupOnDisks(t, store)
				for n, leads := range []bool{true, false} {
					m := b.pickMember(leads)
					b.diskOf(m.Name).Fail(lossy.Sync, pattern, 1)
					if pattern == "raft.db" {
						b.forceWrites(m)
					}
					b.awaitExit(m, "input/output error", strings.TrimSuffix(pattern, "*"), "wal/", "raft.db")
					b.awaitProgress(b.ledger.Acknowledged())
					b.restartAndCheck(i + n)
					b.startWriters()
					b.awaitProgress(b.ledger.Acknowledged())
				}
			})
		}
	}
}

// forceWrites makes the replicas write their terms, their votes and entries of raft.db until one of
// them exits.
func (b *testGroup) forceWrites(m *storeproc.Member) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		select {
		case <-m.Exited():
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

// A full disk stops its replica, which logs the reason; the others continue. When all disks are
// full, nothing is acknowledged, and when there is space again, nothing is missing. F53
func TestFullDisk(t *testing.T) {
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			b := newGroupOnDisks(t, store)
			b.stopWriters()
			b.load.bytes = 512 << 10
			b.startWriters()
			for n, leads := range []bool{false, true} {
				m := b.pickMember(leads)
				d := b.diskOf(m.Name)
				d.Limit(d.Used() + 1<<20)
				b.awaitExit(m, "no space left on device", "")
				b.awaitProgress(b.ledger.Acknowledged())
				b.restartAndCheck(n)
				b.startWriters()
				b.awaitProgress(b.ledger.Acknowledged())
			}
			for _, d := range b.allDisks() {
				d.Limit(d.Used() + 1<<20)
			}
			b.awaitCondition("two replicas to stop", func() bool {
				up := 0
				for _, m := range b.group.Members() {
					if m.PID() != 0 {
						up++
					}
				}
				return up < 2
			})
			b.stopWriters()
			// Only requests that start now: the response to an earlier request may have been in
			// transit.
			b.checkNoAcknowledgment()
			b.killAll()
			for _, m := range b.group.Members() {
				if m.ClearErr() != nil {
					b.checkLog(m, "no space left on device", "")
				}
			}
			b.restartAndCheck(2)
		})
	}
}

// checkNoAcknowledgment requests a commit from every remaining replica. None of them may
// acknowledge it.
func (b *testGroup) checkNoAcknowledgment() {
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

// A file that cannot be read at the start is named in the log, and the replica does not serve. When
// it can be read again, the replica is as before.
func TestUnreadable(t *testing.T) {
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			b := newGroupOnDisks(t, store)
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			m := b.pickMember(false)
			b.requireNoError("snapshot", m.Snapshot(ctx))
			b.awaitProgress(b.ledger.Acknowledged())
			b.requireNoError("kill", m.Kill())
			d := b.diskOf(m.Name)
			for _, pattern := range map[string][]string{
				"bolt": {"raft.db", "raft.journal.*", "*.snap"},
				"wal":  {"raft.db", "*.wal", "meta", "*.snap"},
			}[store] {
				b.requireNoError("restart of the machine", d.Crash(lossy.Loss{Data: lossy.Kept, Entries: lossy.Kept}))
				d.Fail(lossy.Read, pattern, -1)
				_ = m.Start(ctx) // it may answer before it ends, or fail to while it is ending
				select {
				case <-m.Exited():
				case <-time.After(patience):
					t.Fatalf("%s serves without reading %s", m.Name, pattern)
				}
				m.ClearErr()
				b.checkLog(m, "input/output error", strings.Trim(pattern, "*"), "wal/", "snapshots/")
				d.Heal()
			}
			b.restartAndCheck(1)
		})
	}
}
