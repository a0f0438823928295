package crd_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// selectableGizmos returns a definition with versions that offer the same number under different
// field names.
func selectableGizmos(conversion string) string {
	doc := gizmos(conversion)
	for _, field := range []string{"size", "width"} {
		at := strings.Index(doc, "    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, "+
			"properties: {"+field)
		doc = doc[:at] + "    selectableFields: [{jsonPath: .spec." + field + "}, {jsonPath: .spec.both}]\n" + doc[at:]
	}
	return doc
}

// F15: the selectable fields of a version are asked of objects in that version, whichever one is
// stored: in lists, their pages, watches and the deletion of collections.
func TestSelectableFieldsOfVersions(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	body := []string{"Content-Type", "application/json"}
	hook := newConverting(t)
	r.Establish(c, selectableGizmos(hook.Conversion()))
	lines, done := r.WatchLines(c, apiservertest.GizmosV1+"?watch=1&fieldSelector=spec.size%3D3")
	defer done()
	for i := range 8 {
		r.OK(r.Call(c, "POST", apiservertest.GizmosV2,
			apiservertest.Gizmo("v2", fmt.Sprint("n", i), fmt.Sprintf(`{"width":%d}`, i%4)), body...))
	}
	for _, one := range []struct {
		path, selector string
		limit          int
		want           string
	}{
		{apiservertest.GizmosV1, "spec.size=3", 0, "n3 n7"},
		{apiservertest.GizmosV1, "spec.size=3", 1, "n3 n7"},
		{apiservertest.GizmosV1, "spec.size!=3", 2, "n0 n1 n2 n4 n5 n6"},
		{apiservertest.GizmosV1, "spec.size=3,metadata.name=n7", 0, "n7"},
		{apiservertest.GizmosV2, "spec.width=3", 0, "n3 n7"},
		{apiservertest.GizmosV2, "spec.both=x", 0, "n0 n1 n2 n3 n4 n5 n6 n7"}, // the default of v2
		{apiservertest.GizmosV1, "metadata.name=n1", 0, "n1"},
	} {
		if got := strings.Join(r.Selected(one.path, one.selector, one.limit), " "); got != one.want {
			t.Errorf("%s with %s by %d: %s, not %s", one.path, one.selector, one.limit, got, one.want)
		}
	}
	r.Refused(r.Call(c, "GET", apiservertest.GizmosV1+"?fieldSelector=spec.width%3D3", ""), 400,
		"field label not supported: spec.width")
	r.OK(r.Call(c, "PATCH", apiservertest.GizmosV2+"/n0", `{"spec":{"width":3}}`, "Content-Type",
		"application/merge-patch+json"))
	r.OK(r.Call(c, "PATCH", apiservertest.GizmosV2+"/n3", `{"spec":{"width":0}}`, "Content-Type",
		"application/merge-patch+json"))
	r.OK(r.Call(c, "DELETE", apiservertest.GizmosV2+"/n7", ""))
	for _, want := range []string{"ADDED n3", "ADDED n7", "ADDED n0", "DELETED n3", "DELETED n7"} {
		var ev struct {
			Type   string
			Object struct {
				APIVersion string
				Metadata   struct{ Name string }
			}
		}
		line := <-lines
		if err := json.Unmarshal([]byte(line), &ev); err != nil {
			t.Fatal(err)
		}
		if got := ev.Type + " " + ev.Object.Metadata.Name; got != want || ev.Object.APIVersion != "example.com/v1" {
			t.Fatalf("the watch says %s, not %s", line, want)
		}
	}
	// begins with what is there
	more, end := r.WatchLines(c, apiservertest.GizmosV1+"?watch=1&fieldSelector=spec.size%3D1")
	defer end()
	for _, name := range []string{"n1", "n5"} {
		if line := <-more; !strings.Contains(line, `"name":"`+name+`"`) || !strings.Contains(line, `"size":1`) {
			t.Fatalf("the watch begins with %s", line)
		}
	}
	r.OK(r.Call(c, "DELETE", apiservertest.GizmosV1+"?fieldSelector=spec.size%3D1", ""))
	if got := r.Selected(apiservertest.GizmosV2, "spec.width!=9", 0); slices.Contains(got, "n1") ||
		slices.Contains(got, "n5") || len(got) != 5 {
		t.Errorf("left are %v", got)
	}
}
