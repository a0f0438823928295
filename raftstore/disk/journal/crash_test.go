package journal

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"

	"keelson.dev/keelson/internal/durable/durabletest"
	"keelson.dev/keelson/raftstore/disk/sector"
)

// TestJournalOutlivesCrashes: after any appends, deletions, and power failures that lose any
// unsynced sectors, a reopened store has every acknowledged entry. An interrupted append exists
// completely, or its first entries, or not at all. Crashes follow each other, in both files.
func TestJournalOutlivesCrashes(t *testing.T) { // F52
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "journal")
		if err != nil {
			t.Fatalf("%v", err)
		}
		defer os.RemoveAll(dir)
		layer := &durabletest.Lossy{}
		b := newStoreEnvOn(t, dir, layer)
		term := uint64(1)
		for range rapid.IntRange(5, 60).Draw(t, "steps") {
			crash := rapid.IntRange(0, 2).Draw(t, "crash") == 0
			cut := crash && rapid.Bool().Draw(t, "cut")
			if cut { // one sync of this step fails, and all later ones
				layer.FailSyncs(rapid.Int64Range(0, 2).Draw(t, "syncs"))
			}
			before := b.saveMark()
			err := b.takeStep(t, &term)
			if err != nil && !errors.Is(err, durabletest.ErrPowerCut) {
				t.Fatalf("%v", err)
			}
			if !crash {
				continue
			}
			b.store.Close()
			layer.Fail(nil)
			if _, err := layer.Crash(func() bool { return rapid.Bool().Draw(t, "lose") }); err != nil {
				t.Fatalf("%v", err)
			}
			if err := b.open(); err != nil {
				t.Fatalf("opening after a crash: %v", err)
			}
			if err != nil {
				b.acceptInterrupted(t, before)
			}
			if d := b.differs(b.last); d != "" {
				t.Fatalf("after a crash: %s", d)
			}
		}
		if d := b.differs(b.last); d != "" {
			t.Fatalf("at the end: %s", d)
		}
		b.store.Close()
	})
}

// storeMark is the expected content before a step.
type storeMark struct {
	want        map[uint64]raft.Log
	first, last uint64
}

func (b *storeEnv) saveMark() storeMark { return storeMark{maps.Clone(b.want), b.first, b.last} }

// takeStep appends entries, deletes the first ones, or replaces the last ones. It returns the error
// of the store.
func (b *storeEnv) takeStep(t *rapid.T, term *uint64) error {
	switch step := rapid.IntRange(0, 9).Draw(t, "step"); {
	case step < 7 || b.first == 0:
		return b.tryAppend(*term, rapid.IntRange(1, 6).Draw(t, "n"),
			rapid.SampledFrom([]int{0, 10, 300, 900, 5000}).Draw(t, "size"))
	case step == 7:
		first, err := b.store.FirstIndex() // raft deletes from the first index of the store
		if err != nil {
			return err
		}
		return b.tryRemove(first, rapid.Uint64Range(b.first, b.last).Draw(t, "to"), true)
	default: // a new leader replaces entries
		*term++
		return b.tryRemove(rapid.Uint64Range(b.first, b.last).Draw(t, "from"), b.last, false)
	}
}

// acceptInterrupted updates the expected content after an interrupted step: all of the step, none
// of it, or the first entries of an append. differs reports anything else.
func (b *storeEnv) acceptInterrupted(t *rapid.T, before storeMark) {
	last, err := b.store.LastIndex()
	if err != nil {
		t.Fatalf("%v", err)
	}
	after := b.saveMark()
	if last == 0 && before.first == 0 {
		last = before.last // the log was empty
	}
	switch {
	case after.last > before.last && last >= before.last && last <= after.last: // append
		for i := last + 1; i <= after.last; i++ {
			delete(b.want, i)
		}
		if b.last = last; b.first > b.last {
			b.first = 0
		}
	case last == after.last:
	case last == before.last:
		b.want, b.first, b.last = before.want, before.first, before.last
		if after.first != 0 { // a compaction may have deleted some entries
			b.first = max(b.first, after.first)
		}
	}
}

