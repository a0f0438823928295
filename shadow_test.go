package keelson

import (
	"bufio"
	"fmt"
	"go/ast"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// shadowList has the packages with declarations that shadow an imported package or a builtin, with their number. Entries
// only shrink.
const shadowList = "testdata/shadowing.tsv"

// TestShadowing fails if production code of a package has more declarations that shadow an imported package of their file
// or a predeclared identifier than its entry in shadowList.
func TestShadowing(t *testing.T) {
	found := map[string][]string{}
	for _, p := range loadModule(t) {
		dir := strings.TrimPrefix(strings.TrimPrefix(p.PkgPath, module), "/")
		for _, file := range p.Syntax {
			path := filepath.ToSlash(p.Fset.Position(file.Pos()).Filename)
			if strings.HasSuffix(path, ".pb.go") || strings.Contains(path, "/testdata/") {
				continue
			}
			for _, name := range shadowingNames(file, p.TypesInfo) {
				at := p.Fset.Position(name.Pos())
				found[dir] = append(found[dir], fmt.Sprintf("%s:%d:%s", filepath.Base(at.Filename), at.Line, name.Name))
			}
		}
	}
	allowed := readShadowList(t)
	for _, dir := range slices.Sorted(maps.Keys(found)) {
		if n := len(found[dir]); n > allowed[dir] {
			t.Errorf("%s has %d declarations that shadow a package or a builtin, more than %d: %s", dir, n,
				allowed[dir], strings.Join(found[dir], " "))
		}
	}
	for _, dir := range slices.Sorted(maps.Keys(allowed)) {
		if n := len(found[dir]); n < allowed[dir] {
			t.Errorf("%s has %d declarations that shadow a package or a builtin: lower its entry in %s",
				dir, n, shadowList)
		}
	}
}

// shadowingNames returns the local and package-level declarations of a file that have the name of an imported package or
// of a predeclared identifier. Fields and methods shadow nothing.
func shadowingNames(file *ast.File, info *types.Info) []*ast.Ident {
	imported := map[string]bool{}
	for _, spec := range file.Imports {
		var name *types.PkgName
		if spec.Name != nil {
			name, _ = info.Defs[spec.Name].(*types.PkgName)
		} else {
			name, _ = info.Implicits[spec].(*types.PkgName)
		}
		if name != nil {
			imported[name.Name()] = true
		}
	}
	var names []*ast.Ident
	ast.Inspect(file, func(n ast.Node) bool {
		id, ok := n.(*ast.Ident)
		if !ok || id.Name == "_" {
			return true
		}
		switch obj := info.Defs[id].(type) {
		case *types.Var:
			if obj.IsField() {
				return true
			}
		case *types.Func:
			if obj.Signature().Recv() != nil {
				return true
			}
		case *types.Const, *types.TypeName:
		default:
			return true
		}
		if imported[id.Name] || types.Universe.Lookup(id.Name) != nil {
			names = append(names, id)
		}
		return true
	})
	return names
}

func readShadowList(t *testing.T) map[string]int {
	t.Helper()
	f, err := os.Open(shadowList)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	allowed := map[string]int{}
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := lines.Text()
		if strings.HasPrefix(line, "#") {
			continue
		}
		dir, count, _ := strings.Cut(line, "\t")
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 {
			t.Fatalf("%s: %q: want a package, a tab and a number above 0", shadowList, line)
		}
		allowed[dir] = n
	}
	return allowed
}
