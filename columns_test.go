package keelson

import (
	"fmt"
	"go/scanner"
	"go/token"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	// maxCodeColumns is how many columns a line of code may have. A tab counts as tabColumns.
	maxCodeColumns = 120
	tabColumns     = 4
	// unbreakableColumns is the length from which a string literal without a space excuses its line.
	unbreakableColumns = 40
)

// TestCodeColumns fails if a line of code exceeds maxCodeColumns. Exempt are generated files,
// comments, lines of raw strings, and lines with a long string that has no space to break at.
func TestCodeColumns(t *testing.T) {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--",
		"*.go").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	files := 0
	for file := range strings.SplitSeq(string(out), "\x00") {
		if file == "" || strings.HasSuffix(file, ".pb.go") || strings.Contains("/"+file, "/testdata/") {
			continue
		}
		source, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		files++
		for _, found := range findWideLines(source) {
			t.Errorf("%s:%s", file, found)
		}
	}
	if files == 0 {
		t.Fatal("no Go file was checked")
	}
}

// The exemptions cover only what cannot be broken.
func TestWideLinesAreFound(t *testing.T) {
	words, path := strings.Repeat("word ", 30), strings.Repeat("x", 150)
	for _, c := range []struct {
		name, code string
		wide       int
	}{
		{"a call", "f(" + strings.Repeat("argument, ", 15) + ")", 1},
		{"a string with spaces", `f("` + words + `")`, 1},
		{"a string without a space", `f("` + path + `")`, 0},
		{"a raw string of two lines", "f(`" + words + "\n" + words + "`)", 0},
		{"a call after a short raw string", "f(`a`, " + strings.Repeat("argument, ", 15) + ")", 1},
		{"a comment", "// " + words, 0},
		{"tabs", strings.Repeat("\t", 25) + "f(argument, argument)", 1},
	} {
		if found := findWideLines([]byte("package p\n" + c.code + "\n")); len(found) != c.wide {
			t.Errorf("%s: %q, want %d wide lines", c.name, found, c.wide)
		}
	}
}

// findWideLines describes the lines of a Go file that exceed maxCodeColumns and are not exempt.
func findWideLines(source []byte) (found []string) {
	lines := strings.Split(string(source), "\n")
	exempt := make([]bool, len(lines)+1)
	set := token.NewFileSet()
	file := set.AddFile("", -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, 0)
	for {
		pos, kind, literal := s.Scan()
		if kind == token.EOF {
			break
		}
		wide := utf8.RuneCountInString(literal) >= unbreakableColumns
		if kind != token.STRING || !wide || literal[0] != '`' && strings.Contains(literal, " ") {
			continue
		}
		first := file.Line(pos)
		for n := first; n <= first+strings.Count(literal, "\n"); n++ {
			exempt[n] = true
		}
	}
	for i, line := range lines {
		columns := utf8.RuneCountInString(line) + (tabColumns-1)*strings.Count(line, "\t")
		if columns > maxCodeColumns && !exempt[i+1] && !strings.HasPrefix(strings.TrimSpace(line), "//") {
			found = append(found, fmt.Sprintf("%d: the line has %d columns, more than %d", i+1, columns,
				maxCodeColumns))
		}
	}
	return found
}
