package disk

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"

	"keelson.dev/keelson/internal/durable/durabletest"
)

// TestWALOutlivesCrashes: with raft-wal, no power failure loses an acknowledged entry or restores a
// deleted one. That holds in the middle of an append, after a segment is full and before it is
// closed, and while the next one is created.
func TestWALOutlivesCrashes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "wal")
		if err != nil {
			t.Fatalf("%v", err)
		}
		defer os.RemoveAll(dir)
		layer := &durabletest.Lossy{}
		b := &diskEnv{logs: make(map[uint64]raft.Log), votes: make(map[string]uint64)}
		b.cfg = Config{Name: "r1", Dir: dir, LogStore: LogWAL, NoSync: true, SegmentBytes: 16 << 10,
			Files: layer}.withDefaults()
		if err := b.open(); err != nil {
			t.Fatalf("%v", err)
		}
		defer func() {
			b.disk.Close()
			layer.Crash(func() bool { return false })
		}()
		term := uint64(1)
		for range rapid.IntRange(1, 25).Draw(t, "steps") {
			crash := rapid.IntRange(0, 2).Draw(t, "crash") == 0
			cut := crash && rapid.Bool().Draw(t, "cut")
			if cut {
				layer.FailSyncs(rapid.Int64Range(0, 1).Draw(t, "syncs"))
			}
			attempted, doomed := b.last, error(nil)
			if b.first == 0 || rapid.IntRange(0, 4).Draw(t, "step") > 0 {
				attempted, doomed = b.tryAppend(term, rapid.IntRange(1, 5).Draw(t, "n"),
					rapid.SampledFrom([]int{0, 100, 900, 6000, 40_000}).Draw(t, "size"))
			} else if !cut {
				if term++; rapid.Bool().Draw(t, "back") {
					b.truncateFrom(t, rapid.Uint64Range(b.first, b.last).Draw(t, "from"))
				} else {
					to := rapid.Uint64Range(b.first, b.last).Draw(t, "to")
					b.takeSnapshot(t, to, term, []byte("state"))
					b.compact(t, to)
				}
			}
			if doomed != nil && !errors.Is(doomed, durabletest.ErrPowerCut) {
				t.Fatalf("%v", doomed)
			}
			if !crash {
				continue
			}
			b.disk.Close()
			layer.Fail(nil)
			if _, err := layer.Crash(func() bool { return rapid.Bool().Draw(t, "lose") }); err != nil {
				t.Fatalf("%v", err)
			}
			if err := b.open(); err != nil {
				t.Fatalf("opening after a crash: %v", err)
			}
			if last, err := b.disk.Log.LastIndex(); doomed != nil && err == nil && last != 0 {
				if last != b.last && last != attempted { // an append exists completely or not at all
					t.Fatalf("log ends with %d, was %d, %d were appended", last, b.last, attempted)
				}
				b.last = last
				if b.first == 0 {
					b.first = last
				}
			}
			for i := range b.logs {
				if i > b.last {
					delete(b.logs, i)
				}
			}
			if d := b.differs(); d != "" {
				t.Fatalf("after a crash: %s", d)
			}
		}
		if d := b.differs(); d != "" {
			t.Fatalf("at the end: %s", d)
		}
	})
}

// tryAppend appends entries. They are expected only if it succeeds.
func (b *diskEnv) tryAppend(term uint64, n, size int) (last uint64, err error) {
	var logs []*raft.Log
	for i := range uint64(n) {
		l := raft.Log{Index: b.last + 1 + i, Term: term, Data: []byte(strings.Repeat(string(rune('a'+term%26)), size))}
		logs = append(logs, &l)
		b.logs[l.Index] = l
	}
	last = b.last + uint64(n)
	if err := b.disk.Log.StoreLogs(logs); err != nil {
		return last, err
	}
	if b.first == 0 {
		b.first = b.last + 1
	}
	b.last = last
	return last, nil
}
