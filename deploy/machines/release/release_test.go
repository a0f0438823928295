package release

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func packed(t *testing.T, files map[string]string, zip bool) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o755,
			Size: int64(len(files[name]))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(files[name])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if !zip {
		return b.Bytes()
	}
	var z bytes.Buffer
	g := gzip.NewWriter(&z)
	if _, err := g.Write(b.Bytes()); err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	return z.Bytes()
}

// folder creates releases of some versions in a folder.
func folder(t *testing.T, versions ...string) string {
	t.Helper()
	dir := t.TempDir()
	sums := ""
	for _, v := range versions {
		top := "keelson-" + v + "-linux-amd64"
		for name, raw := range map[string][]byte{
			top + ".tar.gz": packed(t, map[string]string{top + "/usr/bin/kctl": "kctl",
				top + "/opt/cni/bin/bridge": "bridge", top + "/etc/keelson/agent.yaml": "an example",
				top + "/usr/lib/systemd/system/keelson.slice": "slice", top + "/install.sh": "install",
				top + "/uninstall.sh": "uninstall", "elsewhere/usr/bin/x": "x"}, true),
			top + "-images.tar": packed(t, map[string]string{"entry.tar": "entry"}, false),
		} {
			if err := os.WriteFile(filepath.Join(dir, name), raw, 0o644); err != nil {
				t.Fatal(err)
			}
			sums += fmt.Sprintf("%x  %s\n", sha256.Sum256(raw), name)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, sumsFile), []byte(sums), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func sum(s string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(s))) }

// A release is read from its folder, one of its tarballs or a URL, and each file is what the sums say.
func TestOpen(t *testing.T) {
	dir := folder(t, "v1")
	served := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer served.Close()
	cache := t.TempDir()
	for _, where := range []string{dir, filepath.Join(dir, "keelson-v1-linux-amd64.tar.gz"),
		served.URL + "/keelson-v1-linux-amd64.tar.gz", served.URL + "/keelson-v1-linux-amd64.tar.gz"} {
		r, err := Open(t.Context(), where, cache)
		if err != nil {
			t.Fatal(err)
		}
		a := r.Archives["amd64"]
		want := map[string]string{"/usr/bin/kctl": sum("kctl"), "/opt/cni/bin/bridge": sum("bridge"),
			"/usr/lib/systemd/system/keelson.slice": sum("slice"), "/usr/lib/keelson/uninstall.sh": sum("uninstall")}
		if r.Version != "v1" || !maps.Equal(a.Sums, want) || a.Images == nil ||
			!maps.Equal(a.ImageSums, map[string]string{"/var/lib/keelson/images.d/entry.tar": sum("entry")}) {
			t.Errorf("%s is %+v", where, r)
		}
		if info, err := os.Stat(a.Tarball.Path); err != nil || info.Size() != a.Tarball.Size {
			t.Errorf("the tarball: %+v (%v)", a.Tarball, err)
		}
	}
	if err := os.Remove(filepath.Join(dir, "keelson-v1-linux-amd64-images.tar")); err != nil {
		t.Fatal(err)
	}
	if r, err := Open(t.Context(), dir, cache); err != nil || r.Archives["amd64"].Images != nil {
		t.Errorf("without images: %+v (%v)", r, err)
	}
}

// What is no release, or has been changed, is refused.
func TestOpenRefuses(t *testing.T) {
	broken := folder(t, "v1")
	if err := os.WriteFile(filepath.Join(broken, "keelson-v1-linux-amd64.tar.gz"),
		packed(t, map[string]string{"keelson-v1-linux-amd64/usr/bin/kctl": "evil"}, true), 0o644); err != nil {
		t.Fatal(err)
	}
	two := folder(t, "v1", "v2")
	served := httptest.NewServer(http.FileServer(http.Dir(broken)))
	defer served.Close()
	unlisted := folder(t, "v1")
	if err := os.WriteFile(filepath.Join(unlisted, sumsFile), []byte(sum("x")+"  other.tar.gz\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for where, want := range map[string]string{
		broken:      "keelson-v1-linux-amd64.tar.gz is not what its release has: its SHA-256 is",
		two:         "there are v1 and v2: name one tarball",
		t.TempDir(): "the sums of its files", filepath.Join(two, "none.tar.gz"): "no such file",
		unlisted: "is not in SHA256SUMS",
		served.URL + "/keelson-v1-linux-amd64.tar.gz":      "is not what its release has",
		served.URL + "/keelson-v9-linux-amd64.tar.gz":      "is not in SHA256SUMS",
		served.URL + "/none/keelson-v1-linux-amd64.tar.gz": "404",
		served.URL + "/x": "want the URL of keelson-VERSION-linux-ARCH.tar.gz",
	} {
		if r, err := Open(t.Context(), where, t.TempDir()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v\nwant %s", where, r, err, want)
		}
	}
	if r, err := Open(t.Context(), filepath.Join(two, "keelson-v2-linux-amd64.tar.gz"), ""); err != nil ||
		r.Version != "v2" {
		t.Errorf("one of two: %+v, %v", r, err)
	}
}

// Which release it is its files' names tell, without a look into them.
func TestVersion(t *testing.T) {
	one, two := folder(t, "v1"), folder(t, "v1", "v2")
	for where, want := range map[string]string{
		one: "v1", two: "", filepath.Join(two, "keelson-v2-linux-amd64.tar.gz"): "v2",
		"https://example.com/r/keelson-v1.1.0-linux-arm64.tar.gz": "v1.1.0",
		t.TempDir(): "", "https://example.com/r": "", "/nowhere/keelson-v3-linux-amd64.tar.gz": "v3",
	} {
		if got := Version(where); got != want {
			t.Errorf("%s is of %q, want %q", where, got, want)
		}
	}
}
