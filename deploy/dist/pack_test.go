package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// built returns a release before packaging: programs that Go has built, with a modification time.
func built(t *testing.T, written time.Time) *release {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte("package main\nfunc main() {}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	goAt(t, ".", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(dir, "program"),
		filepath.Join(dir, "main.go"))
	program, err := os.ReadFile(filepath.Join(dir, "program"))
	if err != nil {
		t.Fatal(err)
	}
	r := &release{version: "v1.2.3-4-gabc", arch: "arm64", root: t.TempDir(), install: "../install", out: t.TempDir(),
		when:   time.Unix(1700000000, 0).UTC(),
		linked: []string{"keelson-oci=libseccomp@2.5.4", "keelson-oci=glibc@2.36"}}
	for _, name := range []string{"usr/bin/keelson-agent", "usr/bin/keelson-oci", "opt/cni/bin/bridge"} {
		path := filepath.Join(r.root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, program, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, written, written); err != nil {
			t.Fatal(err)
		}
	}
	goAt(t, "../..", "run", "./examples/images/build", "-only-entry", "-arch", r.arch, "-out", r.root, "-entry",
		filepath.Join(dir, "program"), "-version", "v1")
	r.images = []string{filepath.Join(r.root, "entry.tar")}
	return r
}

// goAt runs the go command in a folder and returns its output.
func goAt(t *testing.T, dir string, args ...string) string {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, &said)
	}
	return strings.TrimSpace(string(out))
}

// packed returns the packaged files by name.
func packed(t *testing.T, r *release) map[string][]byte {
	t.Helper()
	if err := r.pack(); err != nil {
		t.Fatal(err)
	}
	if err := checksums(r.out, r.version); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(r.out)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]byte{}
	for _, e := range entries {
		if all[e.Name()], err = os.ReadFile(filepath.Join(r.out, e.Name())); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// The same commit gives the same bytes in another folder and at another build time.
func TestPackingIsReproducible(t *testing.T) {
	first, second := packed(t, built(t, time.Unix(1, 0))), packed(t, built(t, time.Unix(1800000000, 0)))
	if len(first) != 5 || len(second) != 5 {
		t.Fatalf("%d and %d files: want a tarball, a package, images, a list of parts, and sums",
			len(first), len(second))
	}
	for name, content := range first {
		if !bytes.Equal(content, second[name]) {
			t.Errorf("%s differs: %d and %d bytes", name, len(content), len(second[name]))
		}
	}
	later := built(t, time.Unix(1, 0))
	later.when = later.when.Add(time.Second)
	for name, content := range packed(t, later) {
		if bytes.Equal(content, first[name]) {
			t.Errorf("%s does not have the time of its commit", name)
		}
	}
}

func TestWhatIsPacked(t *testing.T) {
	r := built(t, time.Now())
	packed(t, r)
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.Command(name, args...)
		cmd.Dir = r.out
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", name, args, err, out)
		}
		return string(out)
	}
	run("sha256sum", "--check", "--strict", "SHA256SUMS")
	has := func(of, list string, lines ...string) {
		t.Helper()
		for _, line := range lines {
			if !strings.Contains(list, line) {
				t.Errorf("%s has no %q:\n%s", of, line, list)
			}
		}
	}
	has("the tarball", run("tar", "-tvzf", r.name()+".tar.gz"), r.name()+"/install.sh", r.name()+"/uninstall.sh",
		r.name()+"/usr/bin/keelson-agent",
		r.name()+"/opt/cni/bin/bridge", r.name()+"/etc/keelson/agent.yaml",
		r.name()+"/usr/lib/systemd/system/keelson.slice", "-rw------- 0/0")
	has("the bundle", run("tar", "-tf", r.name()+"-images.tar"), "entry.tar")
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("needs: dpkg-deb, which opens the package")
	}
	has("the package", run("dpkg-deb", "-c", r.name()+".deb"), "./usr/bin/keelson-agent", "./opt/cni/bin/bridge",
		"./usr/lib/keelson/uninstall.sh", "-rw------- root/root")
	has("the package", run("dpkg-deb", "-I", r.name()+".deb", "control"), "Version: 1.2.3+4+gabc\n",
		"Architecture: arm64\n", "Depends: nftables\n")
	// dpkg decides which script runs when; the scripts in the folder are packaged unchanged.
	for _, script := range []string{"preinst", "postinst", "prerm", "postrm"} {
		want, err := os.ReadFile(filepath.Join("..", "install", "deb", script))
		if err != nil {
			t.Fatal(err)
		}
		if is := run("dpkg-deb", "-I", r.name()+".deb", script); is != string(want) {
			t.Errorf("the package's %s is %q", script, is)
		}
	}
	if conf := run("dpkg-deb", "-I", r.name()+".deb", "conffiles"); conf !=
		"/etc/keelson/agent.yaml\n/etc/keelson/controlplane.yaml\n" {
		t.Errorf("the operator's files are %q", conf)
	}
}

func TestVersionsOfThePackage(t *testing.T) {
	for version, want := range map[string]string{"v1.2.3": "1.2.3", "v1.2.3-4-gabc": "1.2.3+4+gabc",
		"0382c97": "0~20231114221320.0382c97", "abc-dirty": "0~20231114221320.abc+dirty"} {
		r := release{version: version, when: time.Unix(1700000000, 0).UTC()}
		if got := r.debVersion(); got != want {
			t.Errorf("%s: %s, want %s", version, got, want)
		}
	}
}

// dpkg orders the versions of a release: development builds by the time of their commits, then
// prereleases, then the release.
func TestVersionsOfThePackageAreOrdered(t *testing.T) {
	if _, err := exec.LookPath("dpkg"); err != nil {
		t.Skip("needs: dpkg, which compares versions of packages")
	}
	var before string
	for i, version := range []string{"f382c97", "v1.1.9", "v1.2.0-dev+ffffffff", "v1.2.0-dev+00000000",
		"v1.2.0-dev+00000000-next", "v1.2.0-rc.1",
		"v1.2.0-rc.2", "v1.2.0", "v1.2.0+00000000", "v1.2.1-dev+00000000"} {
		r := release{version: version, when: time.Unix(1700000000+int64(i), 0).UTC()}
		if version == "v1.2.0-dev+00000000-next" {
			r.when = r.when.Add(-time.Second) // the same commit
		}
		if strings.ContainsAny(r.debVersion(), " _/") {
			t.Errorf("%s: %q is no version of a package", version, r.debVersion())
		}
		if before != "" {
			if out, err := exec.Command("dpkg", "--compare-versions", before, "lt",
				r.debVersion()).CombinedOutput(); err != nil {
				t.Errorf("%s (%s) does not follow %s: %v %s", r.debVersion(), version, before, err, out)
			}
		}
		before = r.debVersion()
	}
}

func TestWhatCannotBePacked(t *testing.T) {
	r := built(t, time.Now())
	if err := os.WriteFile(filepath.Join(r.root, "usr/bin/script"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := r.pack(); err == nil || !strings.Contains(err.Error(), "what script is made of") {
		t.Errorf("a program that does not say what it is made of: %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(r.out, "*.new")); len(left) > 0 {
		t.Errorf("%v is left", left)
	}
	if err := checksums(t.TempDir(), "v1"); err == nil {
		t.Error("sums of nothing")
	}
}
