package main

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// parts is the bill of materials as a reader would use it to find what a program contains.
type parts struct {
	Components   []struct{ Name, Version, Purl string }
	Dependencies []struct {
		Ref       string
		DependsOn []string
	}
}

func (p *parts) version(t *testing.T, name string) string {
	t.Helper()
	for _, c := range p.Components {
		if c.Name == name {
			return c.Version
		}
	}
	t.Errorf("the list of parts has no %s", name)
	return ""
}

func (p *parts) of(t *testing.T, ref string) []string {
	t.Helper()
	for _, d := range p.Dependencies {
		if d.Ref == ref {
			return d.DependsOn
		}
	}
	t.Errorf("the list of parts does not say what %s is made of", ref)
	return nil
}

// The bill of materials has every program of a release with everything it is built from: its
// modules, its own module if that is not Keelson's, and C libraries.
func TestListOfParts(t *testing.T) {
	r := built(t, time.Now())
	self, err := os.Executable() // it has dependencies and a module of Keelson's
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.root, "usr/bin/keelson-agent"), program, 0o755); err != nil {
		t.Fatal(err)
	}
	const plugins = "github.com/containernetworking/plugins"
	goAt(t, "../..", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(r.root, "opt/cni/bin/bridge"),
		plugins+"/plugins/main/bridge")
	released := goAt(t, "../..", "list", "-m", "-f", "{{.Version}}", plugins)
	cni := goAt(t, "../..", "list", "-m", "-f", "{{.Version}}", "github.com/containernetworking/cni")

	var list parts
	if err := json.Unmarshal(packed(t, r)[r.name()+".cdx.json"], &list); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"keelson-agent": r.version, "keelson-oci": r.version,
		"keelson-entry": r.version,
		"bridge":        released, plugins: released, "libseccomp": "2.5.4", "glibc": "2.36"} {
		if got := list.version(t, name); got != want {
			t.Errorf("%s has version %q, want %q", name, got, want)
		}
	}
	for ref, want := range map[string][]string{
		"keelson": {"file:/usr/bin/keelson-agent", "file:/opt/cni/bin/bridge",
			"image:entry.tar/keelson-entry"},
		"file:/usr/bin/keelson-agent": {"pkg:golang/github.com/goreleaser/nfpm/v2@", "pkg:golang/stdlib@go1."},
		"file:/opt/cni/bin/bridge": {"pkg:golang/" + plugins + "@" + released,
			"pkg:golang/github.com/containernetworking/cni@" + cni, "pkg:golang/stdlib@go1."},
		"file:/usr/bin/keelson-oci":     {"pkg:generic/libseccomp@2.5.4", "pkg:generic/glibc@2.36"},
		"image:entry.tar/keelson-entry": {"pkg:golang/stdlib@go1."},
	} {
		for _, w := range want {
			if of := list.of(t, ref); !slices.ContainsFunc(of, func(s string) bool { return strings.HasPrefix(s, w) }) {
				t.Errorf("%s has no %s: %q", ref, w, of)
			}
		}
	}
	for _, d := range list.Dependencies {
		for _, on := range d.DependsOn {
			if strings.HasPrefix(on, "pkg:generic/") && d.Ref != "file:/usr/bin/keelson-oci" ||
				strings.Contains(on, "keelson.dev") {
				t.Errorf("%s has %s", d.Ref, on)
			}
		}
	}
}

// Unknown content of a program is an error and not omitted.
func TestListOfPartsIsWhole(t *testing.T) {
	linked := func(l string) func(*release) { return func(r *release) { r.linked = []string{l} } }
	image := func(content string) func(*release) {
		return func(r *release) {
			if err := os.WriteFile(r.images[0], []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	r := built(t, time.Now())
	all, err := r.files()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		damage func(*release)
		want   string
	}{
		{"a library without a version", linked("keelson-oci=glibc@"),
			"-linked keelson-oci=glibc@: want PROGRAM=LIBRARY@VERSION"},
		{"a library without a name", linked("keelson-oci=2.36"),
			"-linked keelson-oci=2.36: want PROGRAM=LIBRARY@VERSION"},
		{"a library of no program", linked("keelson-oc=glibc@2.36"),
			"-linked keelson-oc=glibc@2.36: the release has no program keelson-oc"},
		{"an archive without a program", image(strings.Repeat("\x00", 1024)),
			"entry.tar: no layer of it has a program"},
		{"an archive that is none", image(strings.Repeat("x", 1024)), "entry.tar: archive/tar: invalid tar header"},
	} {
		t.Run(c.name, func(t *testing.T) {
			damaged := *r
			c.damage(&damaged)
			if err := damaged.bom(io.Discard, all); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %s", err, c.want)
			}
		})
	}
}
