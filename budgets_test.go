package keelson

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// The size budgets of the tree: production files and lines of a package, fields and methods of a
// type. Generated code has no budget.
const (
	maxPackageFiles = 25
	maxPackageLines = 5000
	maxTypeFields   = 15
	maxTypeMethods  = 40
)

// budgetList has the packages and types that exceed a budget. Entries are removed or lowered, never
// added or raised.
const budgetList = "testdata/budgets.tsv"

var rewriteBudgets = flag.Bool("rewrite-budgets", false,
	"lower and remove the entries of "+budgetList+" whose packages and types have shrunk")

// excess is the size of a package (files and lines) or of a type (fields and methods).
type excess struct {
	kind, name    string
	first, second int
	reason        string
}

func (e excess) String() string {
	return fmt.Sprintf("%s\t%s\t%d\t%d\t%s", e.kind, e.name, e.first, e.second, e.reason)
}

// TestBudgets fails if a package or type exceeds a budget and is not in budgetList, if it exceeds
// its entry there, or if an entry is not needed.
func TestBudgets(t *testing.T) {
	packages := productionPackages(t)
	over := map[string]excess{}
	for _, p := range packages {
		if p.files > maxPackageFiles || p.lines > maxPackageLines {
			over["package "+p.dir] = excess{kind: "package", name: p.dir, first: p.files, second: p.lines}
		}
		for name := range p.types {
			fields, methods := countMembers(packages, p, name, map[string]bool{})
			if fields > maxTypeFields || methods > maxTypeMethods {
				name := p.dir + "." + name
				over["type "+name] = excess{kind: "type", name: name, first: fields, second: methods}
			}
		}
	}
	allowed := readBudgetList(t)
	if *rewriteBudgets {
		rewriteBudgetList(t, allowed, over)
		return
	}
	for key, e := range over {
		a, ok := allowed[key]
		switch {
		case !ok && e.kind == "package":
			t.Errorf("%s has %d files and %d lines, more than %d and %d: move one concept into a package of its own",
				key, e.first, e.second, maxPackageFiles, maxPackageLines)
		case !ok:
			t.Errorf("%s has %d fields and %d methods, more than %d and %d: move one concept into a type of its own",
				key, e.first, e.second, maxTypeFields, maxTypeMethods)
		case e.first > a.first || e.second > a.second:
			t.Errorf("%s has grown to %d and %d, above its entry of %d and %d in %s", key, e.first, e.second, a.first,
				a.second, budgetList)
		}
	}
	for key, a := range allowed {
		if _, ok := over[key]; !ok {
			t.Errorf("%s is within its budget: remove its entry in %s", key, budgetList)
		}
		if a.reason == "" {
			t.Errorf("%s: its entry in %s has no reason", key, budgetList)
		}
	}
}

// productionPackage is a package of the module without its test files and generated files.
type productionPackage struct {
	dir          string
	files, lines int
	types        map[string]*ast.StructType // by name; nil for a type that is no struct
	methods      map[string]int             // by type name
	imports      map[string]map[string]string
	structFile   map[string]string // by type name
}

// productionPackages parses the production files of the module, by directory. All tests share one
// run.
func productionPackages(t *testing.T) map[string]*productionPackage {
	t.Helper()
	packages, err := parseProduction()
	if err != nil {
		t.Fatal(err)
	}
	return packages
}

// parsedFile is a Go file of the module.
type parsedFile struct {
	path   string
	source []byte
	set    *token.FileSet
	syntax *ast.File
}

// productionFiles returns the Go files known to git, without tests, generated files and test data.
// All callers share one run.
var productionFiles = sync.OnceValues(func() ([]parsedFile, error) {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--",
		"*.go").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	var files []parsedFile
	for file := range strings.SplitSeq(string(out), "\x00") {
		if file == "" || strings.HasSuffix(file, "_test.go") || strings.HasSuffix(file, ".pb.go") ||
			strings.Contains("/"+file, "/testdata/") {
			continue
		}
		source, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue // removed from the tree, still in git's index
		} else if err != nil {
			return nil, err
		}
		set := token.NewFileSet()
		syntax, err := parser.ParseFile(set, file, source, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		files = append(files, parsedFile{path: filepath.ToSlash(file), source: source, set: set, syntax: syntax})
	}
	return files, nil
})