// TestJournalFindsDamage: a flipped byte anywhere in the two files, and a truncated file, are
// reported or have no effect.
func TestJournalFindsDamage(t *testing.T) {
	b := newStoreEnv(t, t.TempDir())
	for i := range 14 {
		b.appendEntries(t, 1, 2, 20+37*i)
	}
	b.removeEntries(t, b.last-1, b.last, false)
	b.appendEntries(t, 2, 1, 30)
	if err := b.store.awaitMove(); err != nil {
		t.Fatal(err)
	}
	b.store.Close()
	reported := 0
	good := b.readFiles(t)
	try := func(what string, file int, content []byte) {
		t.Helper()
		files := durabletest.Memory{b.path + ".0": bytes.Clone(good[0]), b.path + ".1": bytes.Clone(good[1])}
		files[fmt.Sprintf("%s.%d", b.path, file)] = content
		copied := *b
		copied.layer, copied.inner = files, b.inner.clone()
		switch err := copied.open(); {
		case errors.Is(err, sector.ErrCorruptLog):
			reported++
		case err != nil:
			t.Fatalf("%s: %v", what, err)
		default:
			if d := copied.differs(b.last); d != "" {
				t.Fatalf("%s: %s", what, d)
			}
			copied.store.Close()
		}
	}
	for file := range 2 {
		for at := range good[file] {
			bad := bytes.Clone(good[file])
			bad[at] ^= 1 << (at % 8)
			try(fmt.Sprintf("byte %d of file %d flipped", at, file), file, bad)
			try(fmt.Sprintf("file %d cut off at %d", file, at), file, bytes.Clone(good[file][:at]))
		}
	}
	if want := 4 * smallJournal; reported != want { // every sector has a checksum
		t.Errorf("%d of %d damages reported", reported, want)
	}
}

// readFiles returns the content of both files.
func (b *storeEnv) readFiles(t fataler) (out [2][]byte) {
	for i := range out {
		var err error
		if out[i], err = os.ReadFile(fmt.Sprintf("%s.%d", b.path, i)); err != nil {
			t.Fatalf("%v", err)
		}
	}
	return out
}

// TestJournalMissesEntries: an inner store that has lost its last entries is reported as damaged.
func TestJournalMissesEntries(t *testing.T) {
	b := newStoreEnv(t, t.TempDir())
	for range 40 {
		b.appendEntries(t, 1, 3, 100)
	}
	if err := b.store.moveAll(); err != nil {
		t.Fatal(err)
	}
	b.store.Close()
	for _, kept := range []uint64{0, 1, b.last / 2} {
		copied := *b
		copied.inner = b.inner.clone()
		if err := copied.open(); err != nil { // retires both files
			t.Fatal(err)
		}
		copied.store.Close()
		if err := copied.inner.DeleteRange(kept+1, b.last); err != nil {
			t.Fatal(err)
		}
		if err := copied.open(); !errors.Is(err, sector.ErrCorruptLog) {
			t.Errorf("with entries 1 to %d of %d: %v", kept, b.last, err)
		}
	}
}

// TestJournalMissesFile: a journal without one of its files is rejected.
func TestJournalMissesFile(t *testing.T) {
	for file := range 2 {
		b := newStoreEnv(t, t.TempDir())
		b.appendEntries(t, 1, 3, 10)
		b.store.Close()
		if err := os.Remove(fmt.Sprintf("%s.%d", b.path, file)); err != nil {
			t.Fatal(err)
		}
		if err := b.open(); !errors.Is(err, sector.ErrCorruptLog) {
			t.Errorf("without file %d: %v", file, err)
		}
	}
}

// TestJournalFailsForGood: an append whose write or sync fails is not acknowledged, and all later
// appends fail.
func TestJournalFailsForGood(t *testing.T) {
	for _, op := range []string{"write", "sync"} {
		layer := &durabletest.Lossy{}
		b := newStoreEnvOn(t, t.TempDir(), layer)
		b.appendEntries(t, 1, 1, 10)
		layer.Fail(func(o, name string) error {
			if o == op && filepath.Dir(name) == filepath.Dir(b.path) {
				return durabletest.ErrPowerCut
			}
			return nil
		})
		if err := b.tryAppend(1, 1, 10); !errors.Is(err, durabletest.ErrPowerCut) {
			t.Errorf("failed %s: %v", op, err)
		}
		layer.Fail(nil)
		if err := b.tryAppend(1, 1, 10); !errors.Is(err, durabletest.ErrPowerCut) {
			t.Errorf("append after a failed %s: %v", op, err)
		}
		b.store.Close()
	}
}
