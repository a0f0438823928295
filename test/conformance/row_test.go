package conformance

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
)

// row is the file of a kind. In its text $n is a number that no other object of the kind has, $ns the namespace, and
// {$times: N, of: ITEM} a list of N items, in whose texts $i is the number of the item; of {$map: N, of: ITEM} it is the
// name of the field.
type row struct {
	// Object is valid, with every field that the kind requires. Without a name it gets one of the kind's and $n.
	Object map[string]any `json:"object"`
	// Change is a merge patch of what is wished for; none where nothing may change.
	Change map[string]any `json:"change"`
	// Counts says that the kind has a generation, which counts the changes of what is wished for.
	Counts bool `json:"counts"`
	// Conditional says that an update has to name the resourceVersion that it replaces.
	Conditional bool `json:"conditional"`
	// Numbered says that new objects have generation 1, which no change counts.
	Numbered bool `json:"numbered"`
	// PutCreates says that an update of an object that is not there creates it.
	PutCreates bool `json:"putCreates"`
	// Status is a merge patch of the facet status.
	Status map[string]any `json:"status"`
	// StatusAtCreation says that a creation sets the status as well: nodes register themselves with it.
	StatusAtCreation bool `json:"statusAtCreation"`
	// Selectors are field selectors that find the object, beyond those of its name and namespace.
	Selectors []string `json:"selectors"`
	// Columns are those of kubectl get; those of -o wide stand in parentheses.
	Columns string `json:"columns"`
	// Immutable are merge patches that are refused, and the causes.
	Immutable []refusal `json:"immutable"`
	// Invalid are merge patches, by what is wrong after them with a new object: testdata/invalid has the causes.
	Invalid map[string]map[string]any `json:"invalid"`
	// Refused are changes that a facet refuses, by facet and by what is wrong after them, or that
	// the object itself refuses: testdata/invalid has the causes.
	Refused map[string]map[string]facetChange `json:"refused"`
	// NoGenerateName says why no name can be made up for the kind.
	NoGenerateName string `json:"noGenerateName"`
	// Lingers says what keeps a deleted object; it is gone once its finalizers are.
	Lingers string `json:"lingers"`
	// Answer is a part of what a virtual kind answers.
	Answer map[string]any `json:"answer"`
}

type refusal struct {
	Patch  map[string]any `json:"patch"`
	Causes []string       `json:"causes"`
}

// facetChange is a merge patch through a facet, of an object of its own on which the patches of After, by facet, were
// written before.
type facetChange struct {
	After map[string]map[string]any `json:"after"`
	Patch map[string]any            `json:"patch"`
}

const rows = "testdata/kinds"

// fileOf is where the row of a kind lies; the group of the core is called core.
func fileOf(k *api.Kind) string {
	group := k.GVK.Group
	if group == "" {
		group = "core"
	}
	return filepath.Join(group, k.GVK.Version, strings.ToLower(k.GVK.Kind)+".yaml")
}

// kindUnderTest is a kind with its row and the place of its objects.
type kindUnderTest struct {
	*server
	*api.Kind
	row  row
	text string // of the row
	ns   string // "" for kinds without namespaces
	made *atomic.Int64
}

// load reads the row of a kind, with a namespace for its objects.
func load(t *testing.T, s *server, k *api.Kind) *kindUnderTest {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(rows, fileOf(k)))
	if err != nil {
		t.Fatalf("%s has no row: %v", k.GVK, err)
	}
	u := &kindUnderTest{server: s, Kind: k, text: string(data), made: new(atomic.Int64)}
	if err := yaml.UnmarshalStrict([]byte(u.text), &u.row); err != nil {
		t.Fatalf("%s: %v", fileOf(k), err)
	}
	return u
}

// inNamespace gives the kind a namespace of this name, with the account that pods run as.
func (u *kindUnderTest) inNamespace(t *testing.T, name string) *kindUnderTest {
	t.Helper()
	if !u.Namespaced {
		return u
	}
	u.ns = name
	u.text = strings.ReplaceAll(u.text, "$ns", name)
	u.row = row{}
	if err := yaml.UnmarshalStrict([]byte(u.text), &u.row); err != nil {
		t.Fatal(err)
	}
	u.want(t, 201, "POST", "/api/v1/namespaces", object{"metadata": map[string]any{"name": name}})
	u.send(t, "POST", "/api/v1/namespaces/"+name+"/serviceaccounts",
		object{"metadata": map[string]any{"name": "default"}})
	return u
}

// group is the path of the kind's group and version.
func (u *kindUnderTest) group() string {
	if u.GVK.Group == "" {
		return "/api/" + u.GVK.Version
	}
	return "/apis/" + u.GVK.Group + "/" + u.GVK.Version
}

