package platter

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestMakeFolder(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "a", "b", "c")
	for range 2 {
		if err := MakeFolder(path); err != nil {
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
	if err := MakeFolder(filepath.Join(file, "x")); err == nil {
		t.Error("a folder was made inside of a file")
	}
}

// Settling changes nothing that is there, and leaves out what others make or remove meanwhile.
func TestSettleData(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data")
	if err := Settle(dir, func(path string) bool { return strings.HasSuffix(path, NewSuffix) }); err != nil {
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
	if err := Settle(dir, func(path string) bool { return strings.HasSuffix(path, NewSuffix) }); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "wal/1.wal")); string(b) != "wal/1.wal" || err != nil {
		t.Errorf("read %q, error %v", b, err)
	}
}
