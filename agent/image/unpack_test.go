package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// entry is an entry of a test archive.
type entry struct {
	name, link, content string
	kind                byte
	mode                int64
	uid                 int
	xattr               map[string]string
}

func newArchive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: e.mode, Uid: e.uid, Gid: e.uid,
			Size:    int64(len(e.content)),
			ModTime: time.Unix(1e9, 0), Format: tar.FormatPAX, PAXRecords: map[string]string{}}
		if e.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if e.mode == 0 {
			h.Mode = 0o755
		}
		for k, v := range e.xattr {
			h.PAXRecords["SCHILY.xattr."+k] = v
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: owners, devices and trusted attributes are real")
	}
}

func unpackTo(t testing.TB, dir string, below []string, entries ...entry) error {
	t.Helper()
	u, err := newUnpacker(dir, Limits{}.orDefaults())
	if err != nil {
		t.Fatal(err)
	}
	defer u.closeRoot()
	if err := u.unpackArchive(bytes.NewReader(newArchive(t, entries...))); err != nil {
		return err
	}
	return u.finishLayer(below)
}

func TestUnpack(t *testing.T) {
	needRoot(t)
	lower, dir := t.TempDir(), t.TempDir()
	if err := unpackTo(t, lower, nil,
		entry{name: "tmp/", kind: tar.TypeDir, mode: 0o1777, uid: 5},
		entry{name: "usr/old", content: "from below", mode: 0o640, uid: 7},
	); err != nil {
		t.Fatal(err)
	}
	if err := unpackTo(t, dir, []string{lower},
		entry{name: "bin/", kind: tar.TypeDir, mode: 0o711},
		entry{name: "bin/su", content: "x", mode: 0o4755,
			xattr: map[string]string{"user.note": "hi", "trusted.overlay.opaque": "y"}},
		entry{name: "bin/same", link: "bin/su", kind: tar.TypeLink},
		entry{name: "bin/soft", link: "/bin/su", kind: tar.TypeSymlink},
		entry{name: "usr/kept", link: "usr/old", kind: tar.TypeLink},
		entry{name: "tmp/new", content: "n"},
		entry{name: "etc/.wh.gone"},
		entry{name: "opt/.wh..wh..opq"},
		entry{name: "dup", content: "first"},
		entry{name: "dup", content: "second"},
		entry{name: "lib", link: "usr/lib", kind: tar.TypeSymlink},
		entry{name: "lib/through", content: "link"},
		entry{name: "abs", link: "/usr/share", kind: tar.TypeSymlink},
		entry{name: "abs/inside", content: "inside"},
		entry{name: "fifo", kind: tar.TypeFifo},
	); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	stat := func(name string) unix.Stat_t {
		t.Helper()
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			t.Fatal(name, err)
		}
		return st
	}
	if s := stat("bin/su"); s.Mode&0o7777 != 0o4755 || s.Nlink != 2 || s.Mtim.Sec != 1e9 {
		t.Errorf("bin/su: %+v", s)
	}
	if s := stat("bin"); s.Mode&0o7777 != 0o711 || s.Mtim.Sec != 1e9 {
		t.Errorf("bin: mode %o, time %d", s.Mode, s.Mtim.Sec)
	}
	if s := stat("tmp"); s.Mode&0o7777 != 0o1777 || s.Uid != 5 {
		t.Errorf("a folder that the layer does not list lost what it had below: mode %o, uid %d", s.Mode&0o7777, s.Uid)
	}
	if s := stat("etc/gone"); s.Mode&unix.S_IFMT != unix.S_IFCHR || s.Rdev != 0 {
		t.Errorf("whiteout: %+v", s)
	}
	if s := stat("usr/kept"); s.Mode&0o7777 != 0o640 || s.Uid != 7 {
		t.Errorf("link to a file of the layer below: %+v", s)
	}
	buf := make([]byte, 10)
	if n, err := unix.Lgetxattr(filepath.Join(dir, "opt"), overlayOpaque, buf); err != nil || string(buf[:n]) != "y" {
		t.Errorf("opaque folder: %q, %v", buf[:max(n, 0)], err)
	}
	if n, err := unix.Lgetxattr(filepath.Join(dir, "bin/su"), "user.note", buf); err == nil && string(buf[:n]) != "hi" {
		t.Errorf("attribute: %q", buf[:n])
	}
	if _, err := unix.Lgetxattr(filepath.Join(dir, "bin/su"), overlayOpaque, buf); err == nil {
		t.Error("an archive set an attribute of the overlay itself")
	}
	for name, want := range map[string]string{"dup": "second", "usr/lib/through": "link", "usr/share/inside": "inside",
		"usr/kept": "from below"} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v", name, b, err)
		}
	}
}

