package keelson

import (
	"go/ast"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"
)

// idiom is a turn of phrase that the comments of this tree used far more often than those of Kubernetes. The reference is
// its frequency in Kubernetes' scheduler, proxy, kubelet and controllers, per 10,000 words of comments.
type idiom struct {
	name      string
	pattern   *regexp.Regexp
	reference float64
}

var idioms = []idiom{
	{"what", regexp.MustCompile(`(?i)\bwhat\b`), 3.0},
	{"who, whose, whom", regexp.MustCompile(`(?i)\bwho(?:se|m)?\b`), 1.2},
	{"says, said", regexp.MustCompile(`(?i)\b(?:says|said)\b`), 1.5},
	{"told, tell(s)", regexp.MustCompile(`(?i)\b(?:told|tells?)\b`), 1.5},
	{"one that, those that/of", regexp.MustCompile(`(?i)\b(?:one that|ones that|those that|those of)\b`), 3.5},
	{"nobody, somebody, anybody", regexp.MustCompile(`(?i)\b(?:no|some|any)body\b`), 0.7},
	{"begin(s), begun, began", regexp.MustCompile(`(?i)\b(?:begins?|began|begun)\b`), 2.0},
	{"let go, given up, taken in, looked at",
		regexp.MustCompile(`(?i)\b(?:let go|lets go|given up|gives up|taken in|looked at|looks at)\b`), 0.7},
	{"of now, of before, of then", regexp.MustCompile(`(?i)\bof (?:now|before|then|former)\b`), 0.1},
	{"anew", regexp.MustCompile(`(?i)\banew\b`), 0.1},
	{"is none that, none has", regexp.MustCompile(`(?i)\b(?:is none|are none|none that|none has|none is)\b`), 0.3},
	{"is had, be had, is there for", regexp.MustCompile(`(?i)\b(?:be had|is had|are had|is there for)\b`), 0.1},
}

const (
	// maxIdiomRatio is how many times the reference frequency an idiom may have.
	maxIdiomRatio = 3
	// maxOneWordShare is the share of functions and methods whose name is one lower-case word.
	maxOneWordShare    = 0.15
	maxCommentColumns  = 100
	maxSentenceOfDocs  = 35                                // words
	packagesToReword   = "testdata/packages-to-reword.txt" // comments
	packagesToRename   = "testdata/packages-to-rename.txt" // functions and methods
	meaninglessPattern = `^(take|tell|of|note|look|settle|told|known|own|keep|put|ask|end|begin|judge|find)$`
)

var (
	word        = regexp.MustCompile(`[A-Za-z']+`)
	meaningless = regexp.MustCompile(meaninglessPattern)
	oneWord     = regexp.MustCompile(`^[a-z]+$`)
)

// rewrittenFiles returns the production files of all packages but those in list, a file that names the packages with the
// previous language. The list only shrinks.
func rewrittenFiles(t *testing.T, list string) []parsedFile {
	t.Helper()
	all, err := productionFiles()
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(list)
	if err != nil {
		t.Fatal(err)
	}
	old := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			old[line] = false
		}
	}
	var files []parsedFile
	for _, f := range all {
		dir := path.Dir(f.path)
		if _, ok := old[dir]; ok {
			old[dir] = true
			continue
		}
		files = append(files, f)
	}
	for dir, exists := range old {
		if !exists {
			t.Errorf("%s names %s, which has no Go file: remove the line", list, dir)
		}
	}
	if len(files) == 0 {
		t.Fatal("no package is rewritten")
	}
	return files
}

// commentLines returns the lines of comments of a file, without directives.
func commentLines(f parsedFile) []string {
	var lines []string
	for _, group := range f.syntax.Comments {
		for _, c := range group.List {
			text, ok := strings.CutPrefix(c.Text, "//")
			if !ok || strings.HasPrefix(text, "go:") || strings.HasPrefix(text, "nolint") {
				continue
			}
			lines = append(lines, text)
		}
	}
	return lines
}

