package helptext

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// ErrorTexts returns the error texts of the production code below the folder root, by file and in
// the order of the source. These are the texts in calls of fmt.Errorf, errors.New and
// verb.NewFormError. Constants and calls within a text are shown as their source in angle brackets.
func ErrorTexts(t *testing.T, root string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "testdata":
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if texts := errorTexts(file); len(texts) > 0 {
			fmt.Fprintf(&b, "=== %s\n%s\n", filepath.ToSlash(path), strings.Join(texts, ""))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// errorTexts returns the error texts of a file, one line each.
func errorTexts(file *ast.File) (texts []string) {
	ast.Inspect(file, func(n ast.Node) bool {
		if n, ok := n.(*ast.CallExpr); ok {
			switch sourceOf(n.Fun) {
			case "fmt.Errorf", "errors.New", "verb.NewFormError":
				texts = append(texts, textOf(n.Args[0])+"\n")
			}
		}
		return true
	})
	return texts
}

// textOf returns the text of an expression: the content of a literal, and the source of an
// expression whose value is known only at run time.
func textOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.BasicLit:
		if s, err := strconv.Unquote(e.Value); err == nil {
			return s
		}
	case *ast.BinaryExpr:
		return textOf(e.X) + textOf(e.Y)
	case *ast.ParenExpr:
		return textOf(e.X)
	case *ast.CallExpr:
		if sourceOf(e.Fun) == "fmt.Sprintf" {
			return textOf(e.Args[0])
		}
		return "<" + sourceOf(e.Fun) + "()>"
	}
	return "<" + sourceOf(e) + ">"
}

// sourceOf returns the source of an expression that is a name or a qualified name, and "..." for
// any other expression.
func sourceOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return sourceOf(e.X) + "." + e.Sel.Name
	case *ast.StarExpr:
		return sourceOf(e.X)
	}
	return "..."
}
