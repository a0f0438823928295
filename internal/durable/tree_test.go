package durable

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMakeDir(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "a", "b", "c")
	for range 2 {
		if err := MakeDir(path); err != nil {
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
	if err := MakeDir(filepath.Join(file, "x")); err == nil {
		t.Error("a directory was made inside of a file")
	}
}

func TestRename(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	for path, content := range map[string]string{from: "new", to: "old"} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := Rename(from, to); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(to); string(got) != "new" || err != nil {
		t.Errorf("content %q, error %v", got, err)
	}
	for path, want := range map[string]bool{from: false, to: true} {
		if exists, err := Exists(path); exists != want || err != nil {
			t.Errorf("%s exists: %v, error %v", path, exists, err)
		}
	}
	if err := Rename(from, to); !os.IsNotExist(err) {
		t.Errorf("a missing file: %v", err)
	}
}

func TestReadAllAndFill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := OS{}.Open(path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := Fill(f, 0, zeroChunk+10); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("x"), zeroChunk); err != nil {
		t.Fatal(err)
	}
	content, err := ReadAll(f)
	if err != nil || len(content) != zeroChunk+10 || content[zeroChunk] != 'x' || content[0] != 0 {
		t.Errorf("%d bytes, error %v", len(content), err)
	}
}
