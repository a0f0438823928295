package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/internal/reservedspace"
)

// A layer that exceeds a limit fails early with an error, and leaves nothing behind.
func TestUnpackIsBounded(t *testing.T) {
	needRoot(t)
	many := func(n int, each func(i int) entry) []entry {
		var out []entry
		for i := range n {
			out = append(out, each(i))
		}
		return out
	}
	limits := Limits{Entries: 50, Bytes: 1 << 20, Names: 20_000}.orDefaults()
	for name, c := range map[string]struct {
		entries []entry
		want    string // "" = no error
	}{
		"all that is allowed": {many(50, func(i int) entry {
			return entry{name: fmt.Sprint("f", i), content: "x"}
		}), ""},
		"too many entries": {many(51, func(i int) entry {
			return entry{name: fmt.Sprint("f", i)}
		}), "more than 50 entries"},
		"the same one, often": {many(51, func(i int) entry { return entry{name: "f"} }), "more than 50 entries"},
		"too many bytes": {many(3, func(i int) entry {
			return entry{name: fmt.Sprint("f", i), content: strings.Repeat("x", 400<<10)}
		}), "more than 1048576 bytes"},
		"a long path": {[]entry{{name: strings.Repeat("d/", 3000) + "f"}}, "a name of 6001 bytes"},
		"a long name": {[]entry{{name: strings.Repeat("d", 300)}}, "a name of 300 bytes"},
		"a long link": {[]entry{{name: "l", link: strings.Repeat("d/", 3000), kind: tar.TypeSymlink}},
			"a name of 6000 bytes"},
		"folders to remember": {many(10, func(i int) entry {
			return entry{name: fmt.Sprint(i) + strings.Repeat("/d", 40) + "/f"}
		}), "need more than 20000 bytes of memory"},
		"links to remember": {many(20, func(i int) entry {
			return entry{name: fmt.Sprint(i), link: strings.Repeat("d/", 900) + "f", kind: tar.TypeLink}
		}), "need more than 20000 bytes of memory"},
	} {
		u, err := newUnpacker(t.TempDir(), limits)
		if err != nil {
			t.Fatal(err)
		}
		err = u.unpackArchive(bytes.NewReader(newArchive(t, c.entries...)))
		u.closeRoot()
		if c.want == "" && err != nil || c.want != "" &&
			(!errors.Is(err, errLimit) || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %.300v", name, err)
		}
		if err != nil && len(err.Error()) > 1000 {
			t.Errorf("%s: the error has %d bytes", name, len(err.Error()))
		}
	}
}

