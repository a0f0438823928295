package replica

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/hashicorp/raft"
)

// A founding that a crash cut short after raft's first term and before the
// configuration is done again; nothing else is taken for one. F52
func TestFoundingCutShort(t *testing.T) {
	for _, c := range []struct {
		name  string
		done  func(*disk) error
		again bool
	}{
		{"term only", func(*disk) error { return nil }, true},
		{"has voted", func(d *disk) error { return d.stable.SetUint64([]byte(keyVoteTerm), 1) }, false},
		{"later term", func(d *disk) error { return d.stable.SetUint64(keyTerm, 2) }, false},
		{"has a log", func(d *disk) error {
			return d.logs.StoreLog(&raft.Log{Index: 1, Term: 1, Type: raft.LogConfiguration})
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, err := openDisk(DiskConfig{Name: "r1", Dir: t.TempDir(), NoSync: true}.withDefaults(), func(err error) { t.Error(err) })
			if err != nil {
				t.Fatal(err)
			}
			defer d.close.Close()
			if err := d.stable.SetUint64(keyTerm, 1); err != nil {
				t.Fatal(err)
			}
			if err := c.done(d); err != nil {
				t.Fatal(err)
			}
			if err := d.startOver(); err != nil {
				t.Fatal(err)
			}
			if empty, err := d.empty(); err != nil || empty != c.again {
				t.Errorf("can be founded: %v, error %v; want %v", empty, err, c.again)
			}
		})
	}
}

func TestMakeFolder(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "a", "b", "c")
	for range 2 {
		if err := makeFolder(path); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := os.Stat(path); err != nil || !info.IsDir() || info.Mode().Perm() != 0o700 {
		t.Errorf("made %v, error %v", info, err)
	}
	file := filepath.Join(root, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := makeFolder(filepath.Join(file, "x")); err == nil {
		t.Error("a folder was made inside of a file")
	}
}

// Settling changes nothing that is there, and leaves out what others make or remove meanwhile.
func TestSettleData(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if err := settleFolder(dir, neverInPart); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"raft.db", "snapshots/1.snap", "wal/1.wal", "half.new"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(name), 0o400); err != nil {
			t.Fatal(err)
		}
	}
	if err := settleFolder(dir, neverInPart); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "wal/1.wal")); string(b) != "wal/1.wal" || err != nil {
		t.Errorf("read %q, error %v", b, err)
	}
}
