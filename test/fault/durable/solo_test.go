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

// soloReplica is a cluster of one replica on a lossy disk, over several runs of its process.
type soloReplica struct {
	t        *testing.T
	logStore string // that keeps its log
	disk     *lossy.Disk
	ledger   *Ledger
	n        int
	bytes    int // of a commit
}

func newSoloReplica(t *testing.T, store string) *soloReplica {
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
	return &soloReplica{t: t, logStore: store, disk: d, bytes: 3000}
}

// runOnce runs the replica once: it starts the process, calls do and kills the process. It returns
// early when the power is cut.
func (s *soloReplica) runOnce(do func(context.Context, *storeproc.Member) error) error {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience/2)
	defer cancel()
	return s.runOnceIn(ctx, do)
}

func (s *soloReplica) runOnceIn(ctx context.Context, do func(context.Context, *storeproc.Member) error) error {
	s.t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dark := s.disk.PowerLost()
	go func() {
		select {
		case <-dark:
			cancel()
		case <-ctx.Done():
		}
	}()
	settings := shortSettings()
	settings.LogStore = s.logStore
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
	if s.powerIsCut() {
		m.ClearErr()
	}
	return errors.Join(err, kill, g.Close())
}

func (s *soloReplica) powerIsCut() bool {
	select {
	case <-s.disk.PowerLost():
		return true
	default:
		return false
	}
}

// commitTimes makes commits and records their outcomes.
func (s *soloReplica) commitTimes(ctx context.Context, m *storeproc.Member, times int) error {
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

// checkStore compares the store with the ledger.
func (s *soloReplica) checkStore(ctx context.Context, m *storeproc.Member) error {
	if s.ledger == nil {
		return nil // nothing was acknowledged
	}
	list, err := m.Store().List(ctx, Prefix, raftstore.ListOptions{})
	if err != nil {
		return err
	}
	after := s.ledger.Checked()
	events, err := watchRange(ctx, m, after, list.Revision)
	if err != nil {
		return err
	}
	return s.ledger.Check(list.Revision, list.Items, after, events)
}

// makeChanges does the work that power cuts interrupt at each change: the first start, commits, a
// snapshot that replaces the log, and commits after it.
func (s *soloReplica) makeChanges(ctx context.Context, m *storeproc.Member) error {
	if err := s.commitTimes(ctx, m, 3); err != nil {
		return err
	}
	if err := m.Snapshot(ctx); err != nil {
		return err
	}
	return s.commitTimes(ctx, m, 2)
}

// forEachChange calls do at some of the disk changes of a complete run, for each log store, with
// the kinds of loss in turn.
func forEachChange(t *testing.T, count int, do func(t *testing.T, store string, n uint64, loss lossy.Loss)) {
	for _, store := range logStores {
		t.Run(store, func(t *testing.T) {
			s := newSoloReplica(t, store)
			if err := s.runOnce(s.makeChanges); err != nil {
				t.Fatal(err)
			}
			all := s.disk.Changes()
			step := max(1, all/uint64(roundCount(count)))
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
	forEachChange(t, 10, cutAt)
}

func cutAt(t *testing.T, store string, n uint64, loss lossy.Loss) {
	s := newSoloReplica(t, store)
	s.disk.CutAt(n)
	// Not all lives are of the same number of changes: this one may get through.
	if err := s.runOnce(s.makeChanges); err != nil && !s.powerIsCut() {
		t.Fatal(err)
	}
	if err := s.disk.Crash(loss); err != nil {
		t.Fatal(err)
	}
	err := s.runOnce(func(ctx context.Context, m *storeproc.Member) error {
		if err := s.checkStore(ctx, m); err != nil {
			return err
		}
		return s.commitTimes(ctx, m, 2)
	})
	if err != nil {
		t.Fatalf("after the power cut: %v", err)
	}
	if err := s.disk.Crash(lossy.Loss{}); err != nil {
		t.Fatal(err)
	}
	if err := s.runOnce(s.checkStore); err != nil {
		t.Fatalf("after the second power cut: %v", err)
	}
}

// The replica is killed at each change of the disk in turn. Written data that is not synced is
// still readable then, so the replica starts from it; whatever it has returned since survives a
// power cut. F52
func TestKillAtEveryChange(t *testing.T) {
	forEachChange(t, 8, killAt)
}

func killAt(t *testing.T, store string, n uint64, loss lossy.Loss) {
	s := newSoloReplica(t, store)
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
			for late := time.After(patience); countDying() == 0; {
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
	err := s.runOnceIn(ctx, s.makeChanges)
	close(over)
	select {
	case <-stalled:
	default:
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := s.runOnce(s.checkStore); err != nil {
		t.Fatalf("started again: %v", err)
	}
	if err := s.disk.Crash(loss); err != nil {
		t.Fatal(err)
	}
	if err := s.runOnce(s.checkStore); err != nil {
		t.Fatalf("after the power cut: %v", err)
	}
}

// countDying returns the number of killed child processes that have not exited yet because they
// wait for the disk.
func countDying() int {
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

// After a failed sync the data is still readable, also for the next process, but will never be on
// the disk. The replica must not rely on it: commits acknowledged after its restart survive a power
// cut. F52
func TestFailedSyncIsNotBuiltOn(t *testing.T) {
	for _, c := range []struct{ store, file string }{{"bolt", "raft.journal.*"}, {"bolt", "raft.db"},
		{"wal", "*.wal"}} {
		t.Run(c.store+" "+c.file, func(t *testing.T) {
			s := newSoloReplica(t, c.store)
			s.bytes = 200 << 10 // so that the journal is soon brought to raft.db
			err := s.runOnce(func(ctx context.Context, m *storeproc.Member) error {
				if err := s.commitTimes(ctx, m, 3); err != nil {
					return err
				}
				s.disk.Fail(lossy.Sync, c.file, 1)
				for m.PID() != 0 && ctx.Err() == nil {
					call, cancel := context.WithTimeout(ctx, time.Second)
					_ = s.commitTimes(call, m, 1)
					cancel()
				}
				m.ClearErr()
				return ctx.Err()
			})
			if err != nil {
				t.Fatal(err)
			}
			s.disk.Heal()
			if err := s.runOnce(func(ctx context.Context, m *storeproc.Member) error {
				return s.commitTimes(ctx, m, 3)
			}); err != nil {
				t.Fatalf("started again: %v", err)
			}
			if err := s.disk.Crash(lossy.Loss{}); err != nil {
				t.Fatal(err)
			}
			if err := s.runOnce(s.checkStore); err != nil {
				t.Fatalf("after the power cut: %v", err)
			}
		})
	}
}
