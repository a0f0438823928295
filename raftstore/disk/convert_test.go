package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// A log converted to the other kind and back holds what it held, with votes and
// snapshots, sealed or not, and the old one is gone.
func TestConvert(t *testing.T) {
	forKinds(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := populated(t, kind, keys)
		for range 2 {
			to := logKinds[0]
			if b.cfg.LogStore == to {
				to = logKinds[1]
			}
			var told []uint64
			total := uint64(0)
			c := Config{Dir: b.cfg.Dir, NoSync: true, JournalBytes: b.cfg.JournalBytes, SegmentBytes: b.cfg.SegmentBytes} // no keys are needed
			if err := Convert(t.Context(), c, to, func(d, n uint64) { told, total = append(told, d), n }); err != nil {
				t.Fatal(err)
			}
			if len(told) < 2 || told[len(told)-1] != total || total == 0 {
				t.Errorf("progress %v of %d", told, total)
			}
			if err := Convert(t.Context(), c, to, nil); err != nil {
				t.Errorf("converting what is converted: %v", err)
			}
			if err := b.open(); !errors.Is(err, ErrLogStore) {
				t.Errorf("opened as before: %v", err)
			}
			b.cfg.LogStore = to
			if err := b.open(); err != nil {
				t.Fatal(err)
			}
			b.same(t)
			b.append(t, 2, 5, 100)
			b.reopen(t)
			b.same(t)
			b.close(t)
			for path := range dataFiles(t, b.cfg.Dir) {
				name := filepath.Base(path)
				if to == LogWAL && strings.HasPrefix(name, journalName) || to == LogBolt && filepath.Base(filepath.Dir(path)) == walName || strings.HasSuffix(name, platter.NewSuffix) {
					t.Errorf("left behind: %s", path)
				}
			}
		}
	})
}

// Wherever a conversion ends too soon, the replica starts with the old log, as
// it was, and can be converted again.
func TestConvertCutShort(t *testing.T) {
	for i, kind := range logKinds {
		b := populated(t, kind, nil)
		good := dataFiles(t, b.cfg.Dir)
		to := logKinds[1-i]
		kept := func(what string) {
			t.Helper()
			if err := b.open(); err != nil {
				t.Fatalf("%s, %s: %v", kind, what, err)
			}
			b.same(t)
			b.close(t)
			for path := range dataFiles(t, b.cfg.Dir) {
				if _, ok := good[path]; !ok {
					t.Errorf("%s, %s: left behind: %s", kind, what, path)
				}
			}
		}
		// Asked to stop.
		ctx, cancel := context.WithCancel(t.Context())
		if err := Convert(ctx, b.cfg, to, func(uint64, uint64) { cancel() }); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", kind, err)
		}
		kept("stopped")
		// Killed before the step that decides: all of the new log is there.
		after := b.cfg
		converted := after
		converted.Dir = filepath.Join(t.TempDir(), "copy")
		files := make(map[string][]byte)
		for path, content := range dataFiles(t, b.cfg.Dir) {
			files[strings.Replace(path, b.cfg.Dir, converted.Dir, 1)] = content
		}
		putFiles(t, converted.Dir, files)
		if err := Convert(t.Context(), converted, to, nil); err != nil {
			t.Fatal(err)
		}
		for path, content := range dataFiles(t, converted.Dir) {
			path = strings.Replace(path, converted.Dir, b.cfg.Dir, 1)
			switch _, old := good[path]; {
			case filepath.Base(path) == boltName:
				path += platter.NewSuffix
			case old:
				continue
			}
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		kept("killed before the last step")
		// Killed after it: pieces of the old log remain.
		if err := Convert(t.Context(), b.cfg, to, nil); err != nil {
			t.Fatal(err)
		}
		for path, content := range good {
			if there, _ := platter.Exists(path); there || filepath.Base(path) == boltName {
				continue
			}
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, content, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		b.cfg.LogStore = to
		if err := b.open(); err != nil {
			t.Fatalf("%s, killed after the last step: %v", kind, err)
		}
		b.same(t)
		b.close(t)
	}
}

// A damaged log is not converted, nor another replica's, nor one in use.
func TestConvertRefuses(t *testing.T) {
	b := populated(t, LogBolt, nil)
	other := b.cfg
	other.Name = "r9"
	if err := Convert(t.Context(), other, LogWAL, nil); !errors.Is(err, ErrForeignData) {
		t.Errorf("another replica's: %v", err)
	}
	if err := Convert(t.Context(), b.cfg, "sqlite", nil); err == nil || !strings.Contains(err.Error(), "sqlite") {
		t.Errorf("unknown kind: %v", err)
	}
	empty := b.cfg
	empty.Dir = t.TempDir()
	if err := Convert(t.Context(), empty, LogWAL, nil); !errors.Is(err, ErrNoData) {
		t.Errorf("no data: %v", err)
	}
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	if err := Convert(t.Context(), b.cfg, LogWAL, nil); !errors.Is(err, ErrInUse) {
		t.Errorf("in use: %v", err)
	}
	b.close(t)
	path := filepath.Join(b.cfg.Dir, journalName+".0")
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	content[100] ^= 1
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Convert(t.Context(), b.cfg, LogWAL, nil); !errors.Is(err, ErrCorruptLog) || !strings.Contains(err.Error(), path) {
		t.Errorf("damaged: %v", err)
	}
}