// TestCommentIdioms fails if the comments of rewritten packages use an idiom more than maxIdiomRatio times as often as the
// reference.
func TestCommentIdioms(t *testing.T) {
	words := 0
	uses := make([]int, len(idioms))
	examples := make([][]string, len(idioms))
	for _, f := range rewrittenFiles(t, packagesToReword) {
		for _, line := range commentLines(f) {
			words += len(word.FindAllString(line, -1))
			for i, idiom := range idioms {
				if n := len(idiom.pattern.FindAllString(line, -1)); n > 0 {
					uses[i] += n
					examples[i] = append(examples[i], f.path+":"+line)
				}
			}
		}
	}
	for i, idiom := range idioms {
		rate := 1e4 * float64(uses[i]) / float64(words)
		if rate > maxIdiomRatio*idiom.reference {
			t.Errorf("%q occurs %.1f times in 10,000 words of comments, more than %d times the reference of %.1f. "+
				"The first uses:\n%s",
				idiom.name, rate, maxIdiomRatio, idiom.reference,
				strings.Join(examples[i][:min(10, len(examples[i]))], "\n"))
		}
	}
}

// TestFunctionNames fails if a function or method of a rewritten package has a name without meaning, or if the share of
// names of one lower-case word exceeds maxOneWordShare.
func TestFunctionNames(t *testing.T) {
	functions, short := 0, 0
	for _, f := range rewrittenFiles(t, packagesToRename) {
		for _, decl := range f.syntax.Decls {
			f2, ok := decl.(*ast.FuncDecl)
			if !ok {
				continue
			}
			functions++
			name := f2.Name.Name
			if meaningless.MatchString(name) {
				t.Errorf("%s: the name of function %s has no meaning in a stack trace: use a verb and a noun",
					f.set.Position(f2.Pos()), name)
			}
			if oneWord.MatchString(name) && name != "main" {
				short++
			}
		}
	}
	if share := float64(short) / float64(functions); share > maxOneWordShare {
		t.Errorf("%d of %d functions (%.0f %%) have a name of one lower-case word, more than %.0f %%", short, functions,
			100*share, 100*maxOneWordShare)
	}
}

// TestCommentColumns fails if a comment on a line of its own in a rewritten package exceeds maxCommentColumns.
func TestCommentColumns(t *testing.T) {
	for _, f := range rewrittenFiles(t, packagesToReword) {
		n := 0
		for line := range strings.Lines(string(f.source)) {
			n++
			line = strings.TrimRight(line, "\n")
			text := strings.TrimLeft(line, "\t")
			if !strings.HasPrefix(text, "// ") || strings.Contains(text, "://") {
				continue
			}
			if columns := utf8.RuneCountInString(text) + 4*(len(line)-len(text)); columns > maxCommentColumns {
				t.Errorf("%s:%d: the comment has %d columns, more than %d", f.path, n, columns, maxCommentColumns)
			}
		}
	}
}

var (
	inlineCode = regexp.MustCompile("`[^`]*`")
	linkTarget = regexp.MustCompile(`\]\([^)]*\)`)
	sentence   = regexp.MustCompile(`[.!?:](?:\s|$)`)
	docWord    = regexp.MustCompile(`\S*[A-Za-z0-9]\S*`)
)

// TestSentencesOfDocs fails if a sentence of the documentation has more than maxSentenceOfDocs words. Code, tables and
// headings are not sentences.
func TestSentencesOfDocs(t *testing.T) {
	out, err := exec.Command("git", "ls-files", "-z", "--", "*.md").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	for file := range strings.SplitSeq(string(out), "\x00") {
		if file == "" || file == "docs/reference/features.md" || strings.Contains("/"+file, "/testdata/") {
			// features.md is generated
			continue
		}
		text, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		for _, paragraph := range paragraphs(string(text)) {
			paragraph = linkTarget.ReplaceAllString(inlineCode.ReplaceAllString(paragraph, "code"), "]")
			for _, s := range sentence.Split(paragraph, -1) {
				if n := len(docWord.FindAllString(s, -1)); n > maxSentenceOfDocs {
					t.Errorf("%s: a sentence has %d words, more than %d: %s", file, n, maxSentenceOfDocs,
						strings.TrimSpace(s))
				}
			}
		}
	}
}

// paragraphs returns the paragraphs and list items of a page of Markdown, each as one line.
func paragraphs(text string) []string {
	var all []string
	var current []string
	flush := func() {
		if len(current) > 0 {
			all = append(all, strings.Join(current, " "))
			current = nil
		}
	}
	code := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "```") {
			code = !code
			flush()
			continue
		}
		if code || line == "" || strings.HasPrefix(line, "|") || strings.HasPrefix(line, "#") {
			flush()
			continue
		}
		if item := regexp.MustCompile(`^(?:[-*+]|\d+\.)\s+`).FindString(line); item != "" {
			flush()
			line = line[len(item):]
		}
		current = append(current, strings.TrimPrefix(line, "> "))
	}
	flush()
	return slices.Clip(all)
}
