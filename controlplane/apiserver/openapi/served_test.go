package openapi_test

import (
	"encoding/json"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/memory/memtest"
)

// The OpenAPI documents must not stay in memory as text: P1, 80 MiB a replica.
func TestOpenAPIIsSmallInMemory(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	before := memtest.LiveHeap()
	text := 0
	for _, path := range []string{"/openapi/v2", "/openapi/v3"} {
		text += len(r.Call(c, "GET", path, "").Body)
	}
	if grown := memtest.LiveHeap() - before; grown > 4<<20 {
		t.Errorf("%d bytes of OpenAPI cost %d bytes of heap", text, grown)
	}
}

// F40: the documents exist, all their references resolve, and they contain the extensions that
// kubectl uses.
func TestOpenAPI(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	docs := []string{"/openapi/v2"}
	var index struct {
		Paths map[string]struct{ ServerRelativeURL string }
	}
	if err := json.Unmarshal([]byte(r.Call(c, "GET", "/openapi/v3", "").Body), &index); err != nil {
		t.Fatal(err)
	}
	for _, p := range index.Paths {
		docs = append(docs, p.ServerRelativeURL)
	}
	if index.Paths["apis/apps/v1"].ServerRelativeURL == "" {
		t.Errorf("%+v", index)
	}
	for _, url := range docs {
		a := r.Call(c, "GET", url, "")
		var doc map[string]any
		if err := json.Unmarshal([]byte(a.Body), &doc); a.Code != 200 || err != nil {
			t.Fatalf("%s: %d %v", url, a.Code, err)
		}
		checkRefs(t, url, doc, doc)
	}
	v2 := r.Call(c, "GET", "/openapi/v2", "").Body
	for _, words := range []string{`"x-kubernetes-patch-merge-key":"name"`, `"name":"fieldValidation"`,
		`"x-kubernetes-group-version-kind":[{"group":"apps","kind":"Deployment","version":"v1"}]`,
		`"/api/v1/namespaces/{namespace}/pods/{name}"`} {
		if !strings.Contains(v2, words) {
			t.Errorf("v2 lacks %s", words)
		}
	}
	doc, err := r.Admin().Discovery().OpenAPISchema() // the protobuf form
	if err != nil || len(doc.GetDefinitions().GetAdditionalProperties()) < 100 {
		t.Errorf("protobuf: %v", err)
	}
	if a := r.Call(c, "GET", "/openapi/v3/apis/apps/v1?hash=OLD", ""); a.Code != 200 {
		t.Errorf("an old hash leads to %d", a.Code) // redirected to the present one
	}
}

// checkRefs resolves every $ref of a document.
func checkRefs(t *testing.T, url string, doc map[string]any, v any) {
	t.Helper()
	switch v := v.(type) {
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok {
			var at any = doc
			for _, part := range strings.Split(strings.TrimPrefix(ref, "#/"), "/") {
				m, _ := at.(map[string]any)
				at = m[part]
			}
			if at == nil {
				t.Errorf("%s refers to %s, which is not there", url, ref)
			}
		}
		for _, x := range v {
			checkRefs(t, url, doc, x)
		}
	case []any:
		for _, x := range v {
			checkRefs(t, url, doc, x)
		}
	}
}
