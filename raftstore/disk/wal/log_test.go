package wal

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/raftstore/disk/sector"
)

const (
	testID      = 7
	testSegment = 8 << 10
)

// openTestLog opens a log.
func openTestLog(t *testing.T, dir string) *Log {
	t.Helper()
	l, err := Open(durable.OS{NoSync: true}, dir, testID, testSegment)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// requireEntries checks that a log consists of the entries first to last of testEntry.
func requireEntries(t *testing.T, l *Log, first, last uint64) {
	t.Helper()
	begin, err := l.FirstIndex()
	end, err2 := l.LastIndex()
	if err := errors.Join(err, err2); err != nil || begin != first || end != last {
		t.Fatalf("the log has entries %d to %d, want %d to %d, error %v", begin, end, first, last, err)
	}
	for i := first; i <= last; i++ {
		var got raft.Log
		if err := l.GetLog(i, &got); err != nil || got.Index != i || !bytes.Equal(got.Data, testEntry(i).Data) {
			t.Fatalf("entry %d: index %d, %d bytes, error %v", i, got.Index, len(got.Data), err)
		}
	}
	for _, i := range []uint64{first - 1, last + 1} {
		if err := l.GetLog(i, new(raft.Log)); !errors.Is(err, raft.ErrLogNotFound) {
			t.Errorf("entry %d beyond the log: %v", i, err)
		}
	}
}

func testEntry(index uint64) *raft.Log {
	return &raft.Log{Index: index, Term: 1, Data: bytes.Repeat([]byte{byte(index)}, 700)}
}

// TestLogInSegments: entries in several segments, deletions at either end, and restarts.
func TestLogInSegments(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "wal")
	if err := Create(durable.OS{NoSync: true}, dir, testID, testSegment); err != nil {
		t.Fatal(err)
	}
	l := openTestLog(t, dir)
	for i := uint64(1); i <= 50; i++ {
		if err := l.StoreLog(testEntry(i)); err != nil {
			t.Fatal(err)
		}
	}
	requireEntries(t, l, 1, 50)
	for _, step := range []struct{ from, to, first, last uint64 }{{1, 20, 21, 50}, {45, 50, 21, 44}} {
		if err := l.DeleteRange(step.from, step.to); err != nil {
			t.Fatal(err)
		}
		requireEntries(t, l, step.first, step.last)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l = openTestLog(t, dir)
		requireEntries(t, l, step.first, step.last)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(durable.OS{NoSync: true}, dir, testID+1, testSegment); !errors.Is(err, sector.ErrCorruptLog) {
		t.Errorf("opened as a log with another number: %v", err)
	}
}

// TestMissingList: a log without its list of segments is damaged, and not empty.
func TestMissingList(t *testing.T) {
	if _, err := Open(durable.OS{NoSync: true}, t.TempDir(), testID, testSegment); !errors.Is(err,
		sector.ErrCorruptLog) {
		t.Errorf("opened: %v", err)
	}
}

// FuzzList: ParseList accepts any bytes. It returns an error, or a list in which each segment has a
// file of its own.
func FuzzList(f *testing.F) {
	f.Add([]byte(`{"NextSegmentID":3,"Segments":[{"ID":1}]}`))
	f.Add([]byte(`{"NextSegmentID":3,"Segments":[{"ID":1,"BaseIndex":7}],"Places":` +
		`{"00000000000000000007-0000000000000001.wal":{"File":"001.wal","From":5}},"Spares":["002.wal"],"Next":9}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		b := binary.LittleEndian.AppendUint32(nil, crc32.Update(testID, castagnoli, content))
		l, err := ParseList(append(b, content...), testID)
		if err != nil {
			if !errors.Is(err, sector.ErrCorruptLog) {
				t.Errorf("error %v", err)
			}
			return
		}
		files := map[string]bool{}
		for _, name := range l.Spares {
			files[name] = true
		}
		for _, p := range l.Places {
			files[p.File] = true
		}
		if len(files) != len(l.Spares)+len(l.Segments) || l.Next == 0 {
			t.Errorf("%d files of %d segments and %d spares, next append %d", len(files), len(l.Segments),
				len(l.Spares), l.Next)
		}
	})
}