// path is that of the collection, or of an object and of a facet of it.
func (u *kindUnderTest) path(parts ...string) string {
	p := u.group()
	if u.ns != "" {
		p += "/namespaces/" + u.ns
	}
	return p + "/" + strings.Join(append([]string{u.Resource}, parts...), "/")
}

// with is the path with a query.
func with(path string, query ...string) string { return path + "?" + strings.Join(query, "&") }

// fresh is an object of the row that does not exist, with a patch on it.
func (u *kindUnderTest) fresh(t *testing.T, patches ...map[string]any) object {
	t.Helper()
	n := fmt.Sprint(u.made.Add(1))
	var r row
	text := strings.ReplaceAll(u.text, "$n", n)
	if err := yaml.Unmarshal([]byte(text), &r); err != nil {
		t.Fatal(err)
	}
	o := object{}
	if r.Object != nil {
		o = r.Object
	}
	apiVersion, kind := u.GVK.ToAPIVersionAndKind()
	o = merged(o, object{"apiVersion": apiVersion, "kind": kind})
	if o.name() == "" && !u.Serving.Virtual {
		o = merged(o, object{"metadata": map[string]any{"name": strings.ToLower(kind) + "-" + n}})
	}
	for _, p := range patches {
		o = merged(o, p)
	}
	return normal(t, o)
}

// many writes out what {$times: N, of: ITEM} and {$map: N, of: ITEM} stand for.
func many(t *testing.T, v any) any {
	t.Helper()
	switch v := v.(type) {
	case []any:
		for i := range v {
			v[i] = many(t, v[i])
		}
	case map[string]any:
		times, isList := v["$times"].(float64)
		fields, isMap := v["$map"].(float64)
		if !isList && !isMap {
			for name := range v {
				v[name] = many(t, v[name])
			}
			return v
		}
		list, byName := []any{}, map[string]any{}
		for i := range int(times + fields) {
			data, err := json.Marshal(v["of"])
			if err != nil {
				t.Fatal(err)
			}
			var item any
			if err := json.Unmarshal([]byte(strings.ReplaceAll(string(data), "$i", fmt.Sprint(i))), &item); err != nil {
				t.Fatal(err)
			}
			list, byName[fmt.Sprintf("n%d", i)] = append(list, item), item
		}
		if isMap {
			return byName
		}
		return list
	}
	return v
}

// normal has the Go types that a JSON decoder makes.
func normal(t *testing.T, o object) object {
	t.Helper()
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	o = answer{body: data}.object()
	many(t, map[string]any(o))
	return o
}

// make creates an object of the row.
func (u *kindUnderTest) make(t *testing.T, patches ...map[string]any) object {
	t.Helper()
	return u.want(t, 201, "POST", u.path(), u.fresh(t, patches...)).object()
}

// get reads an object.
func (u *kindUnderTest) get(t *testing.T, name string) object {
	t.Helper()
	return u.want(t, 200, "GET", u.path(name), nil).object()
}

// gone says that there is no such object. Of a kind whose objects linger, it takes what keeps it first.
func (u *kindUnderTest) gone(t *testing.T, name string) bool {
	t.Helper()
	a := u.send(t, "GET", u.path(name), nil)
	if u.row.Lingers == "" {
		return a.code == 404
	}
	if o := a.object(); a.code != 200 || !o.deleted() {
		t.Errorf("%s should linger: %d %s", name, a.code, a.body)
		return a.code == 404
	}
	if finalize := u.Subresources["finalize"]; finalize != nil {
		u.want(t, 200, "PUT", u.path(name, "finalize"),
			merged(a.object(), object{"spec": map[string]any{"finalizers": []any{}}}))
	} else {
		u.want(t, 200, "PATCH", u.path(name), object{"metadata": map[string]any{"finalizers": nil}},
			contentType, mergePatch)
	}
	return u.send(t, "GET", u.path(name), nil).code == 404
}

// Every kind has a row, and every row a kind.
func TestEveryKindHasARow(t *testing.T) {
	left := map[string]bool{}
	err := filepath.WalkDir(rows, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			at, _ := filepath.Rel(rows, path)
			left[at] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range shared.kinds.All() {
		at := fileOf(k)
		if !left[at] {
			t.Errorf("%s is served and has no row: write %s", k.GVK, filepath.Join(rows, at))
		}
		delete(left, at)
	}
	if len(left) > 0 {
		t.Errorf("rows of kinds that are not served: %v", slices.Sorted(maps.Keys(left)))
	}
}
