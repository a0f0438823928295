package disk

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"keelson.dev/keelson/internal/durable"
)

func TestInspect(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newPopulatedEnv(t, kind, keys)
		info, err := Inspect(Config{Dir: b.cfg.Dir, Keys: keys, NoSync: true, JournalBytes: b.cfg.JournalBytes,
			SegmentBytes: b.cfg.SegmentBytes})
		// The snapshots of this environment do not contain a store's state.
		if !errors.Is(err, ErrCorruptSnapshot) {
			t.Errorf("error %v", err)
		}
		if info.Owner != "r1" || info.LogStore != kind || info.Last != b.last || info.First == 0 ||
			info.First > b.first || info.Term != 4 {
			t.Errorf("%+v", info)
		}
		if len(info.Snapshots) != 2 || info.Snapshots[0].Index != 50 ||
			info.Snapshots[0].Bytes != int64(len(b.snapshot)) || info.Snapshots[0].Sealed != (keys != nil) {
			t.Errorf("snapshots %+v", info.Snapshots)
		}
		if (len(info.Sealed) == 1 && info.Sealed[0] == "k1") != (keys != nil) || info.Bytes == 0 {
			t.Errorf("needs keys %v, %d bytes", info.Sealed, info.Bytes)
		}
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.requireSame(t)
		if _, err := Inspect(b.cfg); !errors.Is(err, ErrInUse) {
			t.Errorf("in use: %v", err)
		}
		b.close(t)
	})
	if _, err := Inspect(Config{Dir: t.TempDir()}); !errors.Is(err, ErrNoData) {
		t.Errorf("empty directory: %v", err)
	}
}

// TestSetAside: SetAside moves the whole data of the replica and no other file, and the replica can
// start with a new directory.
func TestSetAside(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newPopulatedEnv(t, kind, keys)
		mine := filepath.Join(b.cfg.Dir, "README")
		if err := os.WriteFile(mine, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		if _, err := SetAside(b.cfg); !errors.Is(err, ErrInUse) {
			t.Errorf("in use: %v", err)
		}
		b.close(t)
		moved, err := SetAside(b.cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := SetAside(b.cfg); !errors.Is(err, ErrNoData) {
			t.Errorf("nothing there: %v", err)
		}
		if there, _ := durable.Exists(mine); !there {
			t.Error("a file of somebody else was moved")
		}
		home := b.cfg.Dir
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		if empty, err := b.disk.IsEmpty(); !empty || err != nil {
			t.Errorf("empty %v, error %v", empty, err)
		}
		b.close(t)
		b.cfg.Dir = moved
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.requireSame(t)
		b.close(t)

		// After an interruption behind the first step, the replica does not start, and SetAside can
		// be repeated.
		b.cfg.Dir = moved
		if err := os.Rename(filepath.Join(moved, boltName), filepath.Join(home, "elsewhere")); err != nil {
			t.Fatal(err)
		}
		if err := b.open(); !errors.Is(err, ErrCorruptVotes) {
			t.Errorf("without %s: %v", boltName, err)
		}
		if _, err := SetAside(b.cfg); err != nil {
			t.Errorf("going on: %v", err)
		}
	})
}
