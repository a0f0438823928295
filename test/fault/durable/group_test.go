package durable

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/test/testenv/lossy"
	"keelson.dev/keelson/test/testenv/storeproc"
)

var (
	rounds = flag.Int("durable.rounds", 0, "how many times each test kills or cuts the power (0 = some seconds' worth)")
	seed   = flag.Uint64("durable.seed", uint64(time.Now().UnixNano())%1e9, "repeats the schedule of a run")
	keep   = flag.String("durable.keep", "", "folder for the logs and disks of a test that fails")
)

func TestMain(m *testing.M) {
	storeproc.Main()
	verbMain()
	flag.Parse()
	os.Exit(m.Run())
}

// roundCount returns the number of rounds of a test: the setting, or byDefault.
func roundCount(byDefault int) int {
	if *rounds > 0 {
		return *rounds
	}
	return byDefault
}

// patience is the limit of every wait, far longer than needed on a busy machine.
const patience = 2 * time.Minute

func testContext(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// shortSettings returns settings with frequent elections, snapshots and log truncations.
func shortSettings() storeproc.Settings {
	return storeproc.Settings{
		HeartbeatTimeout: 150 * time.Millisecond, ElectionTimeout: 150 * time.Millisecond,
		SnapshotBytes: 3 << 20, TrailingBytes: 256 << 10,
	}
}

// testGroup is a group of replicas under load, and the ledger of its commits.
type testGroup struct {
	t      *testing.T
	dir    string
	rand   *rand.Rand
	group  *storeproc.Group
	ledger *Ledger

	mu    sync.Mutex
	disks map[string]*lossy.Disk // by the name of the replica; empty when they have real folders

	stop    context.CancelFunc // of the writers
	writers sync.WaitGroup
	session int // number of starts of the writers
	load    writeLoad
}

// writeLoad is the load of the writers.
type writeLoad struct {
	writers int
	bytes   int // most of a commit
}

// newTestGroup starts a group. With onLossy every replica has a lossy disk.
func newTestGroup(t *testing.T, onLossy bool, replicas int, s storeproc.Settings) *testGroup {
	t.Helper()
	b := &testGroup{
		t: t, dir: t.TempDir(), rand: rand.New(rand.NewPCG(*seed, 1)), disks: make(map[string]*lossy.Disk),
		load: writeLoad{writers: 4, bytes: 2 << 10},
	}
	t.Logf("-durable.seed=%d", *seed)
	o := storeproc.Options{Dir: b.dir, Replicas: replicas, Settings: s}
	if onLossy {
		needDisks(t)
		o.DataDir = b.newDisk
	}
	var err error
	t.Cleanup(b.closeGroup)
	if b.group, err = storeproc.Start(testContext(t, patience), o); err != nil {
		t.Fatal(err)
	}
	rev, err := b.group.Members()[0].Store().Commit(testContext(t, patience),
		raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/base", nil)}})
	if err != nil {
		t.Fatal(err)
	}
	b.ledger = NewLedger(rev)
	return b
}

func needDisks(t *testing.T) {
	t.Helper()
	if err := lossy.Supported(); err != nil {
		t.Skipf("no lossy disks here: %v", err)
	}
}

// newDisk creates a replica's disk and returns the data folder on it.
func (b *testGroup) newDisk(name string) string {
	at := filepath.Join(b.dir, name+".disk")
	d, err := lossy.New(at)
	if err != nil {
		b.t.Error(err) // and the replica will not find its folder
		return filepath.Join(at, "data")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.disks[name] = d
	return filepath.Join(d.Path(), "data")
}

func (b *testGroup) diskOf(name string) *lossy.Disk {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.disks[name]
}

func (b *testGroup) allDisks() []*lossy.Disk {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Values(b.disks))
}

func (b *testGroup) closeGroup() {
	b.stopWriters()
	if b.group != nil {
		if b.t.Failed() {
			b.logFailure()
		}
		if err := b.group.Close(); err != nil {
			b.t.Error(err)
		}
	}
	for _, d := range b.allDisks() {
		if err := d.Close(); err != nil {
			b.t.Error(err)
		}
	}
}

// logFailure logs the last lines of the replicas' logs, and keeps all files if the test was asked
// to.
func (b *testGroup) logFailure() {
	for _, m := range b.group.Members() {
		text, _ := os.ReadFile(m.LogFile)
		lines := strings.Split(strings.TrimSpace(string(text)), "\n")
		b.t.Logf("%s:\n\t%s", m.Name, strings.Join(lines[max(0, len(lines)-30):], "\n\t"))
	}
	if *keep == "" {
		return
	}
	for _, m := range b.group.Members() {
		to := filepath.Join(*keep, b.t.Name(), m.Name)
		text, _ := os.ReadFile(m.LogFile)
		err := os.MkdirAll(to, 0o755)
		if err == nil {
			err = errors.Join(os.CopyFS(filepath.Join(to, "data"), os.DirFS(m.DataDir)),
				os.WriteFile(filepath.Join(to, "log"), text, 0o644))
		}
		b.t.Logf("%s is kept in %s: %v", m.Name, to, err)
	}
}

// requireNoError ends the test if err is not nil.
func (b *testGroup) requireNoError(what string, err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatalf("%s: %v", what, err)
	}
}

// startWriters starts the writers, which run until stopWriters.
func (b *testGroup) startWriters() {
	ctx, cancel := context.WithCancel(context.Background())
	b.stop = cancel
	b.session++
	for i := range b.load.writers {
		name := fmt.Sprintf("w%d", i)
		r := rand.New(rand.NewPCG(b.rand.Uint64(), 2))
		b.writers.Go(func() { b.runWriter(ctx, name, b.session*10_000, r) })
	}
}

// runWriter is one writer: it makes one commit after the other, through random replicas.
func (b *testGroup) runWriter(ctx context.Context, name string, n int, r *rand.Rand) {
	members := b.group.Members()
	for ; ctx.Err() == nil; n++ {
		token, c := b.ledger.Next(name, n, 16+r.IntN(b.load.bytes))
		m := members[r.IntN(len(members))]
		call, cancel := context.WithTimeout(ctx, 2*time.Second)
		rev, err := m.Store().Commit(call, c)
		cancel()
		b.ledger.Done(token, rev, err)
	}
}

// stopWriters stops the writers. Their pending commits have an unknown outcome.
func (b *testGroup) stopWriters() {
	if b.stop != nil {
		b.stop()
		b.writers.Wait()
	}
}

// awaitProgress waits until the group has acknowledged a revision above beyond.
func (b *testGroup) awaitProgress(beyond raftstore.Revision) {
	b.t.Helper()
	b.awaitCondition("a commit to be acknowledged", func() bool { return b.ledger.Acknowledged() > beyond })
}

func (b *testGroup) awaitCondition(what string, holds func() bool) {
	b.t.Helper()
	await.Until(context.Background(), b.t, patience, 2*time.Millisecond, what, func() error {
		if !holds() {
			return errors.New("the condition does not hold")
		}
		return nil
	})
}

// waitRandomly waits for a random time up to most, so that the replicas are at different points of
// their work.
func (b *testGroup) waitRandomly(most time.Duration) {
	<-time.After(time.Duration(b.rand.Int64N(int64(most))))
}

// forEach calls do for several replicas concurrently.
func (b *testGroup) forEach(members []*storeproc.Member, what string, do func(*storeproc.Member) error) {
	b.t.Helper()
	errs := make([]error, len(members))
	var all sync.WaitGroup
	for i, m := range members {
		all.Go(func() { errs[i] = do(m) })
	}
	all.Wait()
	b.requireNoError(what, errors.Join(errs...))
}

// killAll kills all replicas, like a crash.
func (b *testGroup) killAll() {
	b.t.Helper()
	b.forEach(b.group.Members(), "killing", (*storeproc.Member).Kill)
}

// startAll starts all replicas that are down. A replica that refuses to start fails the test:
// neither a kill nor a power cut is a reason to refuse.
func (b *testGroup) startAll() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	b.forEach(b.group.Members(), "starting", func(m *storeproc.Member) error { return m.Start(ctx) })
}

