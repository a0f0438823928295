package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

var row = regexp.MustCompile("(?m)^\\| `(/[^`]*)` \\| ([0-7]{4}) \\| both \\|")

// system are folders that every machine has; the package does not set their modes.
var system = map[string]bool{"/": true, "/etc": true, "/opt": true, "/usr": true, "/usr/bin": true, "/usr/lib": true,
	"/usr/lib/systemd": true, "/usr/lib/systemd/system": true}

// The files of the package and the tarball have the modes and owners in docs/reference/files.md.
// deploy/install checks the same table for install.sh. The package contains nothing that the table
// does not list.
func TestModesOfWhatIsPacked(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/files.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := row.FindAllSubmatch(doc, -1)
	if len(rows) < 8 {
		t.Fatalf("the table of files in docs/reference/files.md has %d rows", len(rows))
	}
	wants := func(at string, folder bool) (mode int64, ok bool) {
		for _, r := range rows {
			name := string(r[1])
			if match, err := path.Match(strings.TrimSuffix(name, "/"), at); err == nil && match &&
				strings.HasSuffix(name, "/") == folder {
				mode, err := strconv.ParseInt(string(r[2]), 8, 64)
				return mode, err == nil
			}
		}
		return 0, false
	}
	r := built(t, time.Now())
	all := packed(t, r)
	zip, err := gzip.NewReader(bytes.NewReader(all[r.name()+".tar.gz"]))
	if err != nil {
		t.Fatal(err)
	}
	each(t, zip, func(h *tar.Header) {
		at := strings.TrimPrefix(h.Name, r.name())
		mode, ok := wants(at, h.Typeflag == tar.TypeDir)
		if h.Typeflag == tar.TypeReg && !ok && at != "/install.sh" && at != "/uninstall.sh" {
			t.Errorf("the tarball brings %s, which docs/reference/files.md does not name", at)
		}
		// install.sh sets the modes of the table. Before that, only the user who unpacks the
		// tarball may write to the files.
		if h.Typeflag == tar.TypeReg && ok && h.Mode != mode || h.Mode&0o022 != 0 || h.Uid != 0 || h.Gid != 0 {
			t.Errorf("%s of the tarball has mode %04o of %d:%d, and docs/reference/files.md says %04o", at, h.Mode,
				h.Uid, h.Gid, mode)
		}
	})
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("needs: dpkg-deb, which opens the package")
	}
	cmd := exec.Command("dpkg-deb", "--fsys-tarfile", r.name()+".deb")
	cmd.Dir = r.out
	raw, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	each(t, bytes.NewReader(raw), func(h *tar.Header) {
		at := path.Join("/", h.Name)
		mode, ok := wants(at, h.Typeflag == tar.TypeDir)
		if system[at] {
			mode, ok = 0o755, true
		}
		seen[at] = true
		switch {
		case !ok:
			t.Errorf("the package brings %s, which docs/reference/files.md does not name", at)
		case h.Mode != mode || h.Uname != "root" || h.Gname != "root" || h.Uid != 0 || h.Gid != 0 ||
			h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeDir:
			t.Errorf("%s of the package is a %c of mode %04o, of %s:%s: docs/reference/files.md says %04o, of root", at,
				h.Typeflag, h.Mode, h.Uname, h.Gname, mode)
		}
	})
	for _, must := range []string{"/etc/keelson", "/etc/keelson/agent.yaml", "/usr/lib/keelson/uninstall.sh",
		"/usr/bin/keelson-agent"} {
		if !seen[must] {
			t.Errorf("the package has no %s: this test has seen %v", must, seen)
		}
	}
}

// each calls see for each entry of a tar archive.
func each(t *testing.T, from io.Reader, see func(*tar.Header)) {
	t.Helper()
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		see(h)
	}
}
