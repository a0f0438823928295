package definitions

import (
	"bytes"
	"compress/gzip"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

var rewrite = flag.Bool("rewrite", false, "take the definitions from the modules that go.mod pins")

// moduleOf is the folder of a bundle's module in the release that go.mod pins.
func moduleOf(t *testing.T, b Bundle) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Version}} {{.Dir}}", b.Module).Output()
	if err != nil {
		t.Fatalf("go list -m %s: %v", b.Module, err)
	}
	release, dir, _ := strings.Cut(strings.TrimSpace(string(out)), " ")
	if release != b.Release {
		t.Fatalf("go.mod pins %s %s, and the bundle is of %s", b.Module, release, b.Release)
	}
	return dir
}

// The data are their project's own, whole and unchanged, with its licence and a notice that names the release.
func TestAsPublished(t *testing.T) {
	for _, b := range All {
		t.Run(b.Name, func(t *testing.T) {
			dir := moduleOf(t, b)
			var want bytes.Buffer
			for _, f := range b.Files {
				data, err := os.ReadFile(filepath.Join(dir, f))
				if err != nil {
					t.Fatal(err)
				}
				want.WriteString("---\n")
				want.Write(data)
				want.WriteString("\n")
			}
			if *rewrite {
				var packed bytes.Buffer
				z, _ := gzip.NewWriterLevel(&packed, gzip.BestCompression)
				if _, err := z.Write(want.Bytes()); err != nil {
					t.Fatal(err)
				}
				if err := z.Close(); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(b.packedPath(), packed.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			have, err := b.YAML()
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(have, want.Bytes()) {
				t.Errorf("the definitions differ from those of %s %s: run the test with -rewrite",
					b.Module, b.Release)
			}
			licence, err := os.ReadFile(filepath.Join(dir, "LICENSE"))
			if err != nil {
				t.Fatal(err)
			}
			if ours, err := bundleFolders.ReadFile(b.Name + "/LICENSE"); err != nil || !bytes.Equal(ours, licence) {
				t.Errorf("the licence beside the definitions is not that of the project (%v)", err)
			}
			if notice, err := bundleFolders.ReadFile(b.Name + "/NOTICE"); err != nil ||
				!strings.Contains(string(notice), b.Release) {
				t.Errorf("the notice does not name release %s (%v)", b.Release, err)
			}
		})
	}
}

func TestDefinitions(t *testing.T) {
	for _, b := range All {
		all, err := b.Definitions()
		if err != nil {
			t.Fatal(err)
		}
		if len(all) != len(b.Files) {
			t.Errorf("%s: %d definitions of %d files", b.Name, len(all), len(b.Files))
		}
		for _, u := range all {
			if u.GetKind() != "CustomResourceDefinition" || u.GetAnnotations()[b.releaseKey()] != b.Release {
				t.Errorf("%s %s is of release %q, not of %s", u.GetKind(), u.GetName(),
					u.GetAnnotations()[b.releaseKey()], b.Release)
			}
		}
	}
}

// What unpacks into more than it may is refused.
func TestUnpackIsBounded(t *testing.T) {
	var bomb bytes.Buffer
	z := gzip.NewWriter(&bomb)
	if _, err := z.Write(bytes.Repeat([]byte(" "), maxUnpackedBytes+1)); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := unpackDefinitions(bomb.Bytes()); err == nil {
		t.Errorf("%d bytes that become %d were taken", bomb.Len(), maxUnpackedBytes+1)
	}
}

func definition(release, channel string, stored ...any) *unstructured.Unstructured {
	u := &unstructured.Unstructured{Object: map[string]any{
		"spec":   map[string]any{"versions": []any{map[string]any{"name": "v1"}, map[string]any{"name": "v1beta1"}}},
		"status": map[string]any{"storedVersions": stored},
	}}
	notes := map[string]string{}
	if release != "" {
		notes[Gateway.ReleaseKey] = release
	}
	if channel != "" {
		notes[Gateway.ChannelKey] = channel
	}
	u.SetAnnotations(notes)
	return u
}

func TestJudge(t *testing.T) {
	want := definition("v1.6.3", "standard")
	for _, c := range []struct {
		name   string
		have   *unstructured.Unstructured
		want   Verdict
		reason string
	}{
		{"none", nil, Create, ""},
		{"the same", definition("v1.6.3", "standard", "v1"), Unchanged, ""},
		{"older", definition("v1.5.0", "standard", "v1beta1"), Upgrade, "from v1.5.0 to v1.6.3"},
		{"older by number, not by letter", definition("v1.6.2", "standard", "v1"), Upgrade, "from v1.6.2"},
		{"newer", definition("v1.10.0", "standard", "v1"), Keep, "newer"},
		{"a candidate of this release", definition("v1.6.3-rc.1", "standard", "v1"), Upgrade, "from v1.6.3-rc.1"},
		{"experimental", definition("v1.5.0", "experimental", "v1"), Keep, `channel "experimental"`},
		{"says nothing", definition("", "", "v1"), Keep, `channel ""`},
		{"no release", definition("", "standard", "v1"), Keep, "does not say its release"},
		{"strange release", definition("latest", "standard", "v1"), Keep, "does not say its release"},
		{"stored in what is gone", definition("v0.8.0", "standard", "v1", "v1alpha2"), Keep,
			"stored in version v1alpha2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, reason := Gateway.Judge(c.have, want)
			if got != c.want || !strings.Contains(reason, c.reason) {
				t.Errorf("%v (%s), want %v (%s)", got, reason, c.want, c.reason)
			}
		})
	}
}

// A project that says no release in its definitions: ours is noted, and what does not have the note is the user's own.
func TestReleaseIsNoted(t *testing.T) {
	b := Gateway
	b.ReleaseKey, b.ChannelKey = "", ""
	all, err := b.Definitions()
	if err != nil {
		t.Fatal(err)
	}
	if got := all[0].GetAnnotations()[releaseAnnotation]; got != b.Release {
		t.Errorf("release %q is noted, want %s", got, b.Release)
	}
	theirs := all[0].DeepCopy()
	theirs.SetAnnotations(nil)
	if got, _ := b.Judge(theirs, all[0]); got != Keep {
		t.Errorf("one without our note is %v, want kept", got)
	}
}
