package apiserver

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"
)

// selectableGizmos returns a definition with versions that offer the same number under different
// field names.
func selectableGizmos(conversion string) string {
	doc := gizmos(conversion)
	for _, field := range []string{"size", "width"} {
		at := strings.Index(doc, "    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {"+field)
		doc = doc[:at] + "    selectableFields: [{jsonPath: .spec." + field + "}, {jsonPath: .spec.both}]\n" + doc[at:]
	}
	return doc
}

// selected lists the objects that match a field selector, page by page.
func (r *replica) selected(path, selector string, limit int) (names []string) {
	r.t.Helper()
	c, more := r.adminHTTP(), ""
	for {
		a := r.ok(r.call(c, "GET", fmt.Sprintf("%s?fieldSelector=%s&limit=%d&continue=%s", path, url.QueryEscape(selector), limit, more), ""))
		var l struct {
			Metadata struct{ Continue string }
			Items    []struct{ Metadata struct{ Name string } }
		}
		if err := json.Unmarshal([]byte(a.body), &l); err != nil {
			r.t.Fatal(err)
		}
		if limit > 0 && len(l.Items) > limit {
			r.t.Errorf("%d items on a page of %d", len(l.Items), limit)
		}
		for _, o := range l.Items {
			names = append(names, o.Metadata.Name)
		}
		if more = l.Metadata.Continue; more == "" {
			return names
		}
	}
}

// F15: the selectable fields of a version are asked of objects in that version, whichever one is stored: in lists,
// their pages, watches and the deletion of collections.
func TestSelectableFieldsOfVersions(t *testing.T) {
	r := withDefinitions(t)
	c := r.adminHTTP()
	body := []string{"Content-Type", "application/json"}
	hook := newConverting(t)
	r.establish(c, selectableGizmos(hook.conversion()))
	lines, done := r.watchLines(c, gizmosV1+"?watch=1&fieldSelector=spec.size%3D3")
	defer done()
	for i := range 8 {
		r.ok(r.call(c, "POST", gizmosV2, gizmo("v2", fmt.Sprint("n", i), fmt.Sprintf(`{"width":%d}`, i%4)), body...))
	}
	for _, one := range []struct {
		path, selector string
		limit          int
		want           string
	}{
		{gizmosV1, "spec.size=3", 0, "n3 n7"},
		{gizmosV1, "spec.size=3", 1, "n3 n7"},
		{gizmosV1, "spec.size!=3", 2, "n0 n1 n2 n4 n5 n6"},
		{gizmosV1, "spec.size=3,metadata.name=n7", 0, "n7"},
		{gizmosV2, "spec.width=3", 0, "n3 n7"},
		{gizmosV2, "spec.both=x", 0, "n0 n1 n2 n3 n4 n5 n6 n7"}, // the default of v2
		{gizmosV1, "metadata.name=n1", 0, "n1"},
	} {
		if got := strings.Join(r.selected(one.path, one.selector, one.limit), " "); got != one.want {
			t.Errorf("%s with %s by %d: %s, not %s", one.path, one.selector, one.limit, got, one.want)
		}
	}
	r.refused(r.call(c, "GET", gizmosV1+"?fieldSelector=spec.width%3D3", ""), 400, "field label not supported: spec.width")
	r.ok(r.call(c, "PATCH", gizmosV2+"/n0", `{"spec":{"width":3}}`, "Content-Type", "application/merge-patch+json"))
	r.ok(r.call(c, "PATCH", gizmosV2+"/n3", `{"spec":{"width":0}}`, "Content-Type", "application/merge-patch+json"))
	r.ok(r.call(c, "DELETE", gizmosV2+"/n7", ""))
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
	more, end := r.watchLines(c, gizmosV1+"?watch=1&fieldSelector=spec.size%3D1") // begins with what is there
	defer end()
	for _, name := range []string{"n1", "n5"} {
		if line := <-more; !strings.Contains(line, `"name":"`+name+`"`) || !strings.Contains(line, `"size":1`) {
			t.Fatalf("the watch begins with %s", line)
		}
	}
	r.ok(r.call(c, "DELETE", gizmosV1+"?fieldSelector=spec.size%3D1", ""))
	if got := r.selected(gizmosV2, "spec.width!=9", 0); slices.Contains(got, "n1") || slices.Contains(got, "n5") || len(got) != 5 {
		t.Errorf("left are %v", got)
	}
}
