package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"keelson.dev/keelson/internal/durable"
)

// TestConvert: a log that is converted to the other kind and back has the same content, with votes
// and snapshots, encrypted or not. The old log is removed.
func TestConvert(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newPopulatedEnv(t, kind, keys)
		for range 2 {
			to := logKinds[0]
			if b.cfg.LogStore == to {
				to = logKinds[1]
			}
			var told []uint64
			total := uint64(0)
			// no keys are required
			c := Config{Dir: b.cfg.Dir, NoSync: true, JournalBytes: b.cfg.JournalBytes,
				SegmentBytes: b.cfg.SegmentBytes}
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
			b.requireSame(t)
			b.appendEntries(t, 2, 5, 100)
			b.reopen(t)
			b.requireSame(t)
			b.close(t)
			for path := range dataFiles(t, b.cfg.Dir) {
				name := filepath.Base(path)
				if to == LogWAL && strings.HasPrefix(name, journalName) ||
					to == LogBolt && filepath.Base(filepath.Dir(path)) == walName ||
					strings.HasSuffix(name, durable.TempSuffix) {
					t.Errorf("left behind: %s", path)
				}
			}
		}
	})
}

// TestConvertCutShort: after a conversion that was interrupted at any moment, the replica starts
// with the unchanged old log, and can be converted again.
func TestConvertCutShort(t *testing.T) {
	for i, kind := range logKinds {
		b := newPopulatedEnv(t, kind, nil)
		good := dataFiles(t, b.cfg.Dir)
		to := logKinds[1-i]
		kept := func(what string) {
			t.Helper()
			if err := b.open(); err != nil {
				t.Fatalf("%s, %s: %v", kind, what, err)
			}
			b.requireSame(t)
			b.close(t)
			for path := range dataFiles(t, b.cfg.Dir) {
				if _, ok := good[path]; !ok {
					t.Errorf("%s, %s: left behind: %s", kind, what, path)
				}
			}
		}
		// The context is canceled.
		ctx, cancel := context.WithCancel(t.Context())
		if err := Convert(ctx, b.cfg, to, func(uint64, uint64) { cancel() }); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", kind, err)
		}
		kept("stopped")
		// The process is killed before the deciding rename: the new log is complete.
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
				path += durable.TempSuffix
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
		// The process is killed after the rename: files of the old log remain.
		if err := Convert(t.Context(), b.cfg, to, nil); err != nil {
			t.Fatal(err)
		}
		for path, content := range good {
			if there, _ := durable.Exists(path); there || filepath.Base(path) == boltName {
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
		b.requireSame(t)
		b.close(t)
	}
}

// TestConvertRefuses: a damaged log, a log of another replica, and a log in use are not converted.
func TestConvertRefuses(t *testing.T) {
	b := newPopulatedEnv(t, LogBolt, nil)
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
	if err := Convert(t.Context(), b.cfg, LogWAL, nil); !errors.Is(err, ErrCorruptLog) ||
		!strings.Contains(err.Error(), path) {
		t.Errorf("damaged: %v", err)
	}
}