var parseProduction = sync.OnceValues(func() (map[string]*productionPackage, error) {
	files, err := productionFiles()
	if err != nil {
		return nil, err
	}
	packages := map[string]*productionPackage{}
	for _, f := range files {
		dir := path.Dir(f.path)
		p := packages[dir]
		if p == nil {
			p = &productionPackage{dir: dir, types: map[string]*ast.StructType{}, methods: map[string]int{},
				imports: map[string]map[string]string{}, structFile: map[string]string{}}
			packages[dir] = p
		}
		p.addFile(f)
	}
	return packages, nil
})

func (p *productionPackage) addFile(f parsedFile) {
	p.files++
	p.lines += strings.Count(string(f.source), "\n")
	p.imports[f.path] = map[string]string{}
	for _, spec := range f.syntax.Imports {
		imported, _ := strconv.Unquote(spec.Path.Value)
		name := path.Base(imported)
		if spec.Name != nil {
			name = spec.Name.Name
		}
		p.imports[f.path][name] = imported
	}
	for _, decl := range f.syntax.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if decl.Recv != nil {
				p.methods[receiverName(decl.Recv.List[0].Type)]++
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				if spec, ok := spec.(*ast.TypeSpec); ok {
					p.types[spec.Name.Name], _ = spec.Type.(*ast.StructType)
					p.structFile[spec.Name.Name] = f.path
				}
			}
		}
	}
}

// receiverName returns the type name of a receiver or an embedded field without pointer, type
// arguments and package.
func receiverName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiverName(e.X)
	case *ast.IndexExpr:
		return receiverName(e.X)
	case *ast.IndexListExpr:
		return receiverName(e.X)
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// countMembers returns the number of fields and methods of a type, with those of its embedded types
// of the module. An embedded type counts as one field and its own fields and methods.
func countMembers(packages map[string]*productionPackage, p *productionPackage, name string, seen map[string]bool) (
	fields, methods int,
) {
	if seen[p.dir+"."+name] {
		return 0, 0
	}
	seen[p.dir+"."+name] = true
	methods = p.methods[name]
	s := p.types[name]
	if s == nil {
		return 0, methods
	}
	for _, field := range s.Fields.List {
		if len(field.Names) > 0 {
			fields += len(field.Names)
			continue
		}
		fields++
		embedded := p
		expr := field.Type
		if star, ok := expr.(*ast.StarExpr); ok {
			expr = star.X
		}
		if qualifiedName, ok := expr.(*ast.SelectorExpr); ok {
			qualifier, _ := qualifiedName.X.(*ast.Ident)
			if qualifier == nil {
				continue
			}
			dir, ok := strings.CutPrefix(p.imports[p.structFile[name]][qualifier.Name], module+"/")
			if embedded = packages[dir]; !ok || embedded == nil {
				continue
			}
		}
		f, m := countMembers(packages, embedded, receiverName(field.Type), seen)
		fields, methods = fields+f, methods+m
	}
	return fields, methods
}

func readBudgetList(t *testing.T) map[string]excess {
	t.Helper()
	text, err := os.ReadFile(budgetList)
	if err != nil {
		t.Fatal(err)
	}
	list := map[string]excess{}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimRight(line, "\n"); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		columns := strings.Split(line, "\t")
		if len(columns) != 5 {
			t.Fatalf("%s: %q has %d columns, want kind, name, two sizes and a reason, separated by tabs", budgetList,
				line, len(columns))
		}
		first, err1 := strconv.Atoi(columns[2])
		second, err2 := strconv.Atoi(columns[3])
		if err1 != nil || err2 != nil {
			t.Fatalf("%s: %q: the sizes are no numbers", budgetList, line)
		}
		list[columns[0]+" "+columns[1]] = excess{kind: columns[0], name: columns[1], first: first, second: second,
			reason: columns[4]}
	}
	return list
}

// rewriteBudgetList lowers the entries to the current sizes and removes those that are within the
// budget. It adds no entry.
func rewriteBudgetList(t *testing.T, allowed, over map[string]excess) {
	t.Helper()
	var b strings.Builder
	b.WriteString("# Packages (files, lines) and types (fields, methods) above the budgets of budgets_test.go. " +
		"Entries only shrink.\n# kind\tname\tsize\tsize\treason\n")
	for _, key := range slices.Sorted(maps.Keys(allowed)) {
		e, ok := over[key]
		if !ok {
			continue
		}
		a := allowed[key]
		a.first, a.second = min(a.first, e.first), min(a.second, e.second)
		b.WriteString(a.String() + "\n")
	}
	if err := os.WriteFile(budgetList, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
