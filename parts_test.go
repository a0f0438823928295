package keelson

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// readUnraced returns the content of scripts/unraced: packages, and tests with their packages, that
// run without the race detector.
func readUnraced(t *testing.T) (packages []string, tests map[string]string) {
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
			t.Fatalf("scripts/unraced: %q: want a package, or a package and a test that is not listed yet", line)
		}
		if !reasoned {
			t.Errorf("scripts/unraced: %q: no comment above it has the reason", line)
		}
	}
	return packages, tests
}

// A test of scripts/unraced is excluded by name from the run with the race detector. Its package
// must declare it, and no other package of that run may, because its test would not run at all.
func TestWhatIsNotRacedRuns(t *testing.T) {
	packages, tests := readUnraced(t)
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
			continue // the whole package runs without the race detector
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
			t.Errorf("scripts/unraced: %s of %s: the whole package is already listed", test, pkg)
		}
	}
}

// findConcurrency returns the position of the first statement of a Go file that starts a goroutine
// or makes a test parallel, or "".
func findConcurrency(path string) (string, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
	if err != nil {
		return "", err
	}
	found := token.NoPos
	ast.Inspect(file, func(n ast.Node) bool {
		starts := false
		switch n := n.(type) {
		case *ast.GoStmt:
			starts = true
		case *ast.SelectorExpr: // WaitGroup.Go and its like, testing.T.Parallel, time.AfterFunc, httptest.NewServer
			starts = slices.Contains([]string{"Go", "Parallel", "RunParallel", "AfterFunc", "NewServer",
				"NewTLSServer"}, n.Sel.Name)
		case *ast.ImportSpec: // tests in virtual time have several goroutines
			starts = n.Path.Value == `"testing/synctest"` || n.Path.Value == `"`+module+`/internal/virtual"` ||
				n.Path.Value == `"`+module+`/controlplane/controllers/testcluster"`
		}
		if starts && found == token.NoPos {
			found = n.Pos()
		}
		return true
	})
	if found == token.NoPos {
		return "", nil
	}
	return fset.Position(found).String(), nil
}

