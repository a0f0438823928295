package features

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api/fields"
	"keelson.dev/keelson/controlplane/api/kinds"
)

const module = "keelson.dev/keelson/"

// TestHonouredFieldsAreUsed fails if a field with the answer honored is read by no acting package
// (fields of a status may be written instead). Packages that only declare, validate, default, print
// or record objects do not count. unread.txt names the fields that no code of the module reads,
// with the reason why they have their effect nevertheless. A field with the answer stored must not
// be read by any acting package.
func TestHonouredFieldsAreUsed(t *testing.T) {
	u := findFieldUses(t)
	excused := readUnread(t)
	seen, stored := map[string]bool{}, map[string]string{}
	look := func(kind string, a *fields.Answers) {
		for _, l := range a.Leaves() {
			if l.Answer != nil && l.Answer.State == fields.Stored && l.Owner != nil &&
				typeNameOf(l.Owner) != "meta/v1.TypeMeta" {
				stored[typeNameOf(l.Owner)+"."+l.Field] = kind + ": " + l.Path
			}
			if l.Answer == nil || l.Answer.State != fields.Honoured || l.Owner == nil {
				continue
			}
			field := typeNameOf(l.Owner) + "." + l.Field
			status := strings.HasPrefix(l.Path, "status.")
			if seen[field] || strings.HasPrefix(field, "meta/v1.TypeMeta.") {
				continue
			}
			seen[field] = true
			used := len(u.reads[field]) > 0 || status && len(u.writes[field]) > 0
			_, excuse := excused[field]
			switch {
			case !used && !excuse:
				t.Errorf("%s: %s is called honoured, but no package that acts uses %s: build its effect, call it "+
					"refused or inert, "+
					"or say in unread.txt who uses it", kind, l.Path, field)
			case used && excuse:
				t.Errorf("unread.txt: %s is read by %v: remove it", field, u.reads[field])
			}
		}
	}
	for _, k := range kinds.All().All() {
		look(k.GVK.Kind, k.Schema.Answers)
		for _, name := range subresourceNames(k) {
			if s := k.Subresources[name]; s.New != nil {
				look(k.Resource+"/"+name, s.Answers)
			}
		}
	}
	for field, where := range stored {
		if by := u.reads[field]; len(by) > 0 && !seen[field] { // a field of a template is honored elsewhere
			t.Errorf("%s has the answer stored, but %v reads %s: change its answer to honored",
				where, by, field)
		}
	}
	for field := range excused {
		if !seen[field] {
			t.Errorf("unread.txt: %s is not an honored field", field)
		}
	}
}

// readUnread returns the reason by field from unread.txt, which has fields and a reason on each line.
func readUnread(t *testing.T) map[string]string {
	t.Helper()
	data, err := os.ReadFile("unread.txt")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for s := bufio.NewScanner(bytes.NewReader(data)); s.Scan(); {
		line := strings.TrimSpace(s.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		names, why, ok := strings.Cut(line, " -- ")
		if !ok || why == "" {
			t.Fatalf("unread.txt: %q has no reason", line)
		}
		for _, name := range strings.Fields(names) {
			out[name] = why
		}
	}
	return out
}

// isActingPackage reports whether the effect of a field may be implemented by a package.
func isActingPackage(pkg string) bool {
	pkg, ours := strings.CutPrefix(pkg, module)
	if pkg == "controlplane/api/podref" || pkg == "controlplane/api/quota" {
		return true // it decides which objects nodes may read, or which are counted
	}
	if !ours || strings.HasPrefix(pkg, "controlplane/api/") {
		return false
	}
	return !slices.Contains([]string{"controlplane/api", "controlplane/apiserver/audit",
		"controlplane/apiserver/podsecurity", "agent/fake"}, pkg)
}

// listedPackage is a package in the output of go list.
type listedPackage struct {
	ImportPath, Dir, Export string
	GoFiles                 []string
}

func findFieldUses(t *testing.T) fieldUses {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-export", "-deps", "-json=ImportPath,Dir,Export,GoFiles",
		"./controlplane/...", "./agent/...", "./csi/...", "./cni/...")
	cmd.Dir = root
	// as in the build of the binaries, so that nothing is compiled again
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath")
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, complaint.Bytes())
	}
	linked := linkedPackages(t)
	var own []listedPackage
	export := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listedPackage
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		export[p.ImportPath] = p.Export
		if isActingPackage(p.ImportPath) && linked[p.ImportPath] {
			own = append(own, p)
		}
	}
	fset := token.NewFileSet()
	imports := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(export[path])
	})
	u := fieldUses{map[string][]string{}, map[string][]string{}}
	for _, p := range own {
		if err := u.add(p, fset, imports); err != nil {
			t.Fatalf("%s: %v", p.ImportPath, err)
		}
	}
	return u
}

