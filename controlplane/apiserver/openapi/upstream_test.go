package openapi

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
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

	"k8s.io/client-go/openapi/openapitest"

	"keelson.dev/keelson/controlplane/api/kinds"
)

var rewrite = flag.Bool("rewrite", false, "write markers.txt anew")

// markers.txt is what the comments of the library say that is linked.
func TestMarkersAreThoseOfTheLibrary(t *testing.T) {
	var lines []string
	for _, module := range []string{"k8s.io/api", "k8s.io/apimachinery"} {
		out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
		if err != nil {
			t.Fatalf("looking for %s: %v", module, err)
		}
		root := strings.TrimSpace(string(out))
		files, err := filepath.Glob(root + "/*/v[0-9]/types.go")
		if module == "k8s.io/apimachinery" {
			files, err = filepath.Glob(root + "/pkg/apis/meta/v1/types.go")
		}
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", root, err)
		}
		for _, file := range files {
			pkg := module + filepath.ToSlash(strings.TrimPrefix(filepath.Dir(file), root))
			lines = append(lines, markersIn(t, file, pkg)...)
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
		t.Errorf("markers.txt is not what the library says; -rewrite writes it anew (%d types)", len(lines))
	}
}

// marked finds the marker of an enumeration in a comment, of which ast.CommentGroup.Text drops no lines but directives.
var marked = regexp.MustCompile(`(?m)^\s*\+enum\s*$`)

