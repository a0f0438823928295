package durable

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/test/testenv/lossy"
	"keelson.dev/keelson/test/testenv/storeproc"
)

// solo is a group of one on a lossy disk, made for the first time or again.
type solo struct {
	t      *testing.T
	store  string // that keeps its log
	disk   *lossy.Disk
	ledger *Ledger
	n      int
	bytes  int // of a commit
}

func newSolo(t *testing.T, store string) *solo {
	t.Helper()
	needDisks(t)
	d, err := lossy.New(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return &solo{t: t, store: store, disk: d, bytes: 3000}
}

// live is a life of the replica: it starts, does something, and is killed. It
// ends early when the power is cut.
func (s *solo) live(do func(context.Context, *storeproc.Member) error) error {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience/2)
	defer cancel()
	return s.liveIn(ctx, do)
}

func (s *solo) liveIn(ctx context.Context, do func(context.Context, *storeproc.Member) error) error {
	s.t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dark := s.disk.Dark()
	go func() {
		select {
		case <-dark:
			cancel()
		case <-ctx.Done():
		}
	}()
	settings := quick()
	settings.LogStore = s.store
	g, err := storeproc.Start(ctx, storeproc.Options{
		Dir: s.t.TempDir(), Replicas: 1, Settings: settings,
		DataDir: func(string) string { return s.dataDir() },
	})
	if err != nil {
		return fmt.Errorf("starting: %w", err)
	}
	m := g.Members()[0]
	err = do(ctx, m)
	kill := m.Kill()
	if s.powerless() {
		m.Forgive()
	}
	return errors.Join(err, kill, g.Close())
}

func (s *solo) powerless() bool {
	select {
	case <-s.disk.Dark():
		return true
	default:
		return false
	}
}

// commit makes some commits and notes what became of them.
func (s *solo) commit(ctx context.Context, m *storeproc.Member, times int) error {
	if s.ledger == nil {
		rev, err := m.Store().Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/base", nil)}})
		if err != nil {
			return err
		}
		s.ledger = NewLedger(rev)
	}
	for range times {
		s.n++
		token, c := s.ledger.Next("solo", s.n, s.bytes)
		rev, err := m.Store().Commit(ctx, c)
		s.ledger.Done(token, rev, err)
		if err != nil {
			return err
		}
	}
	return nil
}

// check compares the store with the ledger.
func (s *solo) check(ctx context.Context, m *storeproc.Member) error {
	if s.ledger == nil {
		return nil // nothing was acknowledged
	}
	list, err := m.Store().List(ctx, Prefix, raftstore.ListOptions{})
	if err != nil {
		return err
	}
	after := s.ledger.Checked()
	events, err := watched(ctx, m, after, list.Revision)
	if err != nil {
		return err
	}
	return s.ledger.Check(list.Revision, list.Items, after, events)
}

// work is the life whose every change a power cut may hit: the first start,
// commits, a snapshot that takes the place of the log, and commits after it.
func (s *solo) work(ctx context.Context, m *storeproc.Member) error {
	if err := s.commit(ctx, m, 3); err != nil {
		return err
	}
	if err := m.Snapshot(ctx); err != nil {
		return err
	}
	return s.commit(ctx, m, 2)
}

// atChanges does something at some of the changes of the disk in a whole life,
// on each log store, with one way of losing what was not synced after the other.
func atChanges(t *testing.T, count int, do func(t *testing.T, store string, n uint64, loss lossy.Loss)) {
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			s := newSolo(t, store)
			if err := s.live(s.work); err != nil {
				t.Fatal(err)
			}
			all := s.disk.Changes()
			step := max(1, all/uint64(times(count)))
			round := *seed
			for n := 1 + *seed%step; n <= all; n += step {
				ways := lossy.Losses(*seed + n)
				loss := ways[round%uint64(len(ways))]
				round++
				t.Run(fmt.Sprintf("%d of %d, %s", n, all, loss), func(t *testing.T) { do(t, store, n, loss) })
			}
		})
	}
}

// The power goes at one change of the disk after the other, from the first
// change of the first start on. The replica always starts again, with
// all that it had acknowledged. F52
func TestPowerCutAtEveryChange(t *testing.T) {
	atChanges(t, 10, cutAt)
}