// Packages in the section Alone of scripts/unraced, and their tests, start no goroutine. A package
// that starts goroutines must run with the race detector.
func TestWhatIsAloneStartsNoGoroutine(t *testing.T) {
	data, err := os.ReadFile("scripts/unraced")
	if err != nil {
		t.Fatal(err)
	}
	_, alone, ok := strings.Cut(string(data), "\n# Alone: ")
	if !ok {
		t.Fatal("scripts/unraced has no section Alone")
	}
	alone, _, _ = strings.Cut(alone, "\n\n")
	looked := 0
	for _, pkg := range strings.Split(alone, "\n")[1:] {
		if strings.HasPrefix(pkg, "#") {
			continue
		}
		files, err := filepath.Glob(filepath.Join(pkg, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			looked++
			if at, err := findConcurrency(file); err != nil || at != "" {
				t.Errorf("scripts/unraced: %s starts goroutines: %s: %v", pkg, at, err)
			}
		}
	}
	if looked < 100 {
		t.Errorf("%d files were checked, want at least 100", looked)
	}
}

// `make soak` runs tests with more repetitions than `make test` has. Each of these tests is
// declared in the package that scripts/test names, and so is the flag for its repetitions.
func TestRepeatedTestsAreDeclared(t *testing.T) {
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^soak:.*\n(\t.*\n)*\t@scripts/test repeated\n`).Match(makefile) {
		t.Error("Makefile: soak does not run scripts/test repeated")
	}
	script, err := os.ReadFile("scripts/test")
	if err != nil {
		t.Fatal(err)
	}
	_, body, _ := strings.Cut(string(script), "\nrepeated() {\n")
	body, _, _ = strings.Cut(body, "\n}\n")
	lines := regexp.MustCompile(`raced_test .*\./(\S+) -run '\^(\w+)\$' -([a-z.]+)=`).FindAllStringSubmatch(body, -1)
	if len(lines) != strings.Count(body, "\n")+1 {
		t.Fatalf("scripts/test: repeated has lines of another form: want raced_test ./PACKAGE -run '^TEST$' "+
			"-FLAG=VALUE:\n%s", body)
	}
	for _, m := range lines {
		files, err := filepath.Glob(filepath.Join(m[1], "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		var source strings.Builder
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			source.Write(data)
		}
		if !strings.Contains(source.String(), "\nfunc "+m[2]+"(t *testing.T)") {
			t.Errorf("scripts/test: repeated runs %s, which %s does not declare", m[2], m[1])
		}
		if !regexp.MustCompile(`flag\.\w+\("` + regexp.QuoteMeta(m[3]) + `",`).MatchString(source.String()) {
			t.Errorf("scripts/test: repeated sets -%s, which the tests of %s do not define", m[3], m[1])
		}
	}
}

// separateModules are the other modules of the tree that the part unit tests together with this
// module.
var separateModules = []string{"deploy/dist", "test/openapi/upstream"}

func TestModulesApartAreTested(t *testing.T) {
	script, err := os.ReadFile("scripts/test")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range separateModules {
		if !strings.Contains(string(script), "(cd "+dir+" && run plain_test ") {
			t.Errorf("scripts/test does not run the tests of the module %s", dir)
		}
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err != nil {
			t.Error(err)
		}
	}
}

// Every package belongs to exactly one part of `make test`, and every part is run.
func TestEveryPackageIsTested(t *testing.T) {
	packages, tests := readUnraced(t)
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
		t.Errorf("scripts/test: part %v has %s, which is not a package", in, pkg)
	}
	for _, pkg := range packages {
		t.Errorf("scripts/unraced: %s is not a package", pkg)
	}
	if len(tests) == 0 {
		t.Error("scripts/unraced has no tests")
	}
}

// newScriptFolder returns a new directory, and a function that writes an executable file below it.
func newScriptFolder(t *testing.T) (dir string, write func(name, content string)) {
	dir = t.TempDir()
	return dir, func(name, content string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// Continuous integration runs the tests on virtual machines only if the file .ci/with-vm exists.
func TestCIRunsMachinesWhenAsked(t *testing.T) {
	script, err := os.ReadFile(".ci/run")
	if err != nil {
		t.Fatal(err)
	}
	dir, write := newScriptFolder(t)
	write("house/.ci/run", string(script))
	write("bin/make", "#!/bin/sh\necho make \"$@\"\n")
	for _, c := range []struct{ file, want string }{{"", "make test\n"},
		{"house/.ci/with-vm", "make test\nmake test-vm\n"}} {
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

// The setup script deletes its temporary directories when it has finished, failed or been
// interrupted. It has one for each of the two steps of the guest.
func TestSetupLeavesNothing(t *testing.T) {
	script, err := os.ReadFile("scripts/setup")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, stop, says string }{
		{"done", "", "fetching libtirpc-common for the guest\n"},
		{"the first step fails", "case $* in *linux-image*) exit 1;; esac",
			"apt-get could not download linux-image-6: look at 'apt-get download linux-image-6'\n"},
		{"the second step fails", "case $* in *libtirpc*) exit 1;; esac",
			"apt-get could not download libtirpc-common: look at 'apt-get download libtirpc-common'\n"},
		{"interrupted", "case $* in *libtirpc*) kill -TERM 0; exec sleep 60;; esac",
			"fetching libtirpc-common for the guest\n"},
	} {
		dir, write := newScriptFolder(t)
		write("house/scripts/setup", string(script))
		write("bin/id", "#!/bin/sh\necho 1000\n") // a user who installs nothing
		for _, name := range []string{"gcc", "pkg-config", "nft", "iptables", "busybox", "nsenter", "runc",
			"qemu-system-x86_64", "mkfs.xfs", "xz", "zstd"} {
			write("bin/"+name, "#!/bin/sh\n")
		}
		write("bin/go", "#!/bin/sh\necho go1.26.0\n")
		write("bin/apt-cache", "#!/bin/sh\n[ $1 != depends ] || echo '  Depends: linux-image-6'\n")
		write("bin/apt-get", `#!/bin/sh
[ "$1" = download ] || exit 0
`+c.stop+`
: >"$3.deb"
`)
		write("bin/dpkg-deb", `#!/bin/sh
mkdir -p "$3/boot" "$3/lib/modules/6/kernel" && : >"$3/boot/vmlinuz-6"
`)
		write("tmp/there", "")
		cmd := exec.Command("bash", filepath.Join(dir, "house/scripts/setup"), "guest")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // the signal is for the script and its children
		cmd.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"),
			"TMPDIR="+filepath.Join(dir, "tmp"))
		out, err := cmd.CombinedOutput()
		if (err == nil) != (c.stop == "") || !strings.Contains(string(out), c.says) {
			t.Errorf("%s: %v: %q, want it to say %q", c.name, err, out, c.says)
		}
		left, err := os.ReadDir(filepath.Join(dir, "tmp"))
		if err != nil || len(left) != 1 {
			t.Errorf("%s: the temporary directory contains %v: %v", c.name, left, err)
		}
	}
}
