package docpages

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const docs = "../../docs"

func TestPagesAreRead(t *testing.T) {
	page := "text `kctl cluster up -f x` and `kctl` and `make it`\n```console\n$ a b\nNAME …\n…\nw1 … yes\n$ " +
		"c\n```\n$ no command\n" +
		"```\nd e   # why\nf \"#\"\n\n```\n```yaml\n$ nor this\n```\n```text\nnor this\n```\n" +
		"1. step\n\n   ```console\n   $ g h\n   w1 … yes\n   ```\n2. step\n   ```\n   i j\n   ```\n`make k`\n"
	all := Lines("p", page)
	var texts []string
	for _, l := range all {
		texts = append(texts, strconv.Itoa(l.Number)+" "+l.Text)
	}
	if want := []string{"1 kctl cluster up -f x", "1 make it", "3 a b", "7 c", "11 d e", `12 f "#"`, "24 g h", "29 i j",
		"31 make k"}; !slices.Equal(texts, want) {
		t.Fatalf("%q, want %q", texts, want)
	}
	if !slices.Equal(all[6].Shown, []string{"w1 … yes"}) {
		t.Errorf("a code block within a list has the output %q", all[6].Shown)
	}
	if all[0].InCodeBlock || !all[2].InCodeBlock || !all[4].InCodeBlock || !all[7].InCodeBlock || all[8].InCodeBlock {
		t.Errorf("lines in code blocks: %+v", all)
	}
	for output, want := range map[string]bool{
		"NAME  AGE\nw0 1s yes\nw1  7s  yes\n": true, "NAME\nw1 yes\n": true, "NAME AGE\nw0\n": false,
		"w1 7s yes\n":      false,
		"NAME\nw1 7s no\n": false, "NAME\nw1 7s yes\nmore\n": false, "": false,
	} {
		if all[2].MatchesOutput(output) != want {
			t.Errorf("output %q matches the page: %v", output, !want)
		}
	}
	if all[3].MatchesOutput("something\n") || !all[3].MatchesOutput("") {
		t.Error("a line without output must match an empty output only")
	}
}

// Every command line of the pages for operators is run by a test on machines, or its row has the
// reason why not. Every row belongs to a line of a page and to tests that exist.
func TestEveryLineIsAccountedFor(t *testing.T) {
	known := map[string]commandRow{}
	for _, r := range commandRows {
		if _, twice := known[r.line]; twice {
			t.Errorf("%q has two rows", r.line)
		}
		said := 0
		for _, s := range []string{r.by, r.reason, r.like} {
			if s != "" {
				said++
			}
		}
		if said != 1 {
			t.Errorf("the row of %q must have either tests, a reason, or the line that it is like", r.line)
		}
		known[r.line] = r
	}
	seen := map[string]bool{}
	for _, subject := range Operators {
		all, err := ReadSubject(docs, subject.Name)
		if err != nil {
			t.Fatal(err)
		}
		if len(all) < 10 {
			t.Errorf("the pages of %s have %d command lines, want at least 10", subject.Name, len(all))
		}
		for _, l := range all {
			if _, ok := known[l.Text]; ok {
				seen[l.Text] = true
			} else if l.InCodeBlock || !slices.ContainsFunc(commandRows, func(r commandRow) bool {
				return strings.HasPrefix(r.line,
					l.Text+" ")
			}) {
				t.Errorf("docs/%s.md, line %d: %q is in no row of test/docpages/rows_test.go: say which test runs it",
					l.Page, l.Number, l.Text)
			}
		}
	}
	tests, onMachines := declaredTests(t), stringLiterals(t, "../vm")
	for _, r := range commandRows {
		if !seen[r.line] {
			t.Errorf("no page contains %q: remove its row", r.line)
		}
		if r.like != "" && known[r.like].by == "" {
			t.Errorf("%q refers to %q, which no test runs", r.line, r.like)
		}
		run := strings.Split(r.by, ", ")
		if onOne := slices.Contains(run, machinesTest) || slices.Contains(run, machinesUpgradeTest); r.by != "" &&
			onOne == (r.notOnMachines != "") {
			t.Errorf("%q: want a test on machines, %s or %s, or a sentence why none runs it there, and not both",
				r.line, machinesTest, machinesUpgradeTest)
		}
		for _, by := range run {
			if by != "" && !slices.Contains(tests, by) {
				t.Errorf("%q is run by %s, which does not exist", r.line, by)
			}
			if by == machinesTest && !slices.Contains(onMachines, r.line) {
				t.Errorf("%q is run by %s, but no file of test/vm contains it", r.line, by)
			}
		}
	}
}

// declaredTests returns the names of all tests of the module.
func declaredTests(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("git", "grep", "-h", "--untracked", "-o", "-E", `^func Test[A-Za-z0-9_]+\(`, "--",
		":(top)*_test.go").Output()
	if err != nil {
		t.Fatalf("git grep: %v", err)
	}
	return regexp.MustCompile(`Test\w+`).FindAllString(string(out), -1)
}

// stringLiterals returns the string literals in the test files of a directory.
func stringLiterals(t *testing.T, folder string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*_test.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: %v (%v)", folder, files, err)
	}
	var out []string
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(f, func(n ast.Node) bool {
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text, ok := constantString(e)
			if ok {
				out = append(out, text)
			}
			return !ok
		})
	}
	return out
}

// constantString returns the value of a string literal or of a concatenation of string literals.
func constantString(e ast.Expr) (text string, ok bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, e.Kind == token.STRING && err == nil
	case *ast.BinaryExpr:
		left, ok := constantString(e.X)
		if !ok || e.Op != token.ADD {
			return "", false
		}
		right, ok := constantString(e.Y)
		return left + right, ok
	}
	return "", false
}
