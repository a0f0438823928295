package conformance

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// Questions are asked with POST and with nothing else.
func TestVirtualKinds(t *testing.T) {
	for _, k := range shared.kinds.All() {
		if !k.Serving.Virtual || k.Serving.Acts || !slices.Contains(k.Serving.Verbs, "create") {
			continue
		}
		t.Run(k.GVK.Kind, func(t *testing.T) {
			t.Parallel()
			u := load(t, shared, k).inNamespace(t, "virtual-"+k.Resource)
			sent := u.fresh(t)
			for _, query := range []string{"", "?dryRun=All"} {
				got := u.want(t, 201, "POST", u.path()+query, sent).object()
				if where := lacks(map[string]any(got), u.row.Answer); where != "" || got.text("kind") != k.GVK.Kind ||
					got.version() != "" {
					t.Errorf("differs at %q: %v", where, got)
				}
			}
			for _, method := range []string{"GET", "PUT", "PATCH", "DELETE"} {
				headers := []string{contentType, asJSON}
				if method == "PATCH" {
					headers[1] = mergePatch
				}
				a := u.send(t, method, u.path(), sent, headers...)
				if a.code != 405 || a.object().text("reason") != "MethodNotAllowed" {
					t.Errorf("%s: %d %s", method, a.code, a.body)
				}
				if a := u.send(t, method, u.path("name"), sent, headers...); a.code != 404 && a.code != 405 {
					t.Errorf("%s of a name: %d %s", method, a.code, a.body)
				}
			}
			if a := u.send(t, "GET", with(u.path(), "watch=1"), nil); a.code != 405 {
				t.Errorf("watch: %d %s", a.code, a.body)
			}
			if !strings.Contains(string(u.want(t, 200, "GET", u.group(), nil).body), `"`+k.Resource+`"`) {
				t.Error("discovery does not tell of it")
			}
		})
	}
}

// Virtual kinds that tell of something are read with get and list, in every form, and with nothing else.
func TestVirtualKindsThatAreListed(t *testing.T) {
	for _, k := range shared.kinds.All() {
		if !k.Serving.Virtual || !slices.Contains(k.Serving.Verbs, "list") {
			continue
		}
		t.Run(k.GVK.Kind, func(t *testing.T) {
			t.Parallel()
			u := load(t, shared, k).inNamespace(t, "told-"+strings.ToLower(k.GVK.Kind))
			if k.GVK.Group == "metrics.k8s.io" { // they are of the stored objects of the same resource
				of := load(t, shared, shared.kindOf(t, k.Resource))
				of.ns = u.ns
				for _, name := range []string{"told-1", "told-2"} {
					of.make(t, map[string]any{"metadata": map[string]any{"name": name,
						"labels": map[string]any{"told": "yes"}}})
				}
			}
			list := u.want(t, 200, "GET", u.path(), nil).object()
			items, _ := list["items"].([]any)
			if list.text("kind") != k.ListGVK().Kind || len(items) < 2 {
				t.Fatalf("list: %v", list)
			}
			one := object(items[0].(map[string]any))
			if got := u.want(t, 200, "GET", u.path(one.name()), nil).object(); got.text("kind") != k.GVK.Kind ||
				got.name() != one.name() {
				t.Errorf("get: %v", got)
			}
			if where := lacks(one, u.row.Answer); where != "" {
				t.Errorf("differs at %q: %v", where, one)
			}
			if a := u.send(t, "GET", u.path("no-such"), nil); a.code != 404 || a.object().text("reason") != "NotFound" {
				t.Errorf("get of none: %d %s", a.code, a.body)
			}
			u.selects(t, one.name(), len(items))
			u.readOnly(t, one)
			u.shown(t, one.name(), len(items))
		})
	}
}

// selects reads by selectors.
func (u *kindUnderTest) selects(t *testing.T, name string, all int) {
	t.Helper()
	for query, want := range map[string]int{
		"fieldSelector=metadata.name=" + name: 1, "fieldSelector=metadata.name!=" + name: all - 1,
		"labelSelector=a=b": 0, "labelSelector=!a": all,
	} {
		items, _ := u.want(t, 200, "GET", with(u.path(), query), nil).object()["items"].([]any)
		if len(items) != want {
			t.Errorf("%s: %d, want %d", query, len(items), want)
		}
	}
	for _, query := range []string{"fieldSelector=spec.x=y", "labelSelector=!!"} {
		if a := u.send(t, "GET", with(u.path(), query), nil); a.code != 400 {
			t.Errorf("%s: %d %s", query, a.code, a.body)
		}
	}
}

