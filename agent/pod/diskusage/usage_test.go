package diskusage

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent/pod/subpath"
)

func TestUsage(t *testing.T) {
	dir, turns := t.TempDir(), NewTurns()
	outside := t.TempDir()
	writeFile(t, 1<<20, outside, "big")
	size := func(enough int64) int64 {
		t.Helper()
		n, err := MeasureDirectory(context.Background(), turns, filepath.Join(dir, "here"), enough)
		if err != nil || len(turns) != 0 {
			t.Fatal(n, err, len(turns))
		}
		return n.Bytes
	}
	if n := size(1 << 30); n != 0 {
		t.Errorf("nothing has %d bytes", n)
	}
	writeFile(t, 64<<10, dir, "here", "a", "b", "file")
	base := size(1 << 30)
	if base < 64<<10 || base > 96<<10 {
		t.Errorf("64 KiB are %d", base)
	}
	here := filepath.Join(dir, "here")
	// Symlinks are not followed, hard links count once, holes have no size, and a FIFO does not
	// block.
	for _, err := range []error{os.Symlink(outside, here+"/link"), os.Symlink("/", here+"/a/root"),
		os.Link(here+"/a/b/file", here+"/again"),
		mkfifo(here + "/fifo"), os.WriteFile(here+"/sparse", nil, 0o600), os.Truncate(here+"/sparse", 1<<40)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := size(1 << 30); n < base || n > base+16<<10 {
		t.Errorf("with links: %d, without: %d", n, base)
	}
	for i := range 3 * chunkEntries {
		writeFile(t, 1, here, "many", string(rune('a'+i%26)), "f"+string(rune('a'+i/26%26))+string(rune('a'+i/676)))
	}
	all := size(1 << 30)
	if all < base+3*chunkEntries*512 {
		t.Errorf("many small files are %d", all)
	}
	if n := size(base); n <= base || n >= all {
		t.Errorf("a walk that has found enough goes on: %d of %d", n, all)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	turns <- struct{}{}
	if _, err := MeasureDirectory(ctx, turns, here, 1<<30); err == nil {
		t.Error("a walk does not end with its context")
	}
}

// Mounts below a pod's directory, such as subPaths, do not count, even on the same file system.
func TestUsageLeavesMountsOut(t *testing.T) {
	needRoot(t)
	dir, volume := t.TempDir(), t.TempDir()
	writeFile(t, 4<<20, volume, "sub", "big")
	writeFile(t, 4096, dir, "own")
	for sub, target := range map[string]string{"sub": dir + "/subpaths/app/0", "sub/big": dir + "/subpaths/app/1"} {
		if _, err := (&subpath.BindMounter{}).Bind(t.Context(), target, volume, sub); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := (&subpath.BindMounter{}).Release(dir); err != nil {
			t.Error(err)
		}
	})
	if n, err := MeasureDirectory(t.Context(), NewTurns(), dir, 1<<40); err != nil || n.Bytes > 1<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if n, err := MeasureDirectory(t.Context(), NewTurns(), volume, 1<<40); err != nil || n.Bytes < 4<<20 {
		t.Errorf("of the volume itself: %d bytes, %v", n, err)
	}
}

// Files and directories count one inode each; a file with several names counts once. F95
func TestUsageCountsInodes(t *testing.T) {
	dir := t.TempDir()
	writeFile(t, 1, dir, "a")
	writeFile(t, 0, dir, "sub", "b")
	writeFile(t, 1, dir, "sub", "c")
	if err := os.Link(filepath.Join(dir, "sub", "c"), filepath.Join(dir, "again")); err != nil {
		t.Fatal(err)
	}
	if n, err := MeasureDirectory(t.Context(), NewTurns(), dir, 1<<40); err != nil || n.MilliInodes != 5000 {
		t.Errorf("%d thousandths, %v", n.MilliInodes, err)
	}
}

// Excessively nested directories are skipped, and those beside them are counted. A walk's memory is
// bounded whatever the number of directories.
func TestUsageOfDeepFolders(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for at, i := root, 0; i < 3*MaxDepth; i++ {
		if err := at.Mkdir("d", 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := at.OpenRoot("d")
		if err != nil {
			t.Fatal(err)
		}
		defer next.Close()
		at = next
	}
	writeFile(t, 2<<20, dir, "z", "big")
	if n, err := MeasureDirectory(t.Context(), NewTurns(), dir, 1<<40); !errors.Is(err, ErrTooDeep) || n.Bytes < 2<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

func mkfifo(path string) error { return unix.Mkfifo(path, 0o600) }

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts are real")
	}
}
func writeFile(t *testing.T, size int, path ...string) {
	t.Helper()
	file := filepath.Join(path...)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(strings.Repeat("x", size)), 0o600); err != nil {
		t.Fatal(err)
	}
}
