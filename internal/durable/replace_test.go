package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

var levels = []Level{Atomic, Intact, Persistent}

// simulatedDisk is a disk in memory. It records operations, fails one of them, or stops before one
// as a crash does. It keeps what is on the disk apart from what is in the kernel's memory.
type simulatedDisk struct {
	log    []string
	fail   int // the operation of this number fails; 0 = none
	crash  int // the process is killed before the operation of this number; 0 = never
	cached map[string]*inode
	stored map[string]*inode // the entries that survive a power failure
}

type inode struct {
	cached, stored string
}

// errKilled is the panic value of a crash.
var errKilled = errors.New("the process is killed")

// newSimulatedDisk returns a disk with the given durable files.
func newSimulatedDisk(files map[string]string) *simulatedDisk {
	d := &simulatedDisk{cached: map[string]*inode{}, stored: map[string]*inode{}}
	for name, content := range files {
		f := &inode{content, content}
		d.cached[name], d.stored[name] = f, f
	}
	return d
}

// perform records an operation and returns its error.
func (d *simulatedDisk) perform(format string, args ...any) error {
	if len(d.log)+1 == d.crash {
		panic(errKilled)
	}
	d.log = append(d.log, fmt.Sprintf(format, args...))
	if len(d.log) == d.fail {
		return syscall.EIO
	}
	return nil
}

func (d *simulatedDisk) openFile(path string, flag int, mode os.FileMode) (tempFile, error) {
	if flag&os.O_EXCL != 0 && d.cached[path] != nil {
		return nil, fs.ErrExist
	}
	return d.create(path, mode)
}

func (d *simulatedDisk) createTemp(dir, pattern string) (tempFile, error) {
	return d.create(filepath.Join(dir, strings.ReplaceAll(pattern, "*", "123")), 0o600)
}

func (d *simulatedDisk) create(path string, mode os.FileMode) (tempFile, error) {
	if err := d.perform("create %s %o", path, mode); err != nil {
		return nil, err
	}
	d.cached[path] = &inode{}
	return &simulatedFile{d, path, d.cached[path]}, nil
}

func (d *simulatedDisk) rename(from, to string) error {
	if err := d.perform("rename %s %s", from, to); err != nil {
		return err
	}
	d.cached[to] = d.cached[from]
	delete(d.cached, from)
	return nil
}

func (d *simulatedDisk) remove(path string) error {
	if err := d.perform("remove %s", path); err != nil {
		return err
	}
	delete(d.cached, path)
	return nil
}

func (d *simulatedDisk) syncDir(path string) error {
	if err := d.perform("sync %s/", path); err != nil {
		return err
	}
	d.stored = maps.Clone(d.cached)
	return nil
}

type simulatedFile struct {
	disk *simulatedDisk
	name string
	*inode
}

func (f *simulatedFile) Name() string { return f.name }

func (f *simulatedFile) Write(p []byte) (int, error) {
	if err := f.disk.perform("write %s", p); err != nil {
		f.cached += string(p[:len(p)/2])
		return len(p) / 2, err
	}
	f.cached += string(p)
	return len(p), nil
}

func (f *simulatedFile) Chmod(mode os.FileMode) error { return f.disk.perform("chmod %o", mode) }

func (f *simulatedFile) Sync() error {
	if err := f.disk.perform("sync %s", f.name); err != nil {
		return err
	}
	f.stored = f.cached
	return nil
}

func (f *simulatedFile) Close() error { return f.disk.perform("close %s", f.name) }

// afterPowerFailure returns each content that a file may have after a power failure; "-" means that
// the file does not exist.
func (d *simulatedDisk) afterPowerFailure(path string) []string {
	var contents []string
	for _, names := range []map[string]*inode{d.cached, d.stored} {
		f := names[path]
		if f == nil {
			contents = append(contents, "-")
			continue
		}
		contents = append(contents, f.cached, f.stored, f.cached[:len(f.cached)/2])
		if f.cached == f.stored {
			contents = contents[:len(contents)-1]
		}
	}
	return contents
}

// write writes "new" to d/f and reports whether that returned; if not, the process was killed.
func (d *simulatedDisk) write(o Options) (returned bool, err error) {
	defer func() {
		if p := recover(); p != nil && p != errKilled {
			panic(p)
		}
	}()
	err = writeOn(d, "d/f", []byte("new"), o)
	return true, err
}