// cutPower cuts the power of all disks, ends the action in progress with over, kills the replicas,
// and restores each disk with the loss that loss returns.
func (b *testGroup) cutPower(over func(), loss func() lossy.Loss) {
	b.t.Helper()
	for _, d := range b.allDisks() {
		d.Cut()
	}
	over()
	b.stopWriters()
	b.killAll()
	for _, m := range b.group.Members() {
		m.ClearErr() // without power it may have ended by itself
		b.requireNoError("power cut", b.diskOf(m.Name).Crash(loss()))
	}
}

// checkLedger compares the idle group with the ledger. No acknowledged commit is missing, commits
// are atomic, the history has not changed, and all replicas have the same content.
func (b *testGroup) checkLedger() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	b.requireNoError("after the restart", b.group.AwaitReady(ctx))
	members := b.group.Members()
	m := members[b.rand.IntN(len(members))]
	list, err := m.Store().List(ctx, Prefix, raftstore.ListOptions{})
	b.requireNoError("listing on "+m.Name, err)
	after := b.ledger.Checked()
	if b.rand.IntN(4) == 0 {
		after = b.earliestRevision(ctx, m, after)
	}
	events, err := watchRange(ctx, m, after, list.Revision)
	b.requireNoError(fmt.Sprintf("watching on %s after %d up to %d", m.Name, after, list.Revision), err)
	if err := b.ledger.Check(list.Revision, list.Items, after, events); err != nil {
		b.t.Fatalf("on %s, seed %d: %v", m.Name, *seed, err)
	}
	b.requireSameState(ctx, list.Revision)
}

// earliestRevision returns a revision from which history is still available.
func (b *testGroup) earliestRevision(
	ctx context.Context, m *storeproc.Member, at raftstore.Revision,
) raftstore.Revision {
	s, _, err := m.Status(ctx)
	b.requireNoError("status", err)
	from := max(b.ledger.base, s.Compacted)
	if at <= from {
		return at
	}
	return max(from, at-min(at-from, 300))
}

// watchRange returns the events of all revisions after one revision up to another, as a watch
// delivers them.
func watchRange(ctx context.Context, m *storeproc.Member, after, upTo raftstore.Revision) ([]raftstore.Events, error) {
	w, err := m.Store().Watch(ctx, Prefix, after)
	if err != nil {
		return nil, err
	}
	defer w.Stop()
	var out []raftstore.Events
	for after < upTo {
		ev, open := <-w.C()
		if !open {
			return out, fmt.Errorf("ended after %d: %w", after, w.Err())
		}
		if after = ev.Revision; len(ev.Events) > 0 {
			out = append(out, ev)
		}
	}
	return out, nil
}

// requireSameState waits until all replicas have reached a revision and compares their states.
func (b *testGroup) requireSameState(ctx context.Context, rev raftstore.Revision) {
	b.t.Helper()
	var first string
	for _, m := range b.group.Members() {
		var hash string
		b.awaitCondition(m.Name+" to catch up", func() bool {
			at, h, err := m.Hash(ctx)
			b.requireNoError("hash", err)
			hash = h
			return at >= rev
		})
		if first == "" {
			first = hash
		} else if hash != first {
			b.t.Fatalf("at revision %d %s differs from %s: %s and %s", rev, m.Name,
				b.group.Members()[0].Name, hash, first)
		}
	}
}
