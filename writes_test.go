package keelson

import (
	"go/ast"
	"path"
	"slices"
	"testing"
)

// writesOfTheirOwn are functions that create and rename files without internal/durable, with the
// reason.
var writesOfTheirOwn = map[string]string{
	"agent/oci.sandbox.writeEtcFiles": "it renames a directory of files",
	"deploy/dist.replaceFile":         "deploy/dist is a module of its own, which does not import the main module",
}

// TestFilesAreReplacedByOnePackage fails if a function outside internal/durable creates and renames
// files, because such a function replaces a file without the guarantees of internal/durable.
func TestFilesAreReplacedByOnePackage(t *testing.T) {
	files, err := productionFiles()
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]bool{}
	for _, f := range files {
		if path.Dir(f.path) == "internal/durable" {
			continue
		}
		for _, decl := range f.syntax.Decls {
			function, ok := decl.(*ast.FuncDecl)
			if !ok || !callsAny(function, "os.WriteFile", "os.CreateTemp", "os.Create", "os.OpenFile") ||
				!callsAny(function, "os.Rename", "syscall.Rename", "unix.Rename", "unix.Renameat", "unix.Renameat2") {
				continue
			}
			name := path.Dir(f.path) + "."
			if function.Recv != nil {
				name += receiverName(function.Recv.List[0].Type) + "."
			}
			name += function.Name.Name
			found[name] = true
			if writesOfTheirOwn[name] == "" {
				t.Errorf("%s: %s creates and renames files: use internal/durable", f.set.Position(function.Pos()), name)
			}
		}
	}
	for name := range writesOfTheirOwn {
		if !found[name] {
			t.Errorf("%s does not create and rename files: remove its entry", name)
		}
	}
}

// callsAny reports whether a function calls one of the given functions, named PACKAGE.FUNCTION.
func callsAny(function *ast.FuncDecl, names ...string) bool {
	found := false
	ast.Inspect(function, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if qualifiedName, ok := call.Fun.(*ast.SelectorExpr); ok {
			if qualifier, ok := qualifiedName.X.(*ast.Ident); ok {
				found = found || slices.Contains(names, qualifier.Name+"."+qualifiedName.Sel.Name)
			}
		}
		return true
	})
	return found
}
