//go:build linux

package safepath

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
		"run/passwd": nil, "/run/passwd": nil, "etc/absolute": nil, "etc/above": nil, "linked/absolute": nil,
		"../run/passwd": nil,
		"etc/out":       fs.ErrNotExist, "etc/none": fs.ErrNotExist, "etc/magic": fs.ErrNotExist,
		"etc/loop": unix.ELOOP,
		"etc/fifo": ErrNotRegular, "etc/to-fifo": ErrNotRegular, "etc": ErrNotRegular,
	} {
		f, err := OpenRegularInRoot(dir, name)
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
	for _, err := range []error{os.Mkdir(dir+"/sub", 0o755), os.Symlink("/etc", dir+"/absolute"),
		os.Symlink("../..", dir+"/sub/up"),
		os.Symlink("sub", dir+"/link"), unix.Mkfifo(dir+"/fifo", 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, ok := range map[string]bool{"sub": true, "link": true, "fifo": true, "absolute": false,
		"sub/up": false, "..": false} {
		f, err := OpenBeneath(dir, name)
		if ok != (err == nil) || !ok && !errors.Is(err, unix.EXDEV) {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			// An open file stays the same if its name is given to another file.
			if err := os.Rename(filepath.Join(dir, name), filepath.Join(dir, "moved")); err == nil {
				if _, err := os.Stat(ProcPath(f)); err != nil {
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
	for _, err := range []error{os.WriteFile(dir+"/file", []byte("text"), 0o600), os.Symlink("file", dir+"/link"),
		unix.Mkfifo(dir+"/fifo", 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]error{"file": nil, "link": ErrNotRegular, "fifo": ErrNotRegular,
		".": ErrNotRegular, "none": fs.ErrNotExist} {
		f, err := OpenRegular(filepath.Join(dir, name))
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		if err == nil {
			f.Close()
		}
	}
}

// A file is read up to the limit, and only if it is a regular file.
func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	for _, err := range []error{
		os.WriteFile(dir+"/small", []byte("12345"), 0o600), os.WriteFile(dir+"/sparse", nil, 0o600),
		os.Truncate(dir+"/sparse", 1<<40),
		os.Symlink("small", dir+"/link"), unix.Mkfifo(dir+"/fifo", 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]error{"small": nil, "sparse": ErrTooLarge, "link": ErrNotRegular,
		"fifo": ErrNotRegular,
		".":    ErrNotRegular, "none": fs.ErrNotExist} {
		b, err := ReadFile(filepath.Join(dir, name), 5)
		if !errors.Is(err, want) || err == nil && string(b) != "12345" {
			t.Errorf("%s: %q, %v; want %v", name, b, err, want)
		}
	}
	if _, err := ReadFile(dir+"/small", 4); !errors.Is(err, ErrTooLarge) {
		t.Errorf("one byte above the limit: %v", err)
	}
}

// Reading and writing do not wait for another process's lease.
func TestLeasedFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "leased")
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadFile(file, 10); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("reading: %v", err)
	}
	if err := Overwrite(file, []byte("new"), 0o600); !errors.Is(err, unix.EAGAIN) {
		t.Errorf("writing: %v", err)
	}
}

// A file is written in place, never through a link and never into a file that is not regular.
func TestOverwrite(t *testing.T) {
	dir := t.TempDir()
	for _, err := range []error{os.WriteFile(dir+"/there", []byte("longer than new"), 0o600),
		os.Symlink("there", dir+"/link"),
		os.Link(dir+"/there", dir+"/same"), unix.Mkfifo(dir+"/fifo", 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]error{"there": nil, "created": nil, "link": ErrNotRegular,
		"fifo": ErrNotRegular} {
		path := filepath.Join(dir, name)
		err := Overwrite(path, []byte("new"), 0o640)
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
		if b, rerr := ReadFile(path, 100); want == nil && (rerr != nil || string(b) != "new") {
			t.Errorf("%s: %q, %v", name, b, rerr)
		}
	}
	if b, err := os.ReadFile(dir + "/same"); err != nil || string(b) != "new" {
		t.Errorf("the other name of the file: %q, %v", b, err)
	}
}