func markersIn(t *testing.T, file, pkg string) (lines []string) {
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
				if fields := optionalIn(s); len(fields) > 0 {
					lines = append(lines, "optional "+pkg+"."+s.Name.Name+" "+strings.Join(fields, " "))
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

// optionalIn are the fields of a struct that are always written and marked as optional.
func optionalIn(s *ast.TypeSpec) (fields []string) {
	of, ok := s.Type.(*ast.StructType)
	if !ok {
		return nil
	}
	for _, f := range of.Fields.List {
		if f.Tag == nil || !strings.Contains("\n"+f.Doc.Text(), "\n+optional") {
			continue
		}
		tag, err := strconv.Unquote(f.Tag.Value)
		name, options, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		if err == nil && name != "" && name != "-" && !strings.Contains(options, "omit") && !strings.Contains(options, "inline") {
			fields = append(fields, name)
		}
	}
	return fields
}

// told are the properties of a schema in which ours must be Kubernetes' own.
var told = []string{
	"type", "format", "default", "required", "oneOf", "$ref", "allOf", "items", "additionalProperties", "x-kubernetes-list-type",
	"x-kubernetes-list-map-keys", "x-kubernetes-map-type", "x-kubernetes-patch-merge-key", "x-kubernetes-patch-strategy",
}

// The schemas are those that Kubernetes publishes, as far as client-go carries its documents: every property of every
// type that both have is merged, defaulted and written alike. Those documents are of an older release: what has changed
// since is known below.
func TestSchemasAreThoseOfKubernetes(t *testing.T) {
	s := New(kinds.All(), "test")
	theirs, err := openapitest.NewEmbeddedFileClient().Paths()
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for path, doc := range theirs {
		if !slices.Contains([]string{"api/v1", "apis/apps/v1", "apis/discovery.k8s.io/v1"}, path) {
			continue
		}
		data, err := doc.Schema("application/json")
		if err != nil {
			t.Fatal(err)
		}
		want, got := schemasIn(t, data), schemasIn(t, ask(t, s, "/openapi/v3/"+path, "application/json").Body.Bytes())
		for name, w := range want {
			g, ok := got[name]
			if !ok {
				continue
			}
			compared += compare(t, name, g, w)
			theirProps, _ := w["properties"].(object)
			ourProps, _ := g["properties"].(object)
			for field, p := range theirProps {
				if ours, ok := ourProps[field].(object); ok {
					compared += compare(t, name+"."+field, ours, p.(object))
				}
			}
		}
	}
	if compared < 3000 {
		t.Errorf("only %d properties were compared", compared)
	}
}

// Every verb of a path that both have is answered with the codes that Kubernetes lists: clients that are generated from
// the document take no other answer for a success.
func TestAnswersAreThoseOfKubernetes(t *testing.T) {
	s := New(kinds.All(), "test")
	theirs, err := openapitest.NewEmbeddedFileClient().Paths()
	if err != nil {
		t.Fatal(err)
	}
	compared := 0
	for _, path := range []string{"api/v1", "apis/apps/v1", "apis/batch/v1", "apis/discovery.k8s.io/v1"} {
		data, err := theirs[path].Schema("application/json")
		if err != nil {
			t.Fatal(err)
		}
		want, got := codesIn(t, data), codesIn(t, ask(t, s, "/openapi/v3/"+path, "application/json").Body.Bytes())
		for verb, codes := range want {
			if ours := got[verb]; ours != "" {
				compared++
				if ours != codes {
					t.Errorf("%s is answered with %s, in Kubernetes with %s", verb, ours, codes)
				}
			}
		}
	}
	if compared < 200 {
		t.Errorf("only %d verbs were compared", compared)
	}
}

// codesIn are the codes of each verb and path.
func codesIn(t *testing.T, data []byte) map[string]string {
	t.Helper()
	var doc struct {
		Paths map[string]map[string]json.RawMessage
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for path, verbs := range doc.Paths {
		for _, verb := range []string{"get", "post", "put", "patch", "delete"} {
			var op struct{ Responses map[string]any }
			if verbs[verb] == nil {
				continue
			}
			if err := json.Unmarshal(verbs[verb], &op); err != nil {
				t.Fatal(err)
			}
			out[verb+" "+path] = strings.Join(slices.Sorted(maps.Keys(op.Responses)), " ")
		}
	}
	return out
}

// simple refers to types that are written as a text or a number.
var simple = regexp.MustCompile(`\.(Time|MicroTime|IntOrString|Quantity)"`)

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

// compare looks at what two schemas tell.
func compare(t *testing.T, where string, got, want object) int {
	t.Helper()
	for _, key := range told {
		if changed[where+" "+key] {
			continue
		}
		g, w := bare(got[key]), bare(want[key])
		if w == nil && strings.HasPrefix(key, "x-kubernetes-list") {
			continue // most lists have been marked since
		}
		if key == "default" && g == nil && text(w) == "{}" && simple.MatchString(text(want["allOf"])) {
			continue // an object was never the default of a text or a number
		}
		if !reflect.DeepEqual(g, w) {
			t.Errorf("%s %s: %s, Kubernetes has %s", where, key, text(g), text(w))
		}
	}
	return len(told)
}

// bare is a schema without what people read.
func bare(v any) any {
	if list, ok := v.([]any); ok && len(list) > 0 {
		if _, words := list[0].(string); words { // of which the order says nothing
			list = slices.Clone(list)
			slices.SortFunc(list, func(a, b any) int { return strings.Compare(a.(string), b.(string)) })
			return list
		}
	}
	o, ok := v.(object)
	if !ok {
		return v
	}
	out := object{}
	for key, value := range o {
		if key != "description" && key != "enum" {
			out[key] = bare(value)
		}
	}
	return out
}

func text(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		return fmt.Sprint(err)
	}
	return string(bytes.TrimSpace(data))
}

// changed is what has changed since the release of the documents that are compared with.
var changed = func() map[string]bool {
	out := map[string]bool{
		"io.k8s.api.core.v1.PersistentVolumeClaimSpec.resources allOf":                                   true,
		"io.k8s.api.core.v1.PersistentVolumeSpec.claimRef x-kubernetes-map-type":                         true,
		"io.k8s.api.apps.v1.DeploymentCondition required":                                                true,
		"io.k8s.api.apps.v1.ReplicaSetCondition required":                                                true,
		"io.k8s.api.apps.v1.DaemonSetCondition required":                                                 true,
		"io.k8s.api.apps.v1.StatefulSetCondition required":                                               true,
		"io.k8s.api.apps.v1.StatefulSetSpec required":                                                    true,
		"io.k8s.api.apps.v1.ControllerRevision required":                                                 true,
		"io.k8s.api.authentication.v1.TokenRequest required":                                             true,
		"io.k8s.api.authentication.v1.TokenRequestSpec required":                                         true,
		"io.k8s.api.authentication.v1.TokenRequestStatus required":                                       true,
		"io.k8s.api.core.v1.HostAlias required":                                                          true,
		"io.k8s.api.core.v1.PodIP required":                                                              true,
		"io.k8s.api.discovery.v1.EndpointSlice required":                                                 true,
		"io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelectorRequirement.key x-kubernetes-patch-merge-key": true,
		"io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelectorRequirement.key x-kubernetes-patch-strategy":  true,
	}
	// These have got a default, or lost one that was none.
	for _, where := range strings.Fields(`
		api.apps.v1.ControllerRevision.data
		api.authentication.v1.TokenRequestStatus.token
		api.autoscaling.v1.ScaleStatus.replicas
		api.core.v1.AzureDiskVolumeSource.cachingMode
		api.core.v1.AzureDiskVolumeSource.fsType
		api.core.v1.AzureDiskVolumeSource.kind
		api.core.v1.AzureDiskVolumeSource.readOnly
		api.core.v1.ConfigMapEnvSource.name
		api.core.v1.ConfigMapKeySelector.name
		api.core.v1.ConfigMapProjection.name
		api.core.v1.ConfigMapVolumeSource.name
		api.core.v1.HostAlias.ip
		api.core.v1.ISCSIPersistentVolumeSource.iscsiInterface
		api.core.v1.ISCSIVolumeSource.iscsiInterface
		api.core.v1.LocalObjectReference.name
		api.core.v1.PodIP.ip
		api.core.v1.RBDPersistentVolumeSource.keyring
		api.core.v1.RBDPersistentVolumeSource.pool
		api.core.v1.RBDPersistentVolumeSource.user
		api.core.v1.RBDVolumeSource.keyring
		api.core.v1.RBDVolumeSource.pool
		api.core.v1.RBDVolumeSource.user
		api.core.v1.ScaleIOPersistentVolumeSource.fsType
		api.core.v1.ScaleIOPersistentVolumeSource.storageMode
		api.core.v1.ScaleIOVolumeSource.fsType
		api.core.v1.ScaleIOVolumeSource.storageMode
		api.core.v1.ReplicationControllerSpec.minReadySeconds
		api.core.v1.ReplicationControllerSpec.replicas
		api.core.v1.SecretEnvSource.name
		api.core.v1.SecretKeySelector.name
		api.core.v1.SecretProjection.name
	`) {
		out["io.k8s."+where+" default"] = true
	}
	return out
}()
