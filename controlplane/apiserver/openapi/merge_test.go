package openapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api/kinds"
)

var wardle = schema.GroupVersion{Group: "wardle.example.com", Version: "v1"}

// other is an OpenAPI v2 document of another server: with its own version, a version of another
// server, and definitions with names in use.
const other = `{"swagger":"2.0","info":{"title":"Other","version":"v1"},"paths":{
	"/apis/wardle.example.com/v1/flunders":{"get":{"operationId":"listFlunder","responses":{"200":{"description":"OK","schema":{"$ref":"#/definitions/x.Flunder"}}}}},
	"/api/v1/pods":{"get":{"operationId":"stolen","responses":{"200":{"description":"OK","schema":{"$ref":"#/definitions/x.Stolen"}}}}}},
	"definitions":{
	"x.Flunder":{"type":"object","properties":{"metadata":{"$ref":"#/definitions/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}},
		"x-kubernetes-group-version-kind":[{"group":"wardle.example.com","version":"v1","kind":"Flunder"},{"group":"","version":"v1","kind":"Pod"}]},
	"x.Stolen":{"type":"object"},
	"io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta":{"type":"object","description":"another one"}}}`

func mergedDocument(t *testing.T, s *Spec, parts []*Part, accept string) (body []byte, etag string) {
	t.Helper()
	r := httptest.NewRequest("GET", "/openapi/v2", nil)
	r.Header.Set("Accept", accept)
	w := httptest.NewRecorder()
	s.ServeMerged(w, r, parts)
	if w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	return w.Body.Bytes(), w.Header().Get("ETag")
}

// What another server says of its own version stands beside what is said here, and changes nothing
// of that.
func TestMergedDocument(t *testing.T) {
	s := New(kinds.All(), "v1")
	p, err := NewPart([]byte(other), wardle)
	if err != nil {
		t.Fatal(err)
	}
	var alone, both struct {
		Paths       map[string]json.RawMessage `json:"paths"`
		Definitions map[string]json.RawMessage `json:"definitions"`
	}
	w := httptest.NewRecorder()
	s.Serve(w, httptest.NewRequest("GET", "/openapi/v2", nil))
	if err := json.Unmarshal(w.Body.Bytes(), &alone); err != nil {
		t.Fatal(err)
	}
	data, tag := mergedDocument(t, s, []*Part{p}, "application/json")
	if err := json.Unmarshal(data, &both); err != nil {
		t.Fatal(err)
	}
	for name, d := range alone.Definitions {
		if !same(t, d, both.Definitions[name]) {
			t.Errorf("definition %s became\n%s, it was\n%s", name, both.Definitions[name], d)
		}
	}
	for path, item := range alone.Paths {
		if !same(t, item, both.Paths[path]) {
			t.Errorf("path %s became %s", path, both.Paths[path])
		}
	}
	if len(both.Paths) != len(alone.Paths)+1 || both.Paths["/apis/wardle.example.com/v1/flunders"] == nil {
		t.Errorf("%d paths of %d", len(both.Paths), len(alone.Paths))
	}
	flunder := string(both.Definitions["x.Flunder"])
	if !strings.Contains(flunder, `meta.v1.ObjectMeta_v2"`) || strings.Contains(flunder, "Pod") ||
		!strings.Contains(flunder, `"kind":"Flunder"`) {
		t.Errorf("the other server's definition is %s", flunder)
	}
	if both.Definitions["x.Stolen"] != nil || strings.Contains(string(data), "stolen") {
		t.Error("it speaks for what is not its own")
	}
	if pb, _ := mergedDocument(t, s, []*Part{p}, protoV2[0]); !strings.Contains(string(pb), "x.Flunder") {
		t.Error("nothing of it in protobuf")
	}
	again, err := NewPart([]byte(strings.Replace(other, "listFlunder", "listAll", 1)), wardle)
	if err != nil {
		t.Fatal(err)
	}
	if data, now := mergedDocument(t, s, []*Part{again}, "application/json"); now == tag ||
		!strings.Contains(string(data), "listAll") {
		t.Error("what the server says has changed and the document has not")
	}
}

func same(t *testing.T, a, b json.RawMessage) bool {
	t.Helper()
	var x, y any
	if err := json.Unmarshal(a, &x); err != nil {
		t.Fatal(err)
	}
	if len(b) == 0 {
		return false
	}
	if err := json.Unmarshal(b, &y); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(x) == fmt.Sprint(y)
}

