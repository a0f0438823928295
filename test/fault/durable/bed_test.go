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

// times is how many rounds a test goes when it is not said.
func times(byDefault int) int {
	if *rounds > 0 {
		return *rounds
	}
	return byDefault
}

// patience bounds every wait: far beyond what is needed on a busy machine.
const patience = 2 * time.Minute

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// quick are settings under which much happens in little time: elections,
// snapshots and the shortening of logs.
func quick() storeproc.Settings {
	return storeproc.Settings{
		HeartbeatTimeout: 150 * time.Millisecond, ElectionTimeout: 150 * time.Millisecond,
		SnapshotBytes: 3 << 20, TrailingBytes: 256 << 10,
	}
}

// bed is a group of replicas under load, and the ledger of what it was given.
type bed struct {
	t      *testing.T
	dir    string
	rand   *rand.Rand
	group  *storeproc.Group
	ledger *Ledger

	mu    sync.Mutex
	disks map[string]*lossy.Disk // by the name of the replica; empty when they have real folders

	stop    context.CancelFunc // of the writers
	writers sync.WaitGroup
	session int // how often they have begun
	load    load
}

// load is what the writers do.
type load struct {
	writers int
	bytes   int // most of a commit
}

// newBed starts a group. With lossy every replica has a disk of that kind.
func newBed(t *testing.T, onLossy bool, replicas int, s storeproc.Settings) *bed {
	t.Helper()
	b := &bed{
		t: t, dir: t.TempDir(), rand: rand.New(rand.NewPCG(*seed, 1)), disks: make(map[string]*lossy.Disk), load: load{writers: 4, bytes: 2 << 10},
	}
	t.Logf("-durable.seed=%d", *seed)
	o := storeproc.Options{Dir: b.dir, Replicas: replicas, Settings: s}
	if onLossy {
		needDisks(t)
		o.DataDir = b.newDisk
	}
	var err error
	t.Cleanup(b.close)
	if b.group, err = storeproc.Start(within(t, patience), o); err != nil {
		t.Fatal(err)
	}
	rev, err := b.group.Members()[0].Store().Commit(within(t, patience), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/base", nil)}})
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

// newDisk makes a replica's disk and returns the data folder on it.
func (b *bed) newDisk(name string) string {
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

func (b *bed) disk(name string) *lossy.Disk {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.disks[name]
}

func (b *bed) allDisks() []*lossy.Disk {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Values(b.disks))
}

func (b *bed) close() {
	b.quiet()
	if b.group != nil {
		if b.t.Failed() {
			b.report()
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

// report shows the last words of the replicas, and keeps everything if it was asked to.
func (b *bed) report() {
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
			err = errors.Join(os.CopyFS(filepath.Join(to, "data"), os.DirFS(m.DataDir)), os.WriteFile(filepath.Join(to, "log"), text, 0o644))
		}
		b.t.Logf("%s is kept in %s: %v", m.Name, to, err)
	}
}

// must ends the test at an error.
func (b *bed) must(what string, err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatalf("%s: %v", what, err)
	}
}

// write lets the writers run until quiet.
func (b *bed) write() {
	ctx, cancel := context.WithCancel(context.Background())
	b.stop = cancel
	b.session++
	for i := range b.load.writers {
		name := fmt.Sprintf("w%d", i)
		r := rand.New(rand.NewPCG(b.rand.Uint64(), 2))
		b.writers.Go(func() { b.run(ctx, name, b.session*10_000, r) })
	}
}

// run is a writer: one commit after the other, on any replica.
func (b *bed) run(ctx context.Context, name string, n int, r *rand.Rand) {
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

// quiet stops the writers. What they were waiting for has an unknown outcome.
func (b *bed) quiet() {
	if b.stop != nil {
		b.stop()
		b.writers.Wait()
	}
}

// awaitProgress waits until the group has acknowledged something beyond a revision.
func (b *bed) awaitProgress(beyond raftstore.Revision) {
	b.t.Helper()
	b.await("a commit to be acknowledged", func() bool { return b.ledger.Acknowledged() > beyond })
}

func (b *bed) await(what string, holds func() bool) {
	b.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	late := time.After(patience)
	for !holds() {
		select {
		case <-tick.C:
		case <-late:
			b.t.Fatalf("waited %s in vain for %s", patience, what)
		}
	}
}

// moment waits a random while: where in their work the replicas are then is
// what the tests vary.
func (b *bed) moment(most time.Duration) {
	<-time.After(time.Duration(b.rand.Int64N(int64(most))))
}

// each does something to several replicas at once.
func (b *bed) each(members []*storeproc.Member, what string, do func(*storeproc.Member) error) {
	b.t.Helper()
	errs := make([]error, len(members))
	var all sync.WaitGroup
	for i, m := range members {
		all.Go(func() { errs[i] = do(m) })
	}
	all.Wait()
	b.must(what, errors.Join(errs...))
}

// kill ends all replicas as a crash does.
func (b *bed) kill() {
	b.t.Helper()
	b.each(b.group.Members(), "killing", (*storeproc.Member).Kill)
}

// start starts all replicas that are down. That one refuses to is a failure:
// neither a kill nor a power cut is a reason to.
func (b *bed) start() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	b.each(b.group.Members(), "starting", func(m *storeproc.Member) error { return m.Start(ctx) })
}

// cut takes the power of all disks away, then ends what goes on and the
// replicas, and gives each disk back as loss says.
func (b *bed) cut(over func(), loss func() lossy.Loss) {
	b.t.Helper()
	for _, d := range b.allDisks() {
		d.Cut()
	}
	over()
	b.quiet()
	b.kill()
	for _, m := range b.group.Members() {
		m.Forgive() // without power it may have ended by itself
		b.must("power cut", b.disk(m.Name).Crash(loss()))
	}
}

// check compares the group, where nobody writes, with the ledger: nothing
// acknowledged is missing, commits are whole, history is what it was, and all replicas have the same.
func (b *bed) check() {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	b.must("after the restart", b.group.AwaitReady(ctx))
	members := b.group.Members()
	m := members[b.rand.IntN(len(members))]
	list, err := m.Store().List(ctx, Prefix, raftstore.ListOptions{})
	b.must("listing on "+m.Name, err)
	after := b.ledger.Checked()
	if b.rand.IntN(4) == 0 {
		after = b.longAgo(ctx, m, after)
	}
	events, err := watched(ctx, m, after, list.Revision)
	b.must(fmt.Sprintf("watching on %s after %d up to %d", m.Name, after, list.Revision), err)
	if err := b.ledger.Check(list.Revision, list.Items, after, events); err != nil {
		b.t.Fatalf("on %s, seed %d: %v", m.Name, *seed, err)
	}
	b.same(ctx, list.Revision)
}

// longAgo is a revision from which history is still there.
func (b *bed) longAgo(ctx context.Context, m *storeproc.Member, at raftstore.Revision) raftstore.Revision {
	s, _, err := m.Status(ctx)
	b.must("status", err)
	from := max(b.ledger.base, s.Compacted)
	if at <= from {
		return at
	}
	return max(from, at-min(at-from, 300))
}

// watched are all revisions after one up to another, as a watcher gets them.
func watched(ctx context.Context, m *storeproc.Member, after, upTo raftstore.Revision) ([]raftstore.Events, error) {
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

// same waits until all replicas have come to a revision and compares their states.
func (b *bed) same(ctx context.Context, rev raftstore.Revision) {
	b.t.Helper()
	var first string
	for _, m := range b.group.Members() {
		var hash string
		b.await(m.Name+" to catch up", func() bool {
			at, h, err := m.Hash(ctx)
			b.must("hash", err)
			hash = h
			return at >= rev
		})
		if first == "" {
			first = hash
		} else if hash != first {
			b.t.Fatalf("at revision %d %s differs from %s: %s and %s", rev, m.Name, b.group.Members()[0].Name, hash, first)
		}
	}
}