// endless is an unbounded archive of zeros, which compress well.
func TestArchiveThatDoesNotEnd(t *testing.T) {
	limits := Limits{Entries: 10, Bytes: 1 << 20}.orDefaults()
	r := &boundedReader{zeros{}, limits.archiveBytes()}
	n, err := io.Copy(io.Discard, r)
	if !errors.Is(err, errLimit) || n != 1<<20+10*maxHeader {
		t.Errorf("%d bytes were read, %v", n, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// The disk is not filled: the reserved space stays free.
func TestUnpackLeavesRoom(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=8m,nr_inodes=1000"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
	for name, entries := range map[string][]entry{
		"bytes":  {{name: "a", content: strings.Repeat("x", 5<<20)}, {name: "b", content: strings.Repeat("x", 2<<20)}},
		"inodes": nil,
	} {
		if entries == nil {
			for i := range 990 {
				entries = append(entries, entry{name: fmt.Sprint(i)})
			}
		}
		sub := filepath.Join(dir, name)
		if err := os.Mkdir(sub, 0o755); err != nil {
			t.Fatal(err)
		}
		u, err := newUnpacker(sub, Limits{Free: reservedspace.Percent(25)}.orDefaults())
		if err != nil {
			t.Fatal(err)
		}
		err = u.unpackArchive(bytes.NewReader(newArchive(t, entries...)))
		u.closeRoot()
		var st unix.Statfs_t
		if e := unix.Statfs(dir, &st); e != nil {
			t.Fatal(e)
		}
		if !errors.Is(err, unix.ENOSPC) || st.Bavail < st.Blocks/5 || st.Ffree < st.Files/5 {
			t.Errorf("%s: %v; free: %d of %d, inodes %d of %d", name, err, st.Bavail, st.Blocks, st.Ffree, st.Files)
		}
		if err := os.RemoveAll(sub); err != nil {
			t.Fatal(err)
		}
	}
}

// An imported archive is not unpacked again, even if its name or time changed. It is imported again
// if its image was removed. A different archive with the same name is imported.
func TestArchivesAreImportedOnce(t *testing.T) {
	needRoot(t)
	img := newTestImage(t, []entry{{name: "f", content: "x"}})
	folder, root := t.TempDir(), t.TempDir()
	file := filepath.Join(folder, "a.tar")
	b, err := os.ReadFile(newOCIArchive(t, map[string]v1.Image{"keelson.dev/a:v1": img}, nil))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	imported := func() int {
		t.Helper()
		s, stop := openStore(t, Config{Root: root, Archives: folder})
		defer stop()
		list, err := s.ListImages(testContext(t), &cri.ListImagesRequest{})
		if err != nil || len(list.Images) != 1 {
			t.Fatalf("images: %v, %v", list, err)
		}
		return int(s.imported.Load())
	}
	for i, c := range []struct {
		what string
		do   func() error
		want int
	}{
		{"at first", func() error { return nil }, 1},
		{"again", func() error { return nil }, 0},
		{"touched", func() error { return os.Chtimes(file, time.Unix(1e9, 0), time.Unix(1e9, 0)) }, 0},
		{"renamed", func() error { return os.Rename(file, filepath.Join(folder, "b.tar")) }, 0},
		{"compressed", func() error { return writeGzip(filepath.Join(folder, "b.tar"), b) }, 1},
		{"its image removed", func() error { return os.RemoveAll(filepath.Join(root, "images")) }, 1},
	} {
		if err := c.do(); err != nil {
			t.Fatal(err)
		}
		if got := imported(); got != c.want {
			t.Errorf("%d, %s: %d imports, want %d", i, c.what, got, c.want)
		}
	}
}

func writeGzip(path string, b []byte) error {
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	_, err := w.Write(b)
	return errors.Join(err, w.Close(), os.WriteFile(path, z.Bytes(), 0o600))
}

// Only root can access a layer on the host, and its set-user-id programs and devices have no effect
// there. In a container they do.
func TestLayersAreOutOfReach(t *testing.T) {
	needRoot(t)
	id, err := os.ReadFile("/usr/bin/id") // busybox drops such privileges itself
	if err != nil {
		t.Skip("needs /usr/bin/id (Debian: coreutils)")
	}
	outer, err := os.MkdirTemp("", "keelson-images-") // the user must be able to reach the store
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(outer); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(outer, 0o755); err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(outer, "images")
	s, stop := openStore(t, Config{Root: root})
	file := newOCIArchive(t,
		map[string]v1.Image{"a:v1": newTestImage(t, []entry{{name: "id", content: string(id), mode: 0o4755}})}, nil)
	if _, err := s.Import(testContext(t), file); err != nil {
		t.Fatal(err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Join(root, "layers"), &st); err != nil || st.Flags&unix.ST_NOSUID == 0 ||
		st.Flags&unix.ST_NODEV == 0 {
		t.Errorf("the store's mount has the flags %x, %v", st.Flags, err)
	}
	fs, err := s.PrepareRootFS(testContext(t), "c1", "a:v1")
	if err != nil {
		t.Fatal(err)
	}
	asUser := func(script string) (string, error) {
		cmd := exec.Command("/bin/sh", "-c", script)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
		b, err := cmd.CombinedOutput()
		return strings.TrimSpace(string(b)), err
	}
	for _, dir := range append([]string{fs.Upper, fs.Path}, fs.Lower...) {
		if out, err := asUser("ls " + dir); err == nil {
			t.Errorf("a user of the host lists %s: %s", dir, out)
		}
	}
	seen := filepath.Join(outer, "seen")
	if err := os.Mkdir(seen, 0o755); err != nil {
		t.Fatal(err)
	}
	options := "lowerdir=" + strings.Join(fs.Lower, ":") + ",upperdir=" + fs.Upper + ",workdir=" + fs.Work
	if err := unix.Mount("overlay", seen, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(seen, unix.MNT_DETACH) })
	if out, err := asUser(seen + "/id -u"); err != nil || out != "0" {
		t.Errorf("a set-user-id program in a container: %q, %v", out, err)
	}
	if err := unix.Unmount(seen, 0); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := unix.Statfs(root, &st); err != nil || st.Flags&unix.ST_NOSUID != 0 {
		t.Errorf("the mount is left: %x, %v", st.Flags, err)
	}
}
