package docpages

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	linkPattern    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	headingPattern = regexp.MustCompile(`^#+ +(.*)$`)
	linkInHeading  = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
	notInFragment  = regexp.MustCompile(`[^\p{L}\p{N}\- _]`)
)

// headingFragments returns the fragments that the headings of a page define, as GitHub derives
// them.
func headingFragments(text string) map[string]bool {
	found, box := map[string]bool{}, false
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimLeft(line, " "), "```") {
			box = !box
		}
		if m := headingPattern.FindStringSubmatch(strings.TrimSpace(line)); m != nil && !box {
			title := linkInHeading.ReplaceAllString(m[1], "$1")
			found[strings.ReplaceAll(notInFragment.ReplaceAllString(strings.ToLower(title), ""), " ", "-")] = true
		}
	}
	return found
}

// brokenLinks returns the links of a page whose target file or heading does not exist.
func brokenLinks(page, text string) []string {
	var broken []string
	for _, m := range linkPattern.FindAllStringSubmatch(text, -1) {
		path, fragment, _ := strings.Cut(m[1], "#")
		if strings.Contains(path, "://") {
			continue
		}
		target := page
		if path != "" {
			target = filepath.Join(filepath.Dir(page), path)
		}
		raw, err := os.ReadFile(target)
		if info, statErr := os.Stat(target); statErr == nil && info.IsDir() {
			err = nil
		}
		if err != nil || fragment != "" && !headingFragments(string(raw))[fragment] {
			broken = append(broken, m[1])
		}
	}
	return broken
}

// pagePath matches the path of a page in a text outside docs. A path within a URL does not match.
var pagePath = regexp.MustCompile(`(?:^|[^/\w.])(docs/[\w/-]+\.md)`)

// Help texts, errors, comments and documents outside docs name pages that exist.
func TestNamedPagesExist(t *testing.T) {
	out, err := exec.Command("git", "-C", "../..", "grep", "-I", "-n", "--untracked", "-E", `docs/[A-Za-z0-9_/-]+\.md`,
		"--", ":!docs/").Output()
	if err != nil {
		t.Fatalf("git grep: %v", err)
	}
	found := 0
	for line := range strings.Lines(string(out)) {
		for _, m := range pagePath.FindAllStringSubmatch(line, -1) {
			found++
			if m[1] == "docs/specification.md" { // a page of github.com/kubernetes/dns
				continue
			}
			if _, err := os.Stat(filepath.Join("../..", m[1])); err != nil {
				t.Errorf("%.140s: %s does not exist", strings.TrimSpace(line), m[1])
			}
		}
	}
	if found < 20 {
		t.Errorf("%d names of pages were found, want at least 20", found)
	}
}

// Links between pages lead to a file that exists and to one of its headings.
func TestLinksResolve(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "b.md"), []byte("# One, `two` & [three](c)\n```\n# no heading\n```\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	text := "[a](b.md#one-two--three) [b](b.md#no-heading) [c](gone.md) [d](https://example.com/x) [e](#top)"
	if got := strings.Join(brokenLinks(filepath.Join(dir, "b.md"), text), " "); got != "b.md#no-heading gone.md #top" {
		t.Errorf("broken links %q", got)
	}
	files := []string{"../../README.md"}
	err := filepath.WalkDir(docs, func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") {
			files = append(files, path)
		}
		return err
	})
	if err != nil || len(files) < 20 {
		t.Fatalf("%d pages: %v", len(files), err)
	}
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, to := range brokenLinks(file, string(raw)) {
			t.Errorf("%s: the target of the link %s does not exist", strings.TrimPrefix(file, "../../"), to)
		}
	}
}