func TestUnpackStaysInside(t *testing.T) {
	needRoot(t)
	for name, entries := range map[string][]entry{
		"dots":             {{name: "../evil", content: "x"}},
		"dots within":      {{name: "a/../../evil", content: "x"}},
		"absolute":         {{name: "/abs/ok", content: "x"}},
		"through link":     {{name: "out", link: "../../..", kind: tar.TypeSymlink}, {name: "out/evil", content: "x"}},
		"through absolute": {{name: "out", link: "/", kind: tar.TypeSymlink}, {name: "out/evil", content: "x"}},
		"hard link out":    {{name: "shadow", link: "../../etc/shadow", kind: tar.TypeLink}},
		"hard link by link": {{name: "etc", link: "/etc", kind: tar.TypeSymlink},
			{name: "pw", link: "etc/passwd", kind: tar.TypeLink}},
		"loop": {{name: "a", link: "b", kind: tar.TypeSymlink},
			{name: "b", link: "a", kind: tar.TypeSymlink}, {name: "a/x", content: "x"}},
		"whiteout of dots": {{name: "a/.wh..."}},
		"whiteout device":  {{name: "dev", kind: tar.TypeChar}},
		"link to root":     {{name: "r", link: "/", kind: tar.TypeLink}},
	} {
		t.Run(name, func(t *testing.T) {
			outer := t.TempDir()
			dir := filepath.Join(outer, "in", "fs")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			err := unpackTo(t, dir, nil, entries...)
			for _, place := range []string{outer + "/evil", outer + "/in/evil", "/evil"} {
				if _, e := os.Lstat(place); e == nil {
					t.Errorf("%s was written", place)
				}
			}
			for _, secret := range []string{"shadow", "pw"} {
				if b, e := os.ReadFile(filepath.Join(dir, secret)); e == nil {
					t.Errorf("a file of the host is inside: %q", b)
				}
			}
			if strings.HasPrefix(name, "dots") && !errors.Is(err, errUnsafe) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// FuzzUnpack unpacks arbitrary bytes; nothing may appear outside the folder.
func FuzzUnpack(f *testing.F) {
	needRoot(f)
	f.Add(newArchive(f, entry{name: "a/b", content: "x"}, entry{name: "a/l", link: "../..", kind: tar.TypeSymlink},
		entry{name: "a/l/x", content: "y"}))
	f.Add(newArchive(f, entry{name: ".wh.x"}, entry{name: "d/.wh..wh..opq"},
		entry{name: "h", link: "a", kind: tar.TypeLink}))
	f.Add([]byte("not an archive"))
	outer, err := os.MkdirTemp("", "keelson-fuzz-")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { os.RemoveAll(outer) })
	f.Fuzz(func(t *testing.T, in []byte) {
		dir, err := os.MkdirTemp(outer, "x")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		inner := filepath.Join(dir, "fs")
		if err := os.Mkdir(inner, 0o755); err != nil {
			t.Fatal(err)
		}
		u, err := newUnpacker(inner, Limits{}.orDefaults())
		if err != nil {
			t.Fatal(err)
		}
		defer u.closeRoot()
		if err := u.unpackArchive(bytes.NewReader(in)); err == nil {
			_ = u.finishLayer(nil)
		}
		e, err := os.ReadDir(dir)
		if err != nil || len(e) != 1 {
			t.Fatalf("beside the folder appeared %v (%v)", e, err)
		}
	})
}
