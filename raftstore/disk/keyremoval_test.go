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

// dataKeys returns the numbers of the data keys in the file.
func (b *diskEnv) dataKeys(t *testing.T) []uint32 {
	t.Helper()
	content, err := os.ReadFile(b.disk.sealer.path)
	if err != nil {
		t.Fatal(err)
	}
	keys, _, err := parseDataKeys(content)
	if err != nil {
		t.Fatal(err)
	}
	return slices.Sorted(maps.Keys(keys))
}

// keysBefore returns the data keys before since that entries and snapshots are encrypted under.
func (b *diskEnv) keysBefore(t *testing.T, since uint32) (used []uint32) {
	t.Helper()
	all := make(map[uint32]struct{})
	if err := b.disk.Snapshots.collectKeys(all); err != nil {
		t.Fatal(err)
	}
	log, err := b.disk.Log.verifyEntries(b.index)
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

// setFirst sets the expected first index of the log.
func (b *diskEnv) setFirst(t *testing.T, at uint64) {
	t.Helper()
	maps.DeleteFunc(b.logs, func(i uint64, _ raft.Log) bool { return i < at })
	b.first = at
}

// TestNothingIsLeftUnderFormerDataKeys: after a rotation no data under an old data key and no old
// data key exists. Newer data stays, also after a restart. F51
func TestNothingIsLeftUnderFormerDataKeys(t *testing.T) {
	for _, kind := range logKinds {
		t.Run(string(kind), func(t *testing.T) {
			b := newDiskEnv(t, t.TempDir(), kind, newTestKeyring("old"))
			b.appendEntries(t, 1, 30, 100)
			b.takeSnapshot(t, 10, 1, secret)
			b.reopen(t) // two old data keys
			b.appendEntries(t, 1, 30, 100)
			b.takeSnapshot(t, 40, 1, secret)
			if err := b.disk.ReloadKeys(newTestKeyring("new", "old")); err != nil {
				t.Fatal(err)
			}
			since := b.disk.CurrentDataKey()
			through := b.last
			b.appendEntries(t, 1, 20, 100)
			if got := b.keysBefore(t, since); len(got) == 0 {
				t.Fatal("nothing is sealed under a key of before, so this shows nothing")
			}
			b.takeSnapshot(t, through+5, 1, secret)
			if err := b.disk.RemoveSealedBefore(since); err != nil {
				t.Fatal(err)
			}
			b.setFirst(t, through+1)
			if got := b.dataKeys(t); !slices.Equal(got, []uint32{since}) {
				t.Errorf("data keys %v are kept, want %d alone", got, since)
			}
			if first, err := b.disk.Log.FirstIndex(); first != through+1 || err != nil {
				t.Errorf("the log begins with entry %d, %v, want %d: all since is of use to followers", first,
					err, through+1)
			}
			if err := b.disk.RemoveSealedBefore(since); err != nil {
				t.Errorf("once more: %v", err)
			}
			b.requireSame(t)
			b.appendEntries(t, 1, 5, 100)
			b.close(t)
			b.cfg.Keys = newTestKeyring("new")
			if err := b.open(); err != nil {
				t.Fatal(err)
			}
			b.requireSame(t)
			if got := b.keysBefore(t, since); len(got) > 0 {
				t.Errorf("after a start something is sealed under data keys %v", got)
			}
			b.close(t)
		})
	}
}

// TestNothingIsLeftInClear: data that is not encrypted counts as older, even if it is the whole
// log.
func TestNothingIsLeftInClear(t *testing.T) {
	for _, kind := range logKinds {
		t.Run(string(kind), func(t *testing.T) {
			b := newDiskEnv(t, t.TempDir(), kind, nil)
			b.appendSecret(t)
			b.takeSnapshot(t, 1, 1, secret)
			b.appendSecret(t)
			b.close(t)
			b.cfg.Keys = newTestKeyring("k1")
			if err := b.open(); err != nil {
				t.Fatal(err)
			}
			b.takeSnapshot(t, b.last, 1, secret)
			if err := b.disk.RemoveSealedBefore(b.disk.CurrentDataKey()); err != nil {
				t.Fatal(err)
			}
			b.setFirst(t, 0)
			list, err := b.disk.Snapshots.readHeaders()
			if err != nil || len(list) != 1 || list[0].Key == 0 {
				t.Errorf("snapshots %+v, %v, want one that is sealed", list, err)
			}
			if has, err := b.disk.Log.FirstIndex(); has != 0 && has <= b.last || err != nil {
				t.Errorf("the log begins with entry %d, %v", has, err)
			}
			b.appendEntries(t, 1, 3, 100)
			b.reopen(t)
			b.requireSame(t)
			b.close(t)
		})
	}
}

// TestFormerDataKeysInUse: an old data key that is still needed stays, and the error has the
// reason. It is removed as soon as possible.
func TestFormerDataKeysInUse(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, newTestKeyring("k1"))
	b.appendEntries(t, 1, 10, 100)
	refused := func(why string, since uint32) {
		t.Helper()
		keys := b.dataKeys(t)
		if err := b.disk.RemoveSealedBefore(since); !errors.Is(err, errKeyInUse) {
			t.Errorf("%s: %v", why, err)
		}
		if got := b.dataKeys(t); !slices.Equal(got, keys) {
			t.Errorf("%s: data keys %v, want %v", why, got, keys)
		}
		b.requireSame(t)
	}
	late, err := b.disk.Snapshots.Create(1, 9, 1, raft.Configuration{}, 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.disk.ReloadKeys(newTestKeyring("k2", "k1")); err != nil {
		t.Fatal(err)
	}
	since := b.disk.CurrentDataKey()
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
	b.takeSnapshot(t, 9, 2, secret)
	refused("an entry of before is in no snapshot", since)

	b.appendEntries(t, 2, 1, 100)
	b.takeSnapshot(t, b.last, 2, secret)
	if err := b.disk.RemoveSealedBefore(since); err != nil {
		t.Fatal(err)
	}
	b.setFirst(t, b.last)
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