func TestOperationsOfEachLevel(t *testing.T) {
	for name, test := range map[string]struct {
		options Options
		want    []string
	}{
		"atomic": {Options{Level: Atomic}, []string{"create d/f.new 600", "write new", "close d/f.new",
			"rename d/f.new d/f"}},
		"intact": {Options{Level: Intact}, []string{"create d/f.new 600", "write new", "sync d/f.new",
			"close d/f.new", "rename d/f.new d/f"}},
		"persistent": {Options{Level: Persistent},
			[]string{"create d/f.new 600", "write new", "sync d/f.new", "close d/f.new",
				"rename d/f.new d/f", "sync d/"}},
		"exclusive": {Options{Level: Persistent, Exclusive: true},
			[]string{"create d/f 600", "write new", "sync d/f", "close d/f", "sync d/"}},
		"mode and suffix": {Options{Level: Atomic, Mode: 0o644, TempSuffix: ".tmp"},
			[]string{"create d/f.tmp 644", "write new", "close d/f.tmp", "rename d/f.tmp d/f"}},
		"pattern": {Options{Level: Atomic, TempPattern: ".f-*"},
			[]string{"create d/.f-123 600", "write new", "close d/.f-123", "rename d/.f-123 d/f"}},
		"pattern in another directory": {Options{Level: Atomic, TempPattern: "load-*", TempDir: "e"},
			[]string{"create e/load-123 600", "write new", "close e/load-123", "rename e/load-123 d/f"}},
	} {
		d := newSimulatedDisk(nil)
		if _, err := d.write(test.options); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if !slices.Equal(d.log, test.want) {
			t.Errorf("%s: operations %q, want %q", name, d.log, test.want)
		}
	}
}

// A process that is killed at any moment leaves the old or the new content, at each level.
func TestProcessKilled(t *testing.T) {
	for _, level := range levels {
		for crash := 1; ; crash++ {
			d := newSimulatedDisk(map[string]string{"d/f": "old"})
			d.crash = crash
			returned, err := d.write(Options{Level: level})
			if err != nil {
				t.Fatal(err)
			}
			if got := d.cached["d/f"].cached; got != "new" && (returned || got != "old") {
				t.Errorf("level %d: killed before operation %d: content %q", level, crash, got)
			}
			if returned {
				break
			}
		}
	}
}

// A power failure at any moment leaves what the level promises, and less than the next level does.
func TestPowerFailure(t *testing.T) {
	for _, test := range []struct {
		level           Level
		during, written []string // the possible contents
	}{
		{Atomic, []string{"", "n", "new", "old"}, []string{"", "n", "new", "old"}},
		{Intact, []string{"new", "old"}, []string{"new", "old"}},
		{Persistent, []string{"new", "old"}, []string{"new"}},
	} {
		seen := map[string]bool{}
		for crash := 1; ; crash++ {
			d := newSimulatedDisk(map[string]string{"d/f": "old"})
			d.crash = crash
			returned, err := d.write(Options{Level: test.level})
			if err != nil {
				t.Fatal(err)
			}
			contents := d.afterPowerFailure("d/f")
			for _, content := range contents {
				seen[content] = true
			}
			if returned {
				slices.Sort(contents)
				if contents = slices.Compact(contents); !slices.Equal(contents, test.written) {
					t.Errorf("level %d: after the write: %q, want %q", test.level, contents, test.written)
				}
				break
			}
		}
		if got := slices.Sorted(maps.Keys(seen)); !slices.Equal(got, test.during) {
			t.Errorf("level %d: at any moment: %q, want %q", test.level, got, test.during)
		}
	}
}

// A failed operation is reported, the temporary file is removed, and the old content stays; only
// the sync of the directory comes too late for that.
func TestFailedOperations(t *testing.T) {
	for _, level := range levels {
		for fail := 1; ; fail++ {
			d := newSimulatedDisk(map[string]string{"d/f": "old"})
			d.fail = fail
			_, err := d.write(Options{Level: level})
			if len(d.log) < fail {
				break
			}
			failed := d.log[fail-1]
			if !errors.Is(err, syscall.EIO) {
				t.Errorf("level %d: %s failed: error %v", level, failed, err)
			}
			want := "old"
			if failed == "sync d/" {
				want = "new"
			}
			if got := d.cached["d/f"].cached; got != want {
				t.Errorf("level %d: %s failed: content %q, want %q", level, failed, got, want)
			}
			if d.cached["d/f.new"] != nil {
				t.Errorf("level %d: %s failed: the temporary file is left", level, failed)
			}
		}
	}
}

