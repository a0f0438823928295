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

// unraced is what scripts/unraced says: packages, and tests with their packages, that run without the race detector.
func unraced(t *testing.T) (packages []string, tests map[string]string) {
	t.Helper()
	data, err := os.ReadFile("scripts/unraced")
	if err != nil {
		t.Fatal(err)
	}
	tests = map[string]string{}
	reasoned := false
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSpace(line)
		words := strings.Fields(line)
		switch {
		case line == "":
			reasoned = false
			continue
		case strings.HasPrefix(line, "#"):
			reasoned = true
			continue
		case len(words) == 1:
			packages = append(packages, words[0])
		case len(words) == 2 && tests[words[1]] == "":
			tests[words[1]] = words[0]
		default:
			t.Fatalf("scripts/unraced: %q: want a package, or a package and a test that is not yet there", line)
		}
		if !reasoned {
			t.Errorf("scripts/unraced: %q: no comment above says why", line)
		}
	}
	return packages, tests
}

// Each test that runs without the race detector is left out of the run with it by its name: that must be one of this
// package and of no other with the detector, where it would run nowhere.
func TestWhatIsNotRacedRuns(t *testing.T) {
	packages, tests := unraced(t)
	declared := map[string][]string{} // test -> folders
	declares := regexp.MustCompile(`(?m)^func (Test\w+|Fuzz\w+|Example\w*)\(`)
	files, err := exec.Command("git", "ls-files", "*_test.go", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	for file := range strings.FieldsSeq(string(files)) {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(packages, filepath.Dir(file)) {
			continue // all of it runs without
		}
		for _, m := range declares.FindAllStringSubmatch(string(data), -1) {
			declared[m[1]] = append(declared[m[1]], filepath.Dir(file))
		}
	}
	for test, pkg := range tests {
		if in := declared[test]; !slices.Equal(in, []string{pkg}) {
			t.Errorf("scripts/unraced: %s of %s is declared in %v", test, pkg, in)
		}
		if slices.Contains(packages, pkg) {
			t.Errorf("scripts/unraced: %s of %s: the package is there as a whole", test, pkg)
		}
	}
}

// Every package belongs to exactly one part of `make test`, and every part is run.
func TestEveryPackageIsTested(t *testing.T) {
	packages, tests := unraced(t)
	out, err := exec.Command("scripts/test", "parts").Output()
	if err != nil {
		t.Fatalf("scripts/test parts: %v", err)
	}
	script, err := os.ReadFile("scripts/test")
	if err != nil {
		t.Fatal(err)
	}
	parts := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		part, pkg, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok {
			t.Fatalf("scripts/test parts: %q", line)
		}
		if !strings.Contains(string(script), "in_part "+part) {
			t.Fatalf("scripts/test runs no part %s, which has %s", part, pkg)
		}
		pkg = strings.TrimPrefix(pkg, module+"/")
		parts[pkg] = append(parts[pkg], part)
	}
	for _, pkg := range listPackages(t) {
		name := strings.TrimPrefix(pkg.ImportPath, module+"/")
		if len(parts[name]) != 1 {
			t.Errorf("%s is in the parts %q of scripts/test, want one", name, parts[name])
		}
		delete(parts, name)
		if at := slices.Index(packages, name); at >= 0 {
			packages = slices.Delete(packages, at, at+1)
		}
	}
	for pkg, in := range parts {
		t.Errorf("scripts/test: part %v has %s, which is no package", in, pkg)
	}
	for _, pkg := range packages {
		t.Errorf("scripts/unraced: %s is no package", pkg)
	}
	if len(tests) == 0 {
		t.Error("scripts/unraced has no tests")
	}
}

// Machines in software are run by continuous integration where a file asks for it, and only there.
func TestCIRunsMachinesWhenAsked(t *testing.T) {
	script, err := os.ReadFile(".ci/run")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write("house/.ci/run", string(script))
	write("bin/make", "#!/bin/sh\necho make \"$@\"\n")
	for _, c := range []struct{ file, want string }{{"", "make test\n"}, {"house/.ci/with-vm", "make test\nmake test-vm\n"}} {
		if c.file != "" {
			write(c.file, "")
		}
		cmd := exec.Command("bash", filepath.Join(dir, "house/.ci/run"))
		cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != c.want {
			t.Errorf("with %q: %v: %q, want %q", c.file, err, out, c.want)
		}
	}
}
