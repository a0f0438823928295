package keelson

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// declaredNames returns the names that a documentation page may use: names of packages,
// package-level declarations, methods, and struct fields, and the same names after the name of a
// package or a type and a dot.
func declaredNames(t *testing.T) map[string]bool {
	t.Helper()
	files, err := exec.Command("git", "ls-files", "*.go").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	found := map[string]bool{}
	for path := range strings.FieldsSeq(string(files)) {
		if strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, ".pb.go") ||
			strings.Contains(path, "/testdata/") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		pkg := file.Name.Name
		found[pkg] = true
		for _, d := range file.Decls {
			addDeclaration(found, pkg, d)
		}
	}
	return found
}

func addDeclaration(found map[string]bool, pkg string, d ast.Decl) {
	add := func(owner, name string) { found[name], found[owner+"."+name] = true, true }
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Recv == nil {
			add(pkg, d.Name.Name)
			return
		}
		add(receiver(d.Recv.List[0].Type), d.Name.Name)
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.ValueSpec:
				for _, n := range s.Names {
					add(pkg, n.Name)
				}
			case *ast.TypeSpec:
				add(pkg, s.Name.Name)
				addFields(add, s)
			}
		}
	}
}

// addFields adds the fields of a struct and the methods of an interface.
func addFields(add func(owner, name string), s *ast.TypeSpec) {
	var list *ast.FieldList
	switch of := s.Type.(type) {
	case *ast.StructType:
		list = of.Fields
	case *ast.InterfaceType:
		list = of.Methods
	default:
		return
	}
	for _, f := range list.List {
		for _, n := range f.Names {
			add(s.Name.Name, n.Name)
		}
	}
}

// receiver returns the name of the type of a receiver.
func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// The invariants of a DESIGN.md name the code that keeps them. A rename that leaves such a name
// behind fails here.
func TestDesignNamesExist(t *testing.T) {
	pages, err := exec.Command("git", "ls-files", "*DESIGN.md", "docs/explanation/design-records/*.md").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	found := declaredNames(t)
	name := regexp.MustCompile("`([A-Za-z_]\\w*(?:\\.[A-Za-z_]\\w*)?)`")
	checked := 0
	for page := range strings.FieldsSeq(string(pages)) {
		if page == "raftstore/DESIGN.md" { // its table names files, fields and variables as well
			continue
		}
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		kept := false
		for line := range strings.Lines(string(text)) {
			cells := strings.Split(strings.Trim(line, "| \n"), " | ")
			switch {
			case !strings.HasPrefix(line, "|"):
				kept = false
			case len(cells) > 1 && cells[len(cells)-1] == "Kept by":
				kept = true
			case kept:
				for _, m := range name.FindAllStringSubmatch(cells[len(cells)-1], -1) {
					checked++
					if word := m[1]; !found[word] && !strings.HasSuffix(word, ".go") {
						t.Errorf("%s: `%s` is not declared", page, word)
					}
				}
			}
		}
	}
	if checked == 0 {
		t.Error("no page names the code that keeps its invariants")
	}
	t.Logf("%d names checked", checked)
}