// readOnly tries every other verb.
func (u *kindUnderTest) readOnly(t *testing.T, one object) {
	t.Helper()
	for _, try := range [][2]string{{"POST", u.path()}, {"DELETE", u.path()}, {"PUT", u.path(one.name())},
		{"PATCH", u.path(one.name())}, {"DELETE", u.path(one.name())}, {"GET", with(u.path(), "watch=1")}} {
		headers := []string{contentType, asJSON}
		if try[0] == "PATCH" {
			headers[1] = mergePatch
		}
		if a := u.send(t, try[0], try[1], one, headers...); a.code != 405 ||
			a.object().text("reason") != "MethodNotAllowed" {
			t.Errorf("%s %s: %d %s", try[0], try[1], a.code, a.body)
		}
	}
}

// shown reads the kind as a table, as metadata and as protobuf, and the warning of its version.
func (u *kindUnderTest) shown(t *testing.T, name string, all int) {
	t.Helper()
	var table struct {
		ColumnDefinitions []struct{ Name string }
		Rows              []struct{ Cells []any }
	}
	for path, rows := range map[string]int{u.path(): all, u.path(name): 1} {
		if err := json.Unmarshal(u.want(t, 200, "GET", path, nil, "Accept", asTable).body, &table); err != nil {
			t.Fatal(err)
		}
		var columns []string
		for _, c := range table.ColumnDefinitions {
			columns = append(columns, c.Name)
		}
		if got := strings.Join(columns, ", "); got != u.row.Columns || len(table.Rows) != rows ||
			table.Rows[0].Cells[0] != name {
			t.Errorf("%s: columns %q, rows %v", path, got, table.Rows)
		}
	}
	partial := u.want(t, 200, "GET", u.path(), nil, "Accept", asPartials).object()
	if items, _ := partial["items"].([]any); len(items) != all {
		t.Errorf("metadata: %v", partial)
	}
	if a := u.want(t, 200, "GET", u.path(), nil, "Accept", protobuf); !strings.HasPrefix(string(a.body), "k8s\x00") {
		t.Errorf("protobuf: %q", a.body)
	}
	if a := u.send(t, "GET", u.path(), nil); u.Serving.Deprecated != "" &&
		!strings.Contains(a.header.Get("Warning"), u.Serving.Deprecated) {
		t.Errorf("warning %q", a.header.Get("Warning"))
	}
}

// A binding by itself does what subresource binding of the pod does, and refuses what that refuses.
func TestBindings(t *testing.T) {
	u := load(t, shared, shared.kindOf(t, "pods")).inNamespace(t, "bindings")
	pod := u.make(t)
	path, own := u.group()+"/namespaces/"+u.ns+"/bindings", u.path(pod.name(), "binding")
	binding := func(name, node string) object {
		return object{"metadata": map[string]any{"name": name}, "target": map[string]any{"kind": "Node", "name": node}}
	}
	for name, c := range map[string]struct {
		binding object
		code    int
	}{
		"no name": {binding("", "w1"), 400}, "no node": {binding(pod.name(), ""), 500},
		"no such pod": {binding("gone", "w1"), 404},
		"another namespace": {merged(binding(pod.name(), "w1"),
			object{"metadata": map[string]any{"namespace": "default"}}), 400},
		"another pod of that name": {merged(binding(pod.name(), "w1"), object{"metadata": map[string]any{"uid": "x"}}),
			409},
	} {
		if a := u.send(t, "POST", path, c.binding); a.code != c.code {
			t.Errorf("%s: %d, want %d: %s", name, a.code, c.code, a.body)
		}
	}
	u.want(t, 201, "POST", with(path, "dryRun=All"), binding(pod.name(), "w1"))
	if a := u.want(t, 201, "POST", path, binding(pod.name(), "w1")).object(); a.text("kind") != "Status" ||
		a.text("status") != "Success" {
		t.Errorf("answer: %v", a)
	}
	if got := value(u.want(t, 200, "GET", u.path(pod.name()), nil).object(), []any{"spec", "nodeName"}); got != "w1" {
		t.Errorf("the pod is on %v", got)
	}
	for _, p := range []string{path, own} {
		if a := u.send(t, "POST", p, binding(pod.name(), "w2")); a.code != 409 ||
			!strings.Contains(a.object().message(), "already assigned to node") {
			t.Errorf("%s: %d %s", p, a.code, a.body)
		}
	}
	for _, method := range []string{"GET", "PUT", "DELETE"} {
		if a := u.send(t, method, path, binding(pod.name(), "w1")); a.code != 405 {
			t.Errorf("%s: %d %s", method, a.code, a.body)
		}
	}
}
