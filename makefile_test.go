package keelson

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// makeTargets returns the targets of the Makefile with their help texts, in the order of the file.
func makeTargets(t *testing.T) (names []string, texts map[string]string) {
	t.Helper()
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	texts = map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^([a-z][a-z0-9 -]*):([^=\n].*|)$`).FindAllStringSubmatch(string(makefile),
		-1) {
		_, text, _ := strings.Cut(m[2], "## ")
		for _, name := range strings.Fields(m[1]) {
			if texts[name] == "" {
				names = append(names, name)
			}
			texts[name] = text
		}
	}
	if len(names) < 20 {
		t.Fatalf("the Makefile has %d targets, want at least 20", len(names))
	}
	return names, texts
}

// runMake runs make without the variables that an outer make has set in the environment.
func runMake(args ...string) ([]byte, error) {
	cmd := exec.Command("make", append([]string{"--no-print-directory"}, args...)...)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		return strings.HasPrefix(name, "MAKE") ||
			slices.Contains([]string{"MFLAGS", "PKG", "RUN", "ARGS", "RACE"}, name)
	})
	return cmd.CombinedOutput()
}

// Every target of the Makefile is phony and has a help text. `make help` lists all targets,
// aligned, in lines of at most 100 columns, and is what `make` without a target runs.
func TestMakeHelpListsEveryTarget(t *testing.T) {
	names, texts := makeTargets(t)
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	phony := strings.Fields(regexp.MustCompile(`(?m)^\.PHONY:(.*)$`).FindString(string(makefile)))
	for _, name := range names {
		if texts[name] == "" {
			t.Errorf("Makefile: target %s has no ## text", name)
		}
		if !slices.Contains(phony, name) {
			t.Errorf("Makefile: target %s is missing in .PHONY", name)
		}
	}
	for _, args := range [][]string{{"help"}, nil} {
		out, err := runMake(args...)
		if err != nil {
			t.Fatalf("make %v: %v\n%s", args, err, out)
		}
		var listedPackage []string
		column := 0
		for line := range strings.Lines(string(out)) {
			line = strings.TrimSuffix(line, "\n")
			if len(line) > 100 {
				t.Errorf("make %v: a line of %d columns: %s", args, len(line), line)
			}
			m := regexp.MustCompile(`^  ([a-z0-9-]+)( +)(\S.*)$`).FindStringSubmatch(line)
			if m == nil {
				continue
			}
			listedPackage = append(listedPackage, m[1])
			if m[3] != texts[m[1]] {
				t.Errorf("make %v: the text of %s is %q, want %q", args, m[1], m[3], texts[m[1]])
			}
			if at := 2 + len(m[1]) + len(m[2]); column == 0 {
				column = at
			} else if at != column {
				t.Errorf("make %v: the text of %s starts in column %d, others in column %d", args, m[1], at, column)
			}
		}
		if !slices.Equal(listedPackage, names) {
			t.Errorf("make %v lists %v, want %v", args, listedPackage, names)
		}
	}
}

// `make unit PKG=... RUN=...` runs the named tests of the named packages, and fails if there are
// none.
func TestUnitRunsNamedTests(t *testing.T) {
	if _, err := os.Stat("scripts/test"); err != nil { // so that "go test" runs this again when the script has changed
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		args []string
		want string // in the output
		ok   bool
	}{
		{"a test of a package", []string{"PKG=internal/quantitytext", "RUN=^Test", "ARGS=-v"}, "--- PASS: Test", true},
		{"with a leading dot, and all tests", []string{"PKG=./internal/quantitytext/"},
			"keelson.dev/keelson/internal/quantitytext", true},
		{"no such test", []string{"PKG=internal/quantitytext", "RUN=^TestThatDoesNotExist$"},
			"no test matches RUN='^TestThatDoesNotExist$'", false},
		{"no such package", []string{"PKG=internal/missing"}, "PKG: there is no folder internal/missing", false},
		{"a test without a package", []string{"RUN=^TestMakeHelp$"}, "RUN needs PKG", false},
	} {
		out, err := runMake(append([]string{"unit"}, c.args...)...)
		if (err == nil) != c.ok || !strings.Contains(string(out), c.want) {
			t.Errorf("%s: %v, want success %v and %q in\n%s", c.name, err, c.ok, c.want, out)
		}
	}
}
