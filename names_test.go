package keelson

import (
	"flag"
	"fmt"
	"go/ast"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/tools/go/packages"
)

const (
	// maxDefinitions is how many functions and methods may have the same name.
	maxDefinitions = 8
	// nameList has the names that exceed maxDefinitions, with their current number. Entries only shrink.
	nameList = "testdata/names.tsv"
)

var rewriteNames = flag.Bool("rewrite-names", false,
	"lower and remove the entries of "+nameList+" whose names have fewer definitions")

// freeNames may have any number of definitions. Unwrap implements an interface that package errors documents but does not
// declare.
var freeNames = []string{"New", "Run", "Close", "String", "Error", "Name", "Len", "Less", "Swap", "Read", "Write",
	"main", "init", "Unwrap"}

// TestDefinitionsOfNames fails if a function name has more than maxDefinitions definitions in production code and more
// than its entry in nameList. Methods that implement an interface of the module, the standard library or a dependency do
// not count.
func TestDefinitionsOfNames(t *testing.T) {
	found := map[string]int{}
	for name, definitions := range countDefinitions(t) {
		if definitions > maxDefinitions {
			found[name] = definitions
		}
	}
	allowed := readNameList(t)
	if *rewriteNames {
		rewriteNameList(t, allowed, found)
		return
	}
	for _, name := range slices.Sorted(maps.Keys(found)) {
		switch limit, ok := allowed[name]; {
		case !ok:
			t.Errorf("%s has %d definitions, more than %d: use a verb and a noun", name, found[name], maxDefinitions)
		case found[name] > limit:
			t.Errorf("%s has %d definitions, more than its entry of %d in %s", name, found[name], limit, nameList)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(allowed)) {
		if _, ok := found[name]; !ok {
			t.Errorf("%s has at most %d definitions: remove its entry in %s", name, maxDefinitions, nameList)
		}
	}
}

// countDefinitions returns the number of functions and methods of the module by name, without freeNames, test files,
// generated files and methods that implement an interface.
func countDefinitions(t *testing.T) map[string]int {
	t.Helper()
	loaded := loadModule(t)
	defined := map[string][]*types.Func{}
	for _, p := range loaded {
		for _, file := range p.Syntax {
			path := p.Fset.Position(file.Pos()).Filename
			if strings.HasSuffix(path, ".pb.go") || strings.Contains(filepath.ToSlash(path), "/testdata/") {
				continue
			}
			for _, decl := range file.Decls {
				if decl, ok := decl.(*ast.FuncDecl); ok && !slices.Contains(freeNames, decl.Name.Name) {
					if f, ok := p.TypesInfo.Defs[decl.Name].(*types.Func); ok {
						defined[decl.Name.Name] = append(defined[decl.Name.Name], f)
					}
				}
			}
		}
	}
	maps.DeleteFunc(defined, func(_ string, functions []*types.Func) bool { return len(functions) <= maxDefinitions })
	interfaces := interfacesWith(loaded, defined)
	counts := map[string]int{}
	for name, functions := range defined {
		counts[name] = len(functions)
		for _, f := range functions {
			if implementsAny(f, interfaces[name]) {
				counts[name]--
			}
		}
	}
	return counts
}

// loadModule type-checks the packages of the module that need no cgo. The tests share the result.
func loadModule(t *testing.T) []*packages.Package {
	t.Helper()
	loaded, err := loadedModule()
	if err != nil {
		t.Fatal(err)
	}
	return loaded
}

var loadedModule = sync.OnceValues(func() ([]*packages.Package, error) {
	config := &packages.Config{
		Mode: packages.NeedName | packages.NeedFiles | packages.NeedImports | packages.NeedTypes | packages.NeedSyntax |
			packages.NeedTypesInfo,
		Env: append(os.Environ(), "CGO_ENABLED=0"),
	}
	loaded, err := packages.Load(config, "./...")
	if err != nil {
		return nil, err
	}
	checked := loaded[:0]
	for _, p := range loaded {
		if len(p.Errors) > 0 {
			if p.PkgPath == module+"/agent/oci/container" || p.PkgPath == module+"/cmd/oci" { // these need cgo
				continue
			}
			return nil, fmt.Errorf("%s: %v", p.PkgPath, p.Errors[0])
		}
		checked = append(checked, p)
	}
	return checked, nil
})

// interfacesWith returns the interfaces that have a method of one of the names: those that the module and the packages that
// it imports declare.
func interfacesWith(loaded []*packages.Package, names map[string][]*types.Func) map[string][]*types.Interface {
	found := map[string][]*types.Interface{}
	seen := map[*types.Package]bool{}
	var visit func(p *types.Package)
	visit = func(p *types.Package) {
		if seen[p] {
			return
		}
		seen[p] = true
		for _, name := range p.Scope().Names() {
			declared, ok := p.Scope().Lookup(name).(*types.TypeName)
			if !ok {
				continue
			}
			iface, ok := declared.Type().Underlying().(*types.Interface)
			if !ok {
				continue
			}
			for method := range iface.Methods() {
				if _, ok := names[method.Name()]; ok {
					found[method.Name()] = append(found[method.Name()], iface)
				}
			}
		}
		for _, imported := range p.Imports() {
			visit(imported)
		}
	}
	for _, p := range loaded {
		visit(p.Types)
	}
	return found
}

// implementsAny reports whether f is a method of a type that implements one of the interfaces.
func implementsAny(f *types.Func, interfaces []*types.Interface) bool {
	receiver := f.Signature().Recv()
	if receiver == nil {
		return false
	}
	t := receiver.Type()
	if _, ok := t.(*types.Pointer); !ok {
		t = types.NewPointer(t)
	}
	return slices.ContainsFunc(interfaces, func(i *types.Interface) bool { return types.Implements(t, i) })
}

func readNameList(t *testing.T) map[string]int {
	t.Helper()
	text, err := os.ReadFile(nameList)
	if err != nil {
		t.Fatal(err)
	}
	list := map[string]int{}
	for line := range strings.Lines(string(text)) {
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, number, _ := strings.Cut(line, "\t")
		if list[name], err = strconv.Atoi(number); err != nil {
			t.Fatalf("%s: %q: want a name, a tab and a number", nameList, line)
		}
	}
	return list
}

// rewriteNameList lowers the entries to the current numbers and removes those within the limit. It adds no entry.
func rewriteNameList(t *testing.T, allowed, found map[string]int) {
	t.Helper()
	var b strings.Builder
	fmt.Fprintf(&b, "# Function names with more than %d definitions, and their number. Entries only shrink.\n",
		maxDefinitions)
	for _, name := range slices.Sorted(maps.Keys(allowed)) {
		if n, ok := found[name]; ok {
			fmt.Fprintf(&b, "%s\t%d\n", name, min(n, allowed[name]))
		}
	}
	if err := os.WriteFile(nameList, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
