package disk

import (
	"errors"
	"fmt"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable/durabletest"
)

// TestFullSegmentCutShort: a power failure during the append that fills a segment may lose any of
// its sectors and keep others, such as the index at its end. Then the log ends where it ended
// before, or with the whole append. It accepts further entries, and another crash changes nothing.
func TestFullSegmentCutShort(t *testing.T) {
	const full = 16 << 10
	for _, before := range []int{0, 2} { // acknowledged entries in the same segment
		for at, of := 0, 1; at < of; at++ { // each sector
			if of = fillCutShort(t, before, full, func(sector int) bool { return sector == at }); of < full/512 {
				t.Fatalf("only %d sectors were written", of)
			}
		}
		// The last sector, at each offset in the index and the commit frame.
		for size := full; size < full+512; size += 8 {
			of := fillCutShort(t, before, size, func(int) bool { return false })
			fillCutShort(t, before, size, func(sector int) bool { return sector == of-1 })
		}
	}
}

// fillCutShort appends an entry that fills a segment, and loses the sectors for which lose returns
// true. It returns the number of sectors.
func fillCutShort(t *testing.T, before, size int, lose func(sector int) bool) (sectors int) {
	t.Helper()
	layer := &durabletest.Lossy{}
	b := &diskEnv{logs: make(map[uint64]raft.Log), votes: make(map[string]uint64)}
	b.cfg = Config{Name: "r1", Dir: t.TempDir(), LogStore: LogWAL, NoSync: true, SegmentBytes: 16 << 10,
		Files: layer}.withDefaults()
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		b.disk.Close()
		layer.Crash(func() bool { return false })
	}()
	if before > 0 {
		b.appendEntries(t, 1, before, 100)
	}
	layer.FailSyncs(0)
	attempted, err := b.tryAppend(1, 1, size)
	if !errors.Is(err, durabletest.ErrPowerCut) {
		t.Fatalf("the append should have failed: %v", err)
	}
	what := fmt.Sprintf("after %d entries, with %d bytes", before, size)
	crash := func(lose func() bool) {
		t.Helper()
		b.disk.Close()
		layer.Fail(nil)
		if _, err := layer.Crash(lose); err != nil {
			t.Fatal(err)
		}
		if err := b.open(); err != nil {
			t.Fatalf("%s: opening: %v", what, err)
		}
	}
	crash(func() bool { sectors++; return lose(sectors - 1) })
	last, err := b.disk.Log.LastIndex()
	if err != nil || last != b.last && last != attempted {
		t.Fatalf("%s: the log ends with %d, %v; want %d or %d", what, last, err, b.last, attempted)
	}
	for i := range b.logs {
		if i > last {
			delete(b.logs, i)
		}
	}
	if b.last = last; last > 0 {
		b.first = 1
	}
	for range 2 {
		if d := b.differs(); d != "" {
			t.Fatalf("%s: %s", what, d)
		}
		b.appendEntries(t, 2, 1, 6000)
		crash(func() bool { return true })
	}
	if d := b.differs(); d != "" {
		t.Fatalf("%s: at the end: %s", what, d)
	}
	return sectors
}
