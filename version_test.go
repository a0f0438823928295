package keelson

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The version of a build requires no git tag. It consists of the file VERSION and of the commit,
// unless the commit is that of the release.
func TestVersionOfABuild(t *testing.T) {
	script, err := os.ReadFile("scripts/version")
	if err != nil {
		t.Fatal(err)
	}
	dir, write := newScriptFolder(t)
	root := filepath.Join(dir, "house")
	write("house/scripts/version", string(script))
	git := func(args ...string) string {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", root, "-c", "user.name=a", "-c", "user.email=a@example.com"},
			args...)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("git %v: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	version := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(filepath.Join(root, "scripts/version"), args...)
		cmd.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+dir)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return "error: " + strings.TrimSpace(string(out))
		}
		return strings.TrimSpace(string(out))
	}
	is := func(name, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: version %q, want %q", name, got, want)
		}
	}

	write("house/VERSION", "v1.2.0-dev\n")
	is("an archive without git", version(), "v1.2.0-dev")
	git("init", "-q")
	git("add", ".")
	git("commit", "-q", "-m", "development")
	first := git("rev-parse", "HEAD")
	is("a commit of development", version(), "v1.2.0-dev+"+first[:8])
	write("house/VERSION", "v1.2.0\n")
	is("a change that is not committed", version(), "v1.2.0+"+first[:8]+".dirty")
	git("commit", "-q", "-a", "-m", "release")
	is("the commit of the release", version(), "v1.2.0")
	git("tag", "v9.9.9")
	is("a tag has no effect", version(), "v1.2.0")
	write("house/other", "text\n")
	is("an untracked file has no effect", version(), "v1.2.0")
	git("add", ".")
	git("commit", "-q", "-m", "next")
	second := git("rev-parse", "HEAD")
	is("a commit after the release", version(), "v1.2.0+"+second[:8])
	is("another commit", version(first), "v1.2.0-dev+"+first[:8])
	git("rm", "-q", "VERSION")
	git("commit", "-q", "-m", "none")
	third := git("rev-parse", "HEAD")
	is("a commit without the file", version(third), third[:8])
	for _, bad := range []string{"1.2.0", "v1.2", "v1.2.0-", "v1.2.0+x", "v1.2.0 x", ""} {
		write("house/VERSION", bad)
		is("a bad file", version(), "error: version: VERSION: want a version such as v1.2.0 or v1.3.0-dev, got '"+bad+
			"'")
	}
}

// The checked-in version is one that scripts/version accepts, and CHANGELOG.md has a section for
// it.
func TestVersionHasAChangelog(t *testing.T) {
	out, err := exec.Command("scripts/version").Output()
	if err != nil {
		t.Fatal(err)
	}
	number, _, development := strings.Cut(strings.TrimSpace(string(out)), "-dev")
	number, _, _ = strings.Cut(number, "+")
	changelog, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	section := "## " + number + " - 2"
	if development {
		section = "## Unreleased"
	}
	if !strings.Contains(string(changelog), "\n"+section) {
		t.Errorf("CHANGELOG.md has no section %q for version %s", section, out)
	}
}