// linkedPackages returns the packages that are linked into a program. Other packages have no
// effect.
func linkedPackages(t *testing.T) map[string]bool {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-deps", "./cmd/...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	linked := map[string]bool{}
	for _, name := range strings.Fields(string(out)) {
		linked[name] = true
	}
	return linked
}

// fieldUses has the packages that read and that write struct fields, by field, such as
// "core/v1.PodSpec.NodeName".
type fieldUses struct{ reads, writes map[string][]string }

// add adds the reads and writes of one package.
func (u fieldUses) add(p listedPackage, fset *token.FileSet, imports types.Importer) error {
	var files []*ast.File
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	info := &types.Info{Selections: map[*ast.SelectorExpr]*types.Selection{}, Types: map[ast.Expr]types.TypeAndValue{}}
	// Errors are ignored: packages that need a C compiler may be missing, and do not use API objects.
	conf := types.Config{Importer: imports, Error: func(error) {}, FakeImportC: true}
	_, _ = conf.Check(p.ImportPath, fset, files, info)
	at := strings.TrimPrefix(p.ImportPath, module)
	written := map[*ast.SelectorExpr]bool{}
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.AssignStmt:
				for _, l := range n.Lhs {
					markWritten(l, written)
				}
			case *ast.CompositeLit:
				u.addLiteral(n, info, at)
			case *ast.SelectorExpr:
				u.addSelection(info.Selections[n], written[n], at)
			}
			return true
		})
	}
	return nil
}

func (u fieldUses) addSelection(s *types.Selection, written bool, at string) {
	switch {
	case s == nil:
	case s.Kind() == types.FieldVal && written:
		addFieldUse(u.writes, declaringStruct(s), s.Obj().Name(), at)
	case s.Kind() == types.FieldVal:
		addFieldUse(u.reads, declaringStruct(s), s.Obj().Name(), at)
	default: // getters of metadata
		if name, ok := strings.CutPrefix(s.Obj().Name(), "Get"); ok && s.Obj().Pkg() != nil &&
			strings.HasSuffix(s.Obj().Pkg().Path(), "pkg/apis/meta/v1") {
			add(u.reads, "meta/v1.ObjectMeta."+name, at)
		}
	}
}

// markWritten marks all selectors of the left side of an assignment.
func markWritten(e ast.Expr, written map[*ast.SelectorExpr]bool) {
	for {
		switch x := e.(type) {
		case *ast.SelectorExpr:
			written[x] = true
			e = x.X
		case *ast.ParenExpr:
			e = x.X
		case *ast.IndexExpr:
			e = x.X
		case *ast.StarExpr:
			e = x.X
		default:
			return
		}
	}
}

func (u fieldUses) addLiteral(l *ast.CompositeLit, info *types.Info, at string) {
	typ := info.Types[l].Type
	if typ == nil {
		return
	}
	if p, ok := typ.Underlying().(*types.Pointer); ok {
		typ = p.Elem()
	}
	if _, ok := typ.Underlying().(*types.Struct); !ok {
		return
	}
	for _, e := range l.Elts {
		if kv, ok := e.(*ast.KeyValueExpr); ok {
			if key, ok := kv.Key.(*ast.Ident); ok {
				addFieldUse(u.writes, typ, key.Name, at)
			}
		}
	}
}

// declaringStruct returns the struct type that declares a selected field.
func declaringStruct(s *types.Selection) types.Type {
	t := s.Recv()
	for i, index := range s.Index() {
		if p, ok := t.Underlying().(*types.Pointer); ok {
			t = p.Elem()
		}
		if i < len(s.Index())-1 {
			t = t.Underlying().(*types.Struct).Field(index).Type()
		}
	}
	return t
}

func addFieldUse(to map[string][]string, t types.Type, field, at string) {
	if n, ok := types.Unalias(t).(*types.Named); ok && n.Obj().Pkg() != nil {
		add(to, typeName(n.Obj().Pkg().Path(), n.Obj().Name())+"."+field, at)
	}
}

func add(to map[string][]string, key, at string) {
	if !slices.Contains(to[key], at) {
		to[key] = append(to[key], at)
	}
}

func typeNameOf(t reflect.Type) string { return typeName(t.PkgPath(), t.Name()) }

// typeName returns the name of a type in the answers, such as "core/v1.Pod".
func typeName(pkg, name string) string {
	return trimAPIRoot(pkg) + "." + name
}

// trimAPIRoot returns the path of a package of API types without the common root of such packages.
func trimAPIRoot(pkg string) string {
	for _, root := range []string{"k8s.io/api/", "k8s.io/apimachinery/pkg/apis/",
		"k8s.io/apiextensions-apiserver/pkg/apis/", "k8s.io/kube-aggregator/pkg/apis/",
		"k8s.io/metrics/pkg/apis/"} {
		pkg = strings.TrimPrefix(pkg, root)
	}
	return pkg
}
