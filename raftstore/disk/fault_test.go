package disk

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/durable/durabletest"
)

// newFaultyEnv returns a disk whose files can be made to fail.
func newFaultyEnv(t *testing.T, kind LogStoreKind) (*diskEnv, *durabletest.Lossy) {
	layer := &durabletest.Lossy{}
	b := &diskEnv{logs: make(map[uint64]raft.Log), votes: make(map[string]uint64)}
	b.cfg = Config{Name: "r1", Dir: t.TempDir(), LogStore: kind, NoSync: true, Files: layer, JournalBytes: 64 << 10,
		SegmentBytes: 128 << 10}.withDefaults()
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	return b, layer
}

// TestDiskFailures: a full disk or a failed sync stops the replica, with an error that names the
// operation and the file. Nothing is acknowledged afterwards, even if the disk works again. Data
// that was acknowledged before exists after a restart. F52
func TestDiskFailures(t *testing.T) {
	for _, kind := range logKinds {
		for op, errno := range map[string]syscall.Errno{"write": syscall.ENOSPC, "sync": syscall.EIO} {
			b, layer := newFaultyEnv(t, kind)
			b.appendEntries(t, 1, 20, 100)
			acknowledged := b.last
			layer.Fail(func(o, name string) error {
				if o == op {
					return fmt.Errorf("%s %s: %w", o, name, errno)
				}
				return nil
			})
			last, err := b.tryAppend(1, 2, 100)
			if !errors.Is(err, errno) || !strings.Contains(err.Error(), b.cfg.Dir) {
				t.Errorf("%s, failed %s: %v", kind, op, err)
			}
			if len(b.failed) != 1 || !errors.Is(b.failed[0], errno) {
				t.Errorf("%s, failed %s: the replica was told %v", kind, op, b.failed)
			}
			layer.Fail(nil)
			if _, err := b.tryAppend(1, 1, 100); err == nil {
				t.Errorf("%s: appended after a failed %s", kind, op)
			}
			b.disk.Close()
			if _, err := layer.Crash(func() bool { return true }); err != nil {
				t.Fatal(err)
			}
			if err := b.open(); err != nil {
				t.Fatal(err)
			}
			// Entries that were not acknowledged may exist.
			if have, err := b.disk.Log.LastIndex(); err != nil || have != acknowledged && have != last {
				t.Errorf("%s, failed %s: log ends with %d, %d were acknowledged, error %v", kind, op, have,
					acknowledged, err)
			} else {
				b.last = have
			}
			b.requireSame(t)
			b.close(t)
			if _, err := layer.Crash(func() bool { return false }); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestSnapshotFailures: a snapshot that cannot be written stops the replica, and the previous
// snapshot stays.
func TestSnapshotFailures(t *testing.T) {
	for _, op := range []string{"write", "sync"} {
		b, layer := newFaultyEnv(t, LogBolt)
		b.appendEntries(t, 1, 20, 100)
		b.takeSnapshot(t, 10, 1, []byte("first"))
		layer.Fail(func(o, name string) error {
			if o == op && strings.Contains(name, snapshotsName) {
				return syscall.ENOSPC
			}
			return nil
		})
		sink, err := b.disk.Snapshots.Create(1, 15, 1, raft.Configuration{}, 1, nil)
		if err == nil {
			_, err = sink.Write(bytes.Repeat([]byte("second"), 1<<17))
			if err == nil {
				err = sink.Close()
			} else if e := sink.Cancel(); e != nil {
				t.Error(e)
			}
		}
		if !errors.Is(err, syscall.ENOSPC) || len(b.failed) == 0 ||
			!strings.Contains(b.failed[0].Error(), snapshotsName) {
			t.Errorf("failed %s: %v, the replica was told %v", op, err, b.failed)
		}
		layer.Fail(nil)
		b.reopen(t)
		b.requireSame(t)
		for path := range dataFiles(t, b.cfg.Dir) {
			if strings.HasSuffix(path, durable.TempSuffix) {
				t.Errorf("left behind: %s", path)
			}
		}
		b.close(t)
	}
}

// brokenKeeper fails to write the record of the stable store.
type brokenKeeper struct {
	RecordStore
	err error
}

func (k *brokenKeeper) Set(key, value []byte) error {
	if k.err != nil {
		return k.err
	}
	return k.RecordStore.Set(key, value)
}

// TestVoteThatCannotBeWritten: raft panics if a term cannot be written. Instead, its goroutine
// ends, the replica is notified, and the vote is not stored.
func TestVoteThatCannotBeWritten(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, nil)
	b.setVote(t, "CurrentTerm", 3)
	keeper := &brokenKeeper{RecordStore: b.disk.stable.records, err: syscall.EIO}
	b.disk.stable.records = keeper
	if err := b.disk.stable.SetUint64([]byte("CurrentTerm"), 4); !errors.Is(err, syscall.EIO) {
		t.Errorf("before raft runs: %v", err)
	}
	b.disk.stable.live = true
	returned, ended := false, make(chan struct{})
	go func() {
		defer close(ended)
		_ = b.disk.stable.SetUint64([]byte("CurrentTerm"), 4)
		returned = true
	}()
	<-ended
	if returned || len(b.failed) != 2 || !strings.Contains(b.failed[1].Error(), boltName) {
		t.Errorf("returned: %v, the replica was told %v", returned, b.failed)
	}
	if v, err := b.disk.stable.GetUint64([]byte("CurrentTerm")); v != 3 || err != nil {
		t.Errorf("term %d, error %v", v, err)
	}
	b.close(t)
}

// TestEntryThatGoesBad: an entry that is damaged while the replica runs ends the goroutine that
// reads it, and stops the replica.
func TestEntryThatGoesBad(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, nil)
	b.appendEntries(t, 1, 3, 100)
	bad := b.logs[2]
	bad.Extensions = []byte{1, 2, 3, 4}
	if err := b.disk.Log.LogStore.StoreLogs([]*raft.Log{&bad}); err != nil {
		t.Fatal(err)
	}
	b.disk.Log.cache = make(map[uint64]*raft.Log)
	b.disk.Log.live.Store(true)
	returned, ended := false, make(chan struct{})
	go func() {
		defer close(ended)
		_ = b.disk.Log.GetLog(2, new(raft.Log))
		returned = true
	}()
	<-ended
	if returned || len(b.failed) != 1 || !errors.Is(b.failed[0], ErrCorruptLog) ||
		!strings.Contains(b.failed[0].Error(), filepath.Join(b.cfg.Dir, boltName)) {
		t.Errorf("returned: %v, the replica was told %v", returned, b.failed)
	}
	if err := b.disk.Log.StoreLog(&raft.Log{Index: 4}); err == nil {
		t.Error("appended after that")
	}
	b.close(t)
}
