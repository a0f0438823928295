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

// TestHonouredFieldsAreUsed finds promises without work behind them: a field that the answers call honoured is read by
// some package that acts (written, if it is a part of a status or of an answer). Packages that only describe, judge, default,
// print or record objects do not count. unread.txt names the fields that no line of ours reads, and why they have
// their effect nevertheless. What is called stored is the other way round: once something reads it, the answer is old.
func TestHonouredFieldsAreUsed(t *testing.T) {
	u := usesOfFields(t)
	excused := excuses(t)
	seen, stored := map[string]bool{}, map[string]string{}
	look := func(kind string, a *fields.Answers) {
		for _, l := range a.Leaves() {
			if l.Answer != nil && l.Answer.State == fields.Stored && l.Owner != nil && typeOf(l.Owner) != "meta/v1.TypeMeta" {
				stored[typeOf(l.Owner)+"."+l.Field] = kind + ": " + l.Path
			}
			if l.Answer == nil || l.Answer.State != fields.Honoured || l.Owner == nil {
				continue
			}
			field := typeOf(l.Owner) + "." + l.Field
			status := strings.HasPrefix(l.Path, "status.")
			if seen[field] || strings.HasPrefix(field, "meta/v1.TypeMeta.") {
				continue
			}
			seen[field] = true
			used := len(u.reads[field]) > 0 || status && len(u.writes[field]) > 0
			_, excuse := excused[field]
			switch {
			case !used && !excuse:
				t.Errorf("%s: %s is called honoured, but no package that acts uses %s: build its effect, call it refused or inert, "+
					"or say in unread.txt who uses it", kind, l.Path, field)
			case used && excuse:
				t.Errorf("unread.txt: %s is read by %v: take it out", field, u.reads[field])
			}
		}
	}
	for _, k := range kinds.All().All() {
		look(k.GVK.Kind, k.Answers)
		for _, name := range subresources(k) {
			if s := k.Subresources[name]; s.New != nil {
				look(k.Resource+"/"+name, s.Answers)
			}
		}
	}
	for field, where := range stored {
		if by := u.reads[field]; len(by) > 0 && !seen[field] { // a field of a template is honoured elsewhere
			t.Errorf("%s is called stored, as if nothing acted on it, but %v reads %s: call it honoured", where, by, field)
		}
	}
	for field := range excused {
		if !seen[field] {
			t.Errorf("unread.txt: %s is no honoured field", field)
		}
	}
}

// excuses reads unread.txt: a field and a reason on each line.
func excuses(t *testing.T) map[string]string {
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
			t.Fatalf("unread.txt: %q gives no reason", line)
		}
		for _, name := range strings.Fields(names) {
			out[name] = why
		}
	}
	return out
}

// acts says that what a package does with a field may be the field's effect.
func acts(pkg string) bool {
	pkg, ours := strings.CutPrefix(pkg, module)
	if pkg == "controlplane/api/podref" || pkg == "controlplane/api/quota" {
		return true // what nodes may read, and what is counted, is decided there
	}
	if !ours || strings.HasPrefix(pkg, "controlplane/api/") {
		return false
	}
	return !slices.Contains([]string{"controlplane/api", "controlplane/apiserver/audit", "controlplane/apiserver/podsecurity", "agent/fake"}, pkg)
}

// listed is a package as go list tells of it.
type listed struct {
	ImportPath, Dir, Export string
	GoFiles                 []string
}

func usesOfFields(t *testing.T) uses {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-export", "-deps", "-json=ImportPath,Dir,Export,GoFiles",
		"./controlplane/...", "./agent/...", "./csi/...", "./cni/...")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-trimpath") // as the binaries are built: nothing is compiled anew
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, complaint.Bytes())
	}
	linked := linkedPackages(t)
	var own []listed
	export := map[string]string{}
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		export[p.ImportPath] = p.Export
		if acts(p.ImportPath) && linked[p.ImportPath] {
			own = append(own, p)
		}
	}
	fset := token.NewFileSet()
	imports := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) { return os.Open(export[path]) })
	u := uses{map[string][]string{}, map[string][]string{}}
	for _, p := range own {
		if err := u.add(p, fset, imports); err != nil {
			t.Fatalf("%s: %v", p.ImportPath, err)
		}
	}
	return u
}

// linkedPackages are those that some program has in it: what none has does not act yet.
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

// uses are the packages that read and that write the fields of structs: "core/v1.PodSpec.NodeName" -> packages.
type uses struct{ reads, writes map[string][]string }

// add notes what one package does with fields.
func (u uses) add(p listed, fset *token.FileSet, imports types.Importer) error {
	var files []*ast.File
	for _, name := range p.GoFiles {
		f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	info := &types.Info{Selections: map[*ast.SelectorExpr]*types.Selection{}, Types: map[ast.Expr]types.TypeAndValue{}}
	// What needs a C compiler cannot be imported everywhere, and has nothing to do with objects: errors are let be.
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
				u.literal(n, info, at)
			case *ast.SelectorExpr:
				u.selector(info.Selections[n], written[n], at)
			}
			return true
		})
	}
	return nil
}

func (u uses) selector(s *types.Selection, written bool, at string) {
	switch {
	case s == nil:
	case s.Kind() == types.FieldVal && written:
		note(u.writes, owner(s), s.Obj().Name(), at)
	case s.Kind() == types.FieldVal:
		note(u.reads, owner(s), s.Obj().Name(), at)
	default: // of metadata there are methods
		if name, ok := strings.CutPrefix(s.Obj().Name(), "Get"); ok && s.Obj().Pkg() != nil && strings.HasSuffix(s.Obj().Pkg().Path(), "pkg/apis/meta/v1") {
			add(u.reads, "meta/v1.ObjectMeta."+name, at)
		}
	}
}

// markWritten marks the fields on the way to what is assigned to.
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

func (u uses) literal(l *ast.CompositeLit, info *types.Info, at string) {
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
				note(u.writes, typ, key.Name, at)
			}
		}
	}
}

// owner is the struct that a selected field is declared in.
func owner(s *types.Selection) types.Type {
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

func note(to map[string][]string, t types.Type, field, at string) {
	if n, ok := types.Unalias(t).(*types.Named); ok && n.Obj().Pkg() != nil {
		add(to, typeName(n.Obj().Pkg().Path(), n.Obj().Name())+"."+field, at)
	}
}

func add(to map[string][]string, key, at string) {
	if !slices.Contains(to[key], at) {
		to[key] = append(to[key], at)
	}
}

func typeOf(t reflect.Type) string { return typeName(t.PkgPath(), t.Name()) }

// typeName is how the answers call a type: "core/v1.Pod".
func typeName(pkg, name string) string {
	return withoutRoot(pkg) + "." + name
}

// withoutRoot is the path of a package of API types below that of all of them.
func withoutRoot(pkg string) string {
	for _, root := range []string{"k8s.io/api/", "k8s.io/apimachinery/pkg/apis/", "k8s.io/apiextensions-apiserver/pkg/apis/", "k8s.io/kube-aggregator/pkg/apis/",
		"k8s.io/metrics/pkg/apis/"} {
		pkg = strings.TrimPrefix(pkg, root)
	}
	return pkg
}
