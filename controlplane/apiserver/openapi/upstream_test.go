package openapi

import (
	"encoding/json"
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	smd "sigs.k8s.io/structured-merge-diff/v6/schema"
)

var rewrite = flag.Bool("rewrite", false, "write markers.txt")

// markers.txt is what the comments of the library say that is linked.
func TestMarkersAreThoseOfTheLibrary(t *testing.T) {
	var lines []string
	known, err := structure()
	if err != nil {
		t.Fatal(err)
	}
	for module, packages := range map[string][]string{
		"k8s.io/api":                     {"*/v[0-9]", "scheduling/v1beta1"},
		"k8s.io/apimachinery":            {"pkg/apis/meta/v1", "pkg/version"},
		"k8s.io/apiextensions-apiserver": {"pkg/apis/apiextensions/v1"},
		"k8s.io/kube-aggregator":         {"pkg/apis/apiregistration/v1"},
	} {
		out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
		if err != nil {
			t.Fatalf("looking for %s: %v", module, err)
		}
		root := strings.TrimSpace(string(out))
		for _, pkg := range packages {
			files, err := filepath.Glob(filepath.Join(root, pkg, "types*.go"))
			if err != nil || len(files) == 0 {
				t.Fatalf("%s/%s: %v", root, pkg, err)
			}
			for _, file := range files {
				lines = append(lines, markersIn(t, file,
					module+filepath.ToSlash(strings.TrimPrefix(filepath.Dir(file), root)), known)...)
			}
		}
	}
	slices.Sort(lines)
	want := strings.Join(lines, "\n") + "\n"
	if *rewrite {
		if err := os.WriteFile("markers.txt", []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if want != markersText || len(lines) < 50 {
		t.Errorf("markers.txt differs from the library's markers; -rewrite writes it (%d types)", len(lines))
	}
}

// marked finds the marker of an enumeration in a comment. ast.CommentGroup.Text removes only
// directives.
var marked = regexp.MustCompile(`(?m)^\s*\+enum\s*$`)

func markersIn(t *testing.T, file, pkg string, known *smd.Schema) (lines []string) {
	t.Helper()
	tree, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	values, enum := map[string][]string{}, map[string]bool{}
	for _, decl := range tree.Decls {
		d, ok := decl.(*ast.GenDecl)
		if !ok {
			continue
		}
		for _, spec := range d.Specs {
			switch s := spec.(type) {
			case *ast.TypeSpec:
				if marked.MatchString(d.Doc.Text() + "\n" + s.Doc.Text()) {
					enum[s.Name.Name] = true
				}
				isKnown := mapOf(known, modelNameOf(pkg, s.Name.Name)) != nil
				for sort, fields := range fieldMarkers(s, isKnown) {
					if sort == "bare" && s.Name.Name != "JSONSchemaProps" {
						continue // nobody refers to it without words beside the reference
					}
					lines = append(lines, sort+" "+pkg+"."+s.Name.Name+" "+strings.Join(fields, " "))
				}
			case *ast.ValueSpec:
				of, _ := s.Type.(*ast.Ident)
				if of == nil || len(s.Values) != 1 {
					continue
				}
				if lit, ok := s.Values[0].(*ast.BasicLit); ok && lit.Kind == token.STRING {
					value, err := strconv.Unquote(lit.Value)
					if err != nil {
						t.Fatal(err)
					}
					values[of.Name] = append(values[of.Name], strconv.Quote(value))
				}
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(enum)) {
		of := values[name]
		slices.Sort(of)
		if of = slices.Compact(of); len(of) > 0 {
			lines = append(lines, "enum "+pkg+"."+name+" "+strings.Join(of, " "))
		}
	}
	return lines
}

// marker finds one marker line of a comment: "+listType=map".
var marker = regexp.MustCompile(
	`(?m)^\s*\+(optional|required|listType|listMapKey|mapType|structType|default)(?:=(\S+))?\s*$`)

// fieldMarkers returns by sort what the comments of the fields of a struct say beyond their tags.
// How lists are merged is left out of structs that server-side apply knows.
func fieldMarkers(s *ast.TypeSpec, known bool) map[string][]string {
	out := map[string][]string{}
	of, ok := s.Type.(*ast.StructType)
	if !ok {
		return out
	}
	for _, f := range of.Fields.List {
		if f.Tag == nil {
			continue
		}
		tag, err := strconv.Unquote(f.Tag.Value)
		name, options, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		if err != nil || name == "" || name == "-" || strings.Contains(options, "inline") {
			continue
		}
		if known := strings.TrimSpace(marker.ReplaceAllString(f.Doc.Text(), "")); known == "" {
			out["bare"] = append(out["bare"], name)
		}
		omitted, list := strings.Contains(options, "omit"), ""
		var keys []string
		for _, m := range marker.FindAllStringSubmatch(f.Doc.Text(), -1) {
			switch m[1] {
			case "optional", "required":
				if (m[1] == "required") == omitted {
					out[m[1]] = append(out[m[1]], name)
				}
			case "mapType", "structType":
				out["map"] = append(out["map"], name+"="+m[2])
			case "default":
				if !known {
					out["default"] = append(out["default"], name+"="+m[2])
				}
			case "listType":
				list = m[2]
			case "listMapKey":
				keys = append(keys, m[2])
			}
		}
		if list != "" && !known {
			out["list"] = append(out["list"], strings.TrimSuffix(name+"="+list+":"+strings.Join(keys, ","), ":"))
		}
	}
	return out
}

func schemasIn(t *testing.T, data []byte) map[string]object {
	t.Helper()
	var doc struct {
		Components struct{ Schemas map[string]object }
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		t.Fatal(err)
	}
	return doc.Components.Schemas
}