// hostileDocuments is documents for which NewPart fails or returns a part without content.
var hostileDocuments = []string{
	``, `[`, `null`, `{}`, `{"paths":null}`, `{"swagger":"2.0","paths":{"/apis/wardle.example.com/v1/x":7}}`,
	`{"swagger":"2.0","paths":{"/apis/wardle.example.com/v1/x":{"get":{"parameters":[{"in":"nowhere"}]}}}}`,
	`{"swagger":"2.0","paths":{},"definitions":{"\u0000%zz":{"$ref":"#/definitions/%zz"}}}`,
	`{"swagger":"2.0","paths":{},"definitions":{"a":{"$ref":"http://[::1"}}}`,
	`{"swagger":"2.0","paths":{},"definitions":{"a":` + strings.Repeat(`{"items":`, 5000) + `{}` +
		strings.Repeat(`}`, 5000) + `}}`,
	`{"swagger":"2.0","paths":{},"definitions":{"a":{"x-kubernetes-group-version-kind":"all"}}}`,
}

func FuzzPart(f *testing.F) {
	f.Add([]byte(other))
	for _, d := range hostileDocuments {
		f.Add([]byte(d))
	}
	here := taken{definitions: "a x.Flunder x.Flunder_v2 io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta",
		paths: "/api/v1/pods /apis/wardle.example.com/v1/ours"}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := NewPart(data, wardle)
		if err != nil {
			return
		}
		m := newMerger(here)
		_ = m.addPart(p)
		for name := range m.definitions {
			if raw, _ := here.findDefinition(name); raw != nil {
				t.Fatalf("definition %s, which is said here, became %s", name, m.definitions[name])
			}
		}
		for path := range m.paths {
			if is, _ := here.hasPath("", path); is || !strings.HasPrefix(path, "/apis/wardle.example.com/v1/") {
				t.Fatalf("path %s became %s", path, m.paths[path])
			}
		}
	})
}

// taken implements ours with definitions and paths under some names.
type taken struct{ definitions, paths string }

func (w taken) findDefinition(name string) (json.RawMessage, error) {
	if slices.Contains(strings.Fields(w.definitions), name) {
		return json.RawMessage(`{"type":"object","description":"ours"}`), nil
	}
	return nil, nil
}

func (w taken) hasPath(_, path string) (bool, error) {
	return slices.Contains(strings.Fields(w.paths), path), nil
}

// A definition is given no name that is taken here either.
func TestNamesThatAreTaken(t *testing.T) {
	p, err := NewPart([]byte(other), wardle)
	if err != nil {
		t.Fatal(err)
	}
	m := newMerger(taken{definitions: "x.Flunder x.Flunder_v2 x.Flunder_v3", paths: "/apis/wardle.example.com/v1/none"})
	if err := m.addPart(p); err != nil {
		t.Fatal(err)
	}
	if m.definitions["x.Flunder_v4"] == nil || m.definitions["x.Flunder_v3"] != nil ||
		!strings.Contains(string(m.paths["/apis/wardle.example.com/v1/flunders"]), "x.Flunder_v4") {
		t.Errorf("definitions %v, paths %s", slices.Collect(maps.Keys(m.definitions)), m.paths)
	}
	m = newMerger(taken{definitions: "x.Flunder x.Flunder_v2 x.Flunder_v3 x.Flunder_v4 x.Flunder_v5 x.Flunder_v6 " +
		"x.Flunder_v7 x.Flunder_v8"})
	if err := m.addPart(p); err == nil || len(m.definitions)+len(m.paths) > 0 {
		t.Errorf("a part is there by half: %v, %v", err, m)
	}
}

// A parameter of another server that has the name of a shared parameter gets a name of its own.
func TestMergedParametersKeepTheirNames(t *testing.T) {
	const name = "query-continue"
	p, err := NewPart([]byte(`{"swagger":"2.0","info":{"title":"Other","version":"v1"},"paths":{
	"/apis/wardle.example.com/v1/flunders":{"parameters":[{"$ref":"#/parameters/`+name+`"}],
		"get":{"operationId":"listFlunder","responses":{"200":{"description":"OK"}}}}},
	"parameters":{"`+name+`":{"in":"query","name":"other","type":"string"}}}`), wardle)
	if err != nil {
		t.Fatal(err)
	}
	data, _ := mergedDocument(t, New(kinds.All(), "v1"), []*Part{p}, "application/json")
	var doc struct {
		Parameters map[string]struct{ Name string }
	}
	if err := json.Unmarshal(data, &doc); err != nil {
		t.Fatal(err)
	}
	renamed := false
	for _, p := range doc.Parameters {
		renamed = renamed || p.Name == "other"
	}
	if doc.Parameters[name].Name != "continue" || !renamed || strings.Count(string(data), `"`+name+`":{`) != 1 {
		t.Errorf("the parameters are %v", doc.Parameters)
	}
}
