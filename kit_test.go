package keelson

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// contributorPages are the pages that lead contributors and maintainers through the tree.
var contributorPages = []string{
	"CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", ".github/PULL_REQUEST_TEMPLATE.md",
	"docs/explanation/compatibility-policy.md", "docs/how-to/release.md",
}

// examples are parts of the paths that the recipes of CONTRIBUTING.md create.
var examples = []string{"nodettl", "avoidnode", "gitrepo", "storageversionmigration", "storagemigration",
	"keelsonv1"}

// The contributors' pages name only files, folders, Makefile targets, tests and link targets that
// exist. The file .ci/with-vm is an exception: commits that request virtual machines add it.
func TestContributorPagesNameWhatExists(t *testing.T) {
	targets, _ := makeTargets(t)
	declared, err := exec.Command("git", "grep", "-hoE", "--untracked", "^func Test[A-Za-z0-9_]+", "--",
		"*_test.go").Output()
	if err != nil {
		t.Fatalf("git grep: %v", err)
	}
	tests := strings.Fields(strings.ReplaceAll(string(declared), "func ", ""))
	top :=
		regexp.MustCompile(
			`^(agent|cmd|cni|controlplane|csi|deploy|docs|entry|examples|internal|kctl|proto|raftstore|scripts|test|\.ci|\.github)/`)
	for _, page := range contributorPages {
		data, err := os.ReadFile(page)
		if err != nil {
			t.Error(err)
			continue
		}
		text, looked := string(data), 0
		missing := func(kind, name string) { t.Errorf("%s: %s %s does not exist", page, kind, name) }
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`).FindAllStringSubmatch(text, -1) {
			looked++
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				missing("target of the link", m[1])
			}
		}
		for _, path := range regexp.MustCompile(`[A-Za-z0-9_./-]+`).FindAllString(text, -1) {
			path = strings.TrimSuffix(strings.TrimRight(strings.TrimPrefix(path, "./"), "./"), "/...")
			if !top.MatchString(path) || path == ".ci/with-vm" || slices.ContainsFunc(examples, func(part string) bool {
				return strings.Contains(path, part)
			}) {
				continue
			}
			looked++
			if _, err := os.Stat(path); err != nil {
				missing("file", path)
			}
		}
		for _, m := range regexp.MustCompile("(?m)(?:`|^ *|&& )make (?:-C \\S+ )?([a-z][a-z0-9-]*)").
			FindAllStringSubmatch(text, -1) {
			looked++
			if !slices.Contains(targets, m[1]) {
				missing("target of the Makefile", m[1])
			}
		}
		for _, name := range regexp.MustCompile(`\bTest[A-Z][A-Za-z0-9]+`).FindAllString(text, -1) {
			looked++
			if !slices.Contains(tests, name) {
				missing("test", name)
			}
		}
		if looked == 0 {
			t.Errorf("%s: no name was found", page)
		}
	}
}

// No file of the tree requires a file outside the clone. Only continuous integration checks for
// such a script, and runs it if it exists.
func TestNothingBesideTheCloneIsNeeded(t *testing.T) {
	beside := ".." + "/shared"
	out, err := exec.Command("git", "grep", "-lF", "--untracked", beside).Output()
	if err != nil {
		t.Fatalf("git grep: %v", err)
	}
	if files := strings.Fields(string(out)); !slices.Equal(files, []string{".ci/run"}) {
		t.Errorf("%s is named in %v, want in .ci/run alone", beside, files)
	}
	script, err := os.ReadFile(".ci/run")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(script)) {
		if strings.Contains(line, beside) && !strings.HasPrefix(line, "if [ -x "+beside) {
			t.Errorf(".ci/run: %q does not check whether the script exists", line)
		}
	}
}
