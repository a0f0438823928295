//go:build linux

package safepath

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// makeNestedDirs creates nested directories with a file and a link to outside in each.
func makeNestedDirs(t *testing.T, dir string, depth int, outside string) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for i := 0; i < depth && err == nil; i++ {
		err = errors.Join(unix.Mkdirat(at, "d", 0o700), unix.Symlinkat(outside, at, "link"),
			unix.Mknodat(at, "file", unix.S_IFREG|0o600, 0))
		next := -1
		if err == nil {
			next, err = unix.Openat(at, "d", unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		}
		unix.Close(at)
		at = next
	}
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(at)
}

// Directories that are nested deeper than the descriptor limit are removed, and nothing outside of
// them.
func TestRemoveAllOfDeepFolders(t *testing.T) {
	outside := t.TempDir()
	if err := os.WriteFile(outside+"/kept", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "dir")
	for i := range 3 {
		sub := filepath.Join(dir, strconv.Itoa(i))
		if err := os.MkdirAll(sub, 0o700); err != nil {
			t.Fatal(err)
		}
		makeNestedDirs(t, sub, 500, outside)
	}
	for i := range 2000 { // more names than one read returns
		if err := os.WriteFile(filepath.Join(dir, "file"+strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(dir+"/.deep-1", 0o700); err != nil { // a name that RemoveAll would use
		t.Fatal(err)
	}
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	few := unix.Rlimit{Cur: 256, Max: before.Max}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Error(err)
		}
	}()
	if err := os.RemoveAll(dir + "/2"); !errors.Is(err, unix.EMFILE) {
		t.Errorf("this test shows nothing: os.RemoveAll returns %v", err)
	}
	if err := RemoveAll(dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the directory still exists: %v", err)
	}
	if _, err := os.Lstat(outside + "/kept"); err != nil {
		t.Error(err)
	}
}

// Files, links and missing paths are accepted. An entry that cannot be removed is reported and all
// others are removed.
func TestRemoveAll(t *testing.T) {
	dir := t.TempDir()
	for _, err := range []error{os.WriteFile(dir+"/file", nil, 0o600), os.Symlink(dir, dir+"/link"),
		os.MkdirAll(dir+"/tree/mounted", 0o700),
		os.MkdirAll(dir+"/tree/other/deep", 0o000)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"/file", "/link", "/none", "/none/below", "/file/below"} {
		if err := RemoveAll(dir + name); err != nil {
			t.Error(name, err)
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("left: %v, %v", entries, err)
	}
	if os.Geteuid() != 0 {
		return
	}
	mounted := dir + "/tree/mounted"
	if err := unix.Mount("tmpfs", mounted, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	err := RemoveAll(dir + "/tree")
	if !errors.Is(err, unix.EBUSY) {
		t.Errorf("with a mounted file system: %v", err)
	}
	if err := unix.Unmount(mounted, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(dir + "/tree/other"); !errors.Is(err, fs.ErrNotExist) {
		t.Error("an entry that is not a mount point still exists")
	}
	if err := RemoveAll(dir + "/tree"); err != nil {
		t.Error(err)
	}
}

// A directory is emptied in steps of at most limit names at any depth, and stays.
func TestEmpty(t *testing.T) {
	dir := t.TempDir()
	const most = 7
	empty := func(names int) (steps int) {
		for left := true; left; steps++ {
			var err error
			if left, err = RemoveContents(dir, most); err != nil || steps > names {
				t.Fatalf("after %d steps: %v", steps, err)
			}
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
			t.Errorf("left: %v, %v", entries, err)
		}
		return steps
	}
	makeNestedDirs(t, dir, maxOpenDepth+20, "/nowhere")
	if steps, least := empty(3*(maxOpenDepth+20)), (maxOpenDepth+20)*2/most; steps < least {
		t.Errorf("it took %d steps, want at least %d", steps, least)
	}
	for i := range 4*most + 1 {
		if err := os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if steps := empty(4*most + 1); steps != 5 {
		t.Errorf("it took %d steps", steps)
	}
	if left, err := RemoveContents(filepath.Join(dir, "none"), 1); left || err != nil {
		t.Errorf("a missing directory: %v, %v", left, err)
	}
}
