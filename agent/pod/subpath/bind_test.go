package subpath

import (
	"os"
	"path/filepath"
	"testing"

	"keelson.dev/keelson/csi/privatemounts"
)

// A subPath is mounted only from inside its volume, and a bind mount does not change afterwards.
func TestSubPaths(t *testing.T) {
	privatemounts.SkipUnlessPrivate(t)
	dir := t.TempDir()
	vol, target := filepath.Join(dir, "vol"), filepath.Join(dir, "target")
	write := func(path, text string) {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(dir, "secret"), "outside")
	write(filepath.Join(vol, "..v1/key"), "inside")
	for link, to := range map[string]string{"..data": "..v1", "key": "..data/key", "evil": "../secret",
		"absolute": filepath.Join(dir, "secret")} {
		if err := os.Symlink(to, filepath.Join(vol, link)); err != nil {
			t.Fatal(err)
		}
	}
	var b BindMounter
	defer func() {
		if err := b.Release(dir); err != nil {
			t.Error(err)
		}
	}()
	for range 2 {
		src, err := b.Bind(t.Context(), filepath.Join(target, "0"), vol, "key")
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(src); err != nil || string(got) != "inside" {
			t.Errorf("key: %q, %v", got, err)
		}
	}
	for _, sub := range []string{"evil", "absolute", "../secret", "/etc"} {
		if src, err := b.Bind(t.Context(), filepath.Join(target, "1"), vol, sub); err == nil {
			t.Errorf("subPath %q was bound to %s", sub, src)
		}
	}
	src, err := b.Bind(t.Context(), filepath.Join(target, "2"), vol, "made/on/demand")
	if err != nil {
		t.Fatal(err)
	}
	write(filepath.Join(vol, "made/on/demand/f"), "x")
	// The pod replaces the directory with a symlink to the outside: the mount does not follow it.
	if err := os.Rename(filepath.Join(vol, "made"), filepath.Join(vol, "moved")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dir, filepath.Join(vol, "made")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(src, "f")); err != nil {
		t.Errorf("the bound folder changed: %v", err)
	}
	for range 2 {
		if err := b.Release(target); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := MountPointsBelow(target); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
