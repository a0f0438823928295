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
	page := "text `kctl cluster up -f x` and `kctl` and `make it`\n```console\n$ a b\nNAME …\n…\nw1 … yes\n$ c\n```\n$ no command\n" +
		"```\nd e   # why\nf \"#\"\n\n```\n```yaml\n$ nor this\n```\n```text\nnor this\n```\n" +
		"1. step\n\n   ```console\n   $ g h\n   w1 … yes\n   ```\n2. step\n   ```\n   i j\n   ```\n`make k`\n"
	all := Lines("p", page)
	var texts []string
	for _, l := range all {
		texts = append(texts, strconv.Itoa(l.Number)+" "+l.Text)
	}
	if want := []string{"1 kctl cluster up -f x", "1 make it", "3 a b", "7 c", "11 d e", `12 f "#"`, "24 g h", "29 i j", "31 make k"}; !slices.Equal(texts, want) {
		t.Fatalf("%q, want %q", texts, want)
	}
	if !slices.Equal(all[6].Shown, []string{"w1 … yes"}) {
		t.Errorf("a box within a list shows %q", all[6].Shown)
	}
	if all[0].Boxed || !all[2].Boxed || !all[4].Boxed || !all[7].Boxed || all[8].Boxed {
		t.Errorf("boxes: %+v", all)
	}
	for output, want := range map[string]bool{
		"NAME  AGE\nw0 1s yes\nw1  7s  yes\n": true, "NAME\nw1 yes\n": true, "NAME AGE\nw0\n": false, "w1 7s yes\n": false,
		"NAME\nw1 7s no\n": false, "NAME\nw1 7s yes\nmore\n": false, "": false,
	} {
		if all[2].Says(output) != want {
			t.Errorf("%q is what is shown: %v", output, !want)
		}
	}
	if all[3].Says("something\n") || !all[3].Says("") {
		t.Error("where nothing is shown nothing is to be said")
	}
}

// Every command line of the pages for operators is run by a test on machines, or a sentence says why not; and no row is of a line that is gone, or
// of a test that is.
func TestEveryLineIsAccountedFor(t *testing.T) {
	known := map[string]row{}
	for _, r := range rows {
		if _, twice := known[r.line]; twice {
			t.Errorf("there are two rows of %q", r.line)
		}
		said := 0
		for _, s := range []string{r.by, r.why, r.as} {
			if s != "" {
				said++
			}
		}
		if said != 1 {
			t.Errorf("the row of %q: want tests, or a sentence why there is none, or the line that it is like", r.line)
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
			t.Errorf("the pages of %s have %d command lines: are their boxes read?", subject.Name, len(all))
		}
		for _, l := range all {
			if _, ok := known[l.Text]; ok {
				seen[l.Text] = true
			} else if l.Boxed || !slices.ContainsFunc(rows, func(r row) bool { return strings.HasPrefix(r.line, l.Text+" ") }) {
				t.Errorf("docs/%s.md, line %d: %q is in no row of test/docpages/rows_test.go: say which test runs it", l.Page, l.Number, l.Text)
			}
		}
	}
	tests, onMachines := declared(t), literals(t, "../vm")
	for _, r := range rows {
		if !seen[r.line] {
			t.Errorf("no page has %q any more: take its row away", r.line)
		}
		if r.as != "" && known[r.as].by == "" {
			t.Errorf("%q is like %q, which no test runs", r.line, r.as)
		}
		run := strings.Split(r.by, ", ")
		if onOne := slices.Contains(run, here) || slices.Contains(run, rest); r.by != "" && onOne == (r.off != "") {
			t.Errorf("%q: want a test on machines, %s or %s, or a sentence why none runs it there, and not both", r.line, here, rest)
		}
		for _, by := range run {
			if by != "" && !slices.Contains(tests, by) {
				t.Errorf("%q is run by %s, and there is no such test", r.line, by)
			}
			if by == here && !slices.Contains(onMachines, r.line) {
				t.Errorf("%q is run by %s, and stands nowhere in test/vm", r.line, by)
			}
		}
	}
}

// declared are the names of all tests.
func declared(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("git", "grep", "-h", "--untracked", "-o", "-E", `^func Test[A-Za-z0-9_]+\(`, "--", ":(top)*_test.go").Output()
	if err != nil {
		t.Fatalf("git grep: %v", err)
	}
	return regexp.MustCompile(`Test\w+`).FindAllString(string(out), -1)
}

// literals are the texts that the files of a folder have between quotes.
func literals(t *testing.T, folder string) []string {
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
			if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
				if text, err := strconv.Unquote(l.Value); err == nil {
					out = append(out, text)
				}
			}
			return true
		})
	}
	return out
}
