package disk

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

	"keelson.dev/keelson/raftstore/disk/platter"
)

// Whatever is appended and deleted, and whichever sectors of what was not
// synced a power cut loses, a store opened again has every acknowledged entry;
// an append that was under way is there as a whole, or in part from its
// beginning, or not. Crashes come one upon the other, in both files.
func TestJournalOutlivesCrashes(t *testing.T) { // F52
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "journal")
		if err != nil {
			t.Fatalf("%v", err)
		}
		defer os.RemoveAll(dir)
		layer := &platter.Lossy{}
		b := newAheadBedOn(t, dir, layer)
		term := uint64(1)
		for range rapid.IntRange(5, 60).Draw(t, "steps") {
			crash := rapid.IntRange(0, 2).Draw(t, "crash") == 0
			cut := crash && rapid.Bool().Draw(t, "cut")
			if cut { // some sync of this step does not happen, nor does any after it
				layer.FailSyncs(rapid.Int64Range(0, 2).Draw(t, "syncs"))
			}
			before := b.mark()
			err := b.step(t, &term)
			if err != nil && !errors.Is(err, platter.ErrPowerCut) {
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
				b.accept(t, before)
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

// aheadMark is what a log was before a step.
type aheadMark struct {
	want        map[uint64]raft.Log
	first, last uint64
}

func (b *aheadBed) mark() aheadMark { return aheadMark{maps.Clone(b.want), b.first, b.last} }

// step appends, compacts, or takes entries back. An error is that of the store.
func (b *aheadBed) step(t *rapid.T, term *uint64) error {
	switch step := rapid.IntRange(0, 9).Draw(t, "step"); {
	case step < 7 || b.first == 0:
		return b.tryAppend(*term, rapid.IntRange(1, 6).Draw(t, "n"), rapid.SampledFrom([]int{0, 10, 300, 900, 5000}).Draw(t, "size"))
	case step == 7:
		first, err := b.store.FirstIndex() // raft begins where the store does
		if err != nil {
			return err
		}
		return b.tryRemove(first, rapid.Uint64Range(b.first, b.last).Draw(t, "to"), true)
	default: // a new leader knows better
		*term++
		return b.tryRemove(rapid.Uint64Range(b.first, b.last).Draw(t, "from"), b.last, false)
	}
}

// accept takes what a step that was cut short has left: all of it, nothing, or
// of an append the beginning. Anything else is for differs to find.
func (b *aheadBed) accept(t *rapid.T, before aheadMark) {
	last, err := b.store.LastIndex()
	if err != nil {
		t.Fatalf("%v", err)
	}
	after := b.mark()
	if last == 0 && before.first == 0 {
		last = before.last // it was empty
	}
	switch {
	case after.last > before.last && last >= before.last && last <= after.last: // an append
		for i := last + 1; i <= after.last; i++ {
			delete(b.want, i)
		}
		if b.last = last; b.first > b.last {
			b.first = 0
		}
	case last == after.last:
	case last == before.last:
		b.want, b.first, b.last = before.want, before.first, before.last
		if after.first != 0 { // of a compaction something may have gone
			b.first = max(b.first, after.first)
		}
	}
}

// A flipped byte anywhere in the two files, and a file that was cut off
// anywhere, are reported, or hit nothing at all.
func TestJournalFindsDamage(t *testing.T) {
	b := newAheadBed(t, t.TempDir())
	for i := range 14 {
		b.append(t, 1, 2, 20+37*i)
	}
	b.remove(t, b.last-1, b.last, false)
	b.append(t, 2, 1, 30)
	if err := b.store.await(); err != nil {
		t.Fatal(err)
	}
	b.store.Close()
	reported := 0
	good := b.read(t)
	try := func(what string, file int, content []byte) {
		t.Helper()
		files := platter.Memory{b.path + ".0": bytes.Clone(good[0]), b.path + ".1": bytes.Clone(good[1])}
		files[fmt.Sprintf("%s.%d", b.path, file)] = content
		copied := *b
		copied.layer, copied.inner = files, b.inner.clone()
		switch err := copied.open(); {
		case errors.Is(err, ErrCorruptLog):
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
	if want := 4 * smallJournal; reported != want { // every sector checks itself
		t.Errorf("%d of %d damages reported", reported, want)
	}
}

// read is what both files hold.
func (b *aheadBed) read(t fataler) (out [2][]byte) {
	for i := range out {
		var err error
		if out[i], err = os.ReadFile(fmt.Sprintf("%s.%d", b.path, i)); err != nil {
			t.Fatalf("%v", err)
		}
	}
	return out
}

// A log that has lost its end, behind the back of the journal that knows better,
// is not taken for the whole.
func TestJournalMissesEntries(t *testing.T) {
	b := newAheadBed(t, t.TempDir())
	for range 40 {
		b.append(t, 1, 3, 100)
	}
	if err := b.store.settleAll(); err != nil {
		t.Fatal(err)
	}
	b.store.Close()
	for _, kept := range []uint64{0, 1, b.last / 2} {
		copied := *b
		copied.inner = b.inner.clone()
		if err := copied.open(); err != nil { // empties the journal
			t.Fatal(err)
		}
		copied.store.Close()
		if err := copied.inner.DeleteRange(kept+1, b.last); err != nil {
			t.Fatal(err)
		}
		if err := copied.open(); !errors.Is(err, ErrCorruptLog) {
			t.Errorf("with entries 1 to %d of %d: %v", kept, b.last, err)
		}
	}
}

// A record of a fresh journal that names no file is refused, and so is one file without the other.
func TestJournalMissesFile(t *testing.T) {
	for file := range 2 {
		b := newAheadBed(t, t.TempDir())
		b.append(t, 1, 3, 10)
		b.store.Close()
		if err := os.Remove(fmt.Sprintf("%s.%d", b.path, file)); err != nil {
			t.Fatal(err)
		}
		if err := b.open(); !errors.Is(err, ErrCorruptLog) {
			t.Errorf("without file %d: %v", file, err)
		}
	}
}

// A write or a sync that fails acknowledges nothing, nor does any later one.
func TestJournalFailsForGood(t *testing.T) {
	for _, op := range []string{"write", "sync"} {
		layer := &platter.Lossy{}
		b := newAheadBedOn(t, t.TempDir(), layer)
		b.append(t, 1, 1, 10)
		layer.Fail(func(o, name string) error {
			if o == op && filepath.Dir(name) == filepath.Dir(b.path) {
				return platter.ErrPowerCut
			}
			return nil
		})
		if err := b.tryAppend(1, 1, 10); !errors.Is(err, platter.ErrPowerCut) {
			t.Errorf("failed %s: %v", op, err)
		}
		layer.Fail(nil)
		if err := b.tryAppend(1, 1, 10); !errors.Is(err, platter.ErrPowerCut) {
			t.Errorf("append after a failed %s: %v", op, err)
		}
		b.store.Close()
	}
}
