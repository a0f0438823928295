//go:build linux

package within

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestReadRoot(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	for _, err := range []error{
		os.MkdirAll(dir+"/etc", 0o755), os.MkdirAll(dir+"/run", 0o755),
		os.WriteFile(dir+"/run/passwd", []byte("inside"), 0o600),
		os.WriteFile(outside+"/passwd", []byte("outside"), 0o600),
		os.Symlink("/run/passwd", dir+"/etc/absolute"),
		os.Symlink("../../../../run/passwd", dir+"/etc/above"),
		os.Symlink(outside+"/passwd", dir+"/etc/out"),
		os.Symlink("loop", dir+"/etc/loop"),
		os.Symlink("/etc", dir+"/linked"),
		unix.Mkfifo(dir+"/etc/fifo", 0o600),
		os.Symlink("fifo", dir+"/etc/to-fifo"),
		os.Symlink("/proc/self/fd/0", dir+"/etc/magic"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]error{
		"run/passwd": nil, "/run/passwd": nil, "etc/absolute": nil, "etc/above": nil, "linked/absolute": nil, "../run/passwd": nil,
		"etc/out": fs.ErrNotExist, "etc/none": fs.ErrNotExist, "etc/magic": fs.ErrNotExist, "etc/loop": unix.ELOOP,
		"etc/fifo": ErrNotRegular, "etc/to-fifo": ErrNotRegular, "etc": ErrNotRegular,
	} {
		f, err := ReadRoot(dir, name)
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		if err != nil {
			continue
		}
		if b, err := io.ReadAll(f); err != nil || string(b) != "inside" {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		f.Close()
	}
}

func TestBeneath(t *testing.T) {
	dir := t.TempDir()
	for _, err := range []error{os.Mkdir(dir+"/sub", 0o755), os.Symlink("/etc", dir+"/absolute"), os.Symlink("../..", dir+"/sub/up"),
		os.Symlink("sub", dir+"/link"), unix.Mkfifo(dir+"/fifo", 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, ok := range map[string]bool{"sub": true, "link": true, "fifo": true, "absolute": false, "sub/up": false, "..": false} {
		f, err := Beneath(dir, name)
		if ok != (err == nil) || !ok && !errors.Is(err, unix.EXDEV) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			// What was found stays the same thing when the name is given to another.
			if err := os.Rename(filepath.Join(dir, name), filepath.Join(dir, "moved")); err == nil {
				if _, err := os.Stat(Path(f)); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				if err := os.Rename(filepath.Join(dir, "moved"), filepath.Join(dir, name)); err != nil {
					t.Fatal(err)
				}
			}
			f.Close()
		}
	}
}

func TestRegular(t *testing.T) {
	dir := t.TempDir()
	for _, err := range []error{os.WriteFile(dir+"/file", []byte("text"), 0o600), os.Symlink("file", dir+"/link"), unix.Mkfifo(dir+"/fifo", 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]error{"file": nil, "link": ErrNotRegular, "fifo": ErrNotRegular, ".": ErrNotRegular, "none": fs.ErrNotExist} {
		f, err := Regular(filepath.Join(dir, name))
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		if err == nil {
			f.Close()
		}
	}
}