func TestExclusiveFile(t *testing.T) {
	d := newSimulatedDisk(map[string]string{"d/f": "old"})
	if _, err := d.write(Options{Level: Persistent, Exclusive: true}); !errors.Is(err, os.ErrExist) ||
		d.cached["d/f"].cached != "old" {
		t.Errorf("over an existing file: error %v, content %q", err, d.cached["d/f"].cached)
	}
	d = newSimulatedDisk(nil)
	d.fail = 3 // the sync
	if _, err := d.write(Options{Level: Persistent, Exclusive: true}); !errors.Is(err, syscall.EIO) ||
		d.cached["d/f"] != nil {
		t.Errorf("failed sync: error %v, files %v", err, d.cached)
	}
}

func TestUnknownLevel(t *testing.T) {
	for _, level := range []Level{0, Persistent + 1} {
		d := newSimulatedDisk(nil)
		if _, err := d.write(Options{Level: level}); err == nil || len(d.log) > 0 {
			t.Errorf("level %d: error %v, operations %q", level, err, d.log)
		}
	}
}

func TestFilesOnTheHost(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	check := func(content string, mode os.FileMode) {
		t.Helper()
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); string(got) != content || err != nil || info.Mode().Perm() != mode {
			t.Errorf("content %q, mode %o, error %v; want %q, %o", got, info.Mode().Perm(), err, content, mode)
		}
		if list, err := os.ReadDir(dir); len(list) != 1 || err != nil {
			t.Errorf("the directory has %v, error %v", list, err)
		}
	}
	for _, level := range levels {
		content := fmt.Sprint("level ", level)
		if err := Write(path, []byte(content), level); err != nil {
			t.Fatal(err)
		}
		check(content, 0o600)
	}
	if err := WriteWith(path, []byte("pattern"), Options{Level: Persistent, TempPattern: ".f-*"}); err != nil {
		t.Fatal(err)
	}
	check("pattern", 0o600)
	r, err := Create(path, Options{Level: Atomic, Mode: 0o555})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Write([]byte("program")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Chmod(0o555), r.Commit(), r.Discard()); err != nil {
		t.Fatal(err)
	}
	check("program", 0o555)
	if r, err = Create(path, Options{Level: Atomic}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Discard(), r.Discard()); err != nil {
		t.Fatal(err)
	}
	check("program", 0o555)
	if err := WriteWith(path, nil, Options{Level: Persistent, Exclusive: true}); !errors.Is(err, os.ErrExist) {
		t.Errorf("exclusive: %v", err)
	}
	check("program", 0o555)
}

func TestWriteIfChanged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b", "f")
	for _, level := range levels {
		if err := WriteIfChanged(path, []byte("one"), level); err != nil {
			t.Fatal(err)
		}
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if parent, err := os.Stat(filepath.Dir(path)); err != nil || parent.Mode().Perm()&^0o750 != 0 {
		t.Errorf("mode of the directory %v, error %v", parent, err)
	}
	if err := WriteIfChanged(path, []byte("one"), Intact); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("an equal file was written again; error %v", err)
	}
	if err := WriteIfChanged(path, []byte("two"), Intact); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); string(got) != "two" || err != nil {
		t.Errorf("content %q, error %v", got, err)
	}
}

func TestReadJSON(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f.json")
	var v struct{ A int }
	if err := ReadJSON(path, &v); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("missing file: %v", err)
	}
	if err := Write(path, []byte(`{"A":7}`), Atomic); err != nil {
		t.Fatal(err)
	}
	if err := ReadJSON(path, &v); err != nil || v.A != 7 {
		t.Errorf("read %+v, error %v", v, err)
	}
	if err := Write(path, []byte(`{"A":`), Atomic); err != nil {
		t.Fatal(err)
	}
	if err := ReadJSON(path, &v); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("invalid JSON: %v", err)
	}
}
