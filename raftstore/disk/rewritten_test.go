package disk

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/hashicorp/raft"
)

// dataKeys are the numbers of the data keys in the file, as the next opening reads it.
func (b *diskBed) dataKeys(t *testing.T) []uint32 {
	t.Helper()
	content, err := os.ReadFile(b.disk.seals.path)
	if err != nil {
		t.Fatal(err)
	}
	keys, _, err := parseWrapped(content)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(keys))
}

// olderThan are the data keys before since that entries and snapshots are sealed under.
func (b *diskBed) olderThan(t *testing.T, since uint32) (used []uint32) {
	t.Helper()
	all := make(map[uint32]struct{})
	if err := b.disk.Snapshots.keys(all); err != nil {
		t.Fatal(err)
	}
	log, err := b.disk.Log.verify(b.index)
	if err != nil {
		t.Fatal(err)
	}
	maps.Copy(all, log)
	for n := range all {
		if n < since {
			used = append(used, n)
		}
	}
	return used
}

// began says that the log begins here, or is empty.
func (b *diskBed) began(t *testing.T, at uint64) {
	t.Helper()
	maps.DeleteFunc(b.logs, func(i uint64, _ raft.Log) bool { return i < at })
	b.first = at
}

// After an exchange nothing is left that a former data key opens, and no such key; what
// came since stays, and is there after the next start. F51
func TestNothingIsLeftUnderFormerDataKeys(t *testing.T) {
	for _, kind := range logKinds {
		t.Run(string(kind), func(t *testing.T) {
			b := newDiskBed(t, t.TempDir(), kind, testRing("old"))
			b.append(t, 1, 30, 100)
			b.snap(t, 10, 1, secret)
			b.reopen(t) // two data keys of before
			b.append(t, 1, 30, 100)
			b.snap(t, 40, 1, secret)
			if err := b.disk.ReloadKeys(testRing("new", "old")); err != nil {
				t.Fatal(err)
			}
			since := b.disk.Sealing()
			through := b.last
			b.append(t, 1, 20, 100)
			if got := b.olderThan(t, since); len(got) == 0 {
				t.Fatal("nothing is sealed under a key of before, so this shows nothing")
			}
			b.snap(t, through+5, 1, secret)
			if err := b.disk.RemoveBefore(since); err != nil {
				t.Fatal(err)
			}
			b.began(t, through+1)
			if got := b.dataKeys(t); !slices.Equal(got, []uint32{since}) {
				t.Errorf("data keys %v are kept, want %d alone", got, since)
			}
			if first, err := b.disk.Log.FirstIndex(); first != through+1 || err != nil {
				t.Errorf("the log begins with entry %d, %v, want %d: all since is of use to followers", first, err, through+1)
			}
			if err := b.disk.RemoveBefore(since); err != nil {
				t.Errorf("once more: %v", err)
			}
			b.same(t)
			b.append(t, 1, 5, 100)
			b.close(t)
			b.cfg.Keys = testRing("new")
			if err := b.open(); err != nil {
				t.Fatal(err)
			}
			b.same(t)
			if got := b.olderThan(t, since); len(got) > 0 {
				t.Errorf("after a start something is sealed under data keys %v", got)
			}
			b.close(t)
		})
	}
}

// All of the log may be older, and what was in clear is.
func TestNothingIsLeftInClear(t *testing.T) {
	for _, kind := range logKinds {
		t.Run(string(kind), func(t *testing.T) {
			b := newDiskBed(t, t.TempDir(), kind, nil)
			b.tell(t)
			b.snap(t, 1, 1, secret)
			b.tell(t)
			b.close(t)
			b.cfg.Keys = testRing("k1")
			if err := b.open(); err != nil {
				t.Fatal(err)
			}
			b.snap(t, b.last, 1, secret)
			if err := b.disk.RemoveBefore(b.disk.Sealing()); err != nil {
				t.Fatal(err)
			}
			b.began(t, 0)
			list, err := b.disk.Snapshots.list()
			if err != nil || len(list) != 1 || list[0].Key == 0 {
				t.Errorf("snapshots %+v, %v, want one that is sealed", list, err)
			}
			if has, err := b.disk.Log.FirstIndex(); has != 0 && has <= b.last || err != nil {
				t.Errorf("the log begins with entry %d, %v", has, err)
			}
			b.append(t, 1, 3, 100)
			b.reopen(t)
			b.same(t)
			b.close(t)
		})
	}
}

// What still needs a former data key keeps it: the reason is told, and it goes when it can.
func TestFormerDataKeysInUse(t *testing.T) {
	b := newDiskBed(t, t.TempDir(), LogBolt, testRing("k1"))
	b.append(t, 1, 10, 100)
	refused := func(why string, since uint32) {
		t.Helper()
		keys := b.dataKeys(t)
		if err := b.disk.RemoveBefore(since); !errors.Is(err, errSealedBefore) {
			t.Errorf("%s: %v", why, err)
		}
		if got := b.dataKeys(t); !slices.Equal(got, keys) {
			t.Errorf("%s: data keys %v, want %v", why, got, keys)
		}
		b.same(t)
	}
	late, err := b.disk.Snapshots.Create(1, 9, 1, raft.Configuration{}, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.disk.ReloadKeys(testRing("k2", "k1")); err != nil {
		t.Fatal(err)
	}
	since := b.disk.Sealing()
	refused("a snapshot is being written", since)
	if _, err := late.Write(secret); err != nil {
		t.Fatal(err)
	}
	if err := late.Close(); err != nil {
		t.Fatal(err)
	}
	b.snapshot, b.index = secret, 9
	_, read, err := b.disk.Snapshots.Open(late.ID())
	if err != nil {
		t.Fatal(err)
	}
	refused("the newest snapshot is of before", since)
	b.snap(t, 9, 2, secret)
	refused("an entry of before is in no snapshot", since)

	b.append(t, 2, 1, 100)
	b.snap(t, b.last, 2, secret)
	if err := b.disk.RemoveBefore(since); err != nil {
		t.Fatal(err)
	}
	b.began(t, b.last)
	if got, err := io.ReadAll(read); err != nil || !bytes.Equal(got, secret) {
		t.Errorf("who was reading the old snapshot: %d bytes, %v", len(got), err)
	}
	if err := read.Close(); err != nil {
		t.Error(err)
	}
	if got := b.dataKeys(t); !slices.Equal(got, []uint32{since}) {
		t.Errorf("data keys %v, want %d alone", got, since)
	}
	b.close(t)
}