func cutAt(t *testing.T, store string, n uint64, loss lossy.Loss) {
	s := newSolo(t, store)
	s.disk.CutAt(n)
	// Not all lives are of the same number of changes: this one may get through.
	if err := s.live(s.work); err != nil && !s.powerless() {
		t.Fatal(err)
	}
	if err := s.disk.Crash(loss); err != nil {
		t.Fatal(err)
	}
	err := s.live(func(ctx context.Context, m *storeproc.Member) error {
		if err := s.check(ctx, m); err != nil {
			return err
		}
		return s.commit(ctx, m, 2)
	})
	if err != nil {
		t.Fatalf("after the power cut: %v", err)
	}
	if err := s.disk.Crash(lossy.Loss{}); err != nil {
		t.Fatal(err)
	}
	if err := s.live(s.check); err != nil {
		t.Fatalf("after the second power cut: %v", err)
	}
}

// The replica is killed at one change of the disk after the other. What it had
// written and not synced is still readable then, so it starts from that; and
// what it has shown to anybody since outlives a power cut. F52
func TestKillAtEveryChange(t *testing.T) {
	atChanges(t, 8, killAt)
}

func killAt(t *testing.T, store string, n uint64, loss lossy.Loss) {
	s := newSolo(t, store)
	ctx, cancel := context.WithTimeout(context.Background(), patience/2)
	defer cancel()
	stalled := s.disk.StallAt(n)
	over := make(chan struct{})
	go func() {
		select {
		case <-stalled:
			cancel() // which kills the process
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for late := time.After(patience); dying() == 0; {
				select {
				case <-tick.C:
				case <-late:
					t.Error("the process does not die")
					s.disk.Resume()
					return
				}
			}
		case <-over:
		}
		s.disk.Resume()
	}()
	err := s.liveIn(ctx, s.work)
	close(over)
	select {
	case <-stalled:
	default:
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := s.live(s.check); err != nil {
		t.Fatalf("started again: %v", err)
	}
	if err := s.disk.Crash(loss); err != nil {
		t.Fatal(err)
	}
	if err := s.live(s.check); err != nil {
		t.Fatalf("after the power cut: %v", err)
	}
}

// dying is how many processes of ours have been killed and are not gone yet,
// because they wait for the disk.
func dying() int {
	n := 0
	files, _ := filepath.Glob("/proc/[0-9]*/status")
	for _, f := range files {
		b, _ := os.ReadFile(f)
		var parent int
		var state string
		var signals [2]uint64
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(line, ":")
			switch value = strings.TrimSpace(value); key {
			case "PPid":
				parent, _ = strconv.Atoi(value)
			case "State":
				state = value
			case "SigPnd":
				signals[0], _ = strconv.ParseUint(value, 16, 64)
			case "ShdPnd":
				signals[1], _ = strconv.ParseUint(value, 16, 64)
			}
		}
		const killed = 1 << (syscall.SIGKILL - 1)
		if parent == os.Getpid() && (strings.HasPrefix(state, "Z") || (signals[0]|signals[1])&killed != 0) {
			n++
		}
	}
	return n
}

// After a failed sync the data is still readable, for the next process too,
// and will never be on the disk. The replica must not build on it: what it
// acknowledges after its restart outlives a power cut. F52
func TestFailedSyncIsNotBuiltOn(t *testing.T) {
	for _, c := range []struct{ store, file string }{{"bolt", "raft.journal.*"}, {"bolt", "raft.db"}, {"wal", "*.wal"}} {
		t.Run(c.store+" "+c.file, func(t *testing.T) {
			s := newSolo(t, c.store)
			s.bytes = 200 << 10 // so that the journal is soon brought to raft.db
			err := s.live(func(ctx context.Context, m *storeproc.Member) error {
				if err := s.commit(ctx, m, 3); err != nil {
					return err
				}
				s.disk.Fail(lossy.Sync, c.file, 1)
				for m.PID() != 0 && ctx.Err() == nil {
					call, cancel := context.WithTimeout(ctx, time.Second)
					_ = s.commit(call, m, 1)
					cancel()
				}
				m.Forgive()
				return ctx.Err()
			})
			if err != nil {
				t.Fatal(err)
			}
			s.disk.Heal()
			if err := s.live(func(ctx context.Context, m *storeproc.Member) error { return s.commit(ctx, m, 3) }); err != nil {
				t.Fatalf("started again: %v", err)
			}
			if err := s.disk.Crash(lossy.Loss{}); err != nil {
				t.Fatal(err)
			}
			if err := s.live(s.check); err != nil {
				t.Fatalf("after the power cut: %v", err)
			}
		})
	}
}
