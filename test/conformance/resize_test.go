package conformance

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

// sizes is a patch of the resources of container main.
func sizes(requests, limits map[string]any) object {
	resources := map[string]any{}
	if requests != nil {
		resources["requests"] = requests
	}
	if limits != nil {
		resources["limits"] = limits
	}
	return object{"spec": map[string]any{"containers": []any{map[string]any{"name": "main", "resources": resources}}}}
}

// The facet resize of pods is read, replaced, patched and applied like any other; it writes resources of containers and
// nothing else, counts the generation, and is the only way to write them.
func TestResize(t *testing.T) {
	u := load(t, shared, shared.kindOf(t, "pods")).inNamespace(t, "resizes")
	pod := u.make(t,
		object{"spec": map[string]any{"containers": []any{map[string]any{"name": "main", "image": "example.com/web:1",
			"resources": map[string]any{"requests": map[string]any{"cpu": "100m", "memory": "64Mi"},
				"limits": map[string]any{"cpu": "1", "memory": "1Gi"}}}}}})
	at := u.path(pod.name(), "resize")
	cpu := func(o object) any {
		return value(o, []any{"spec", "containers", 0, "resources", "requests", "cpu"})
	}
	generation := 1.0
	expect := func(what string, o object, want string) {
		t.Helper()
		generation++
		if cpu(o) != want || o.generation() != any(generation) || o.text("kind") != "Pod" {
			t.Errorf("%s: cpu %v, generation %v; want %s, %v: %v", what, cpu(o), o.generation(), want, generation, o)
		}
	}
	if got := u.want(t, 200, "GET", at, nil).object(); got.version() != pod.version() || cpu(got) != "100m" {
		t.Errorf("read %v", got)
	}
	both := object{"metadata": map[string]any{"labels": map[string]any{"from": "resize"}},
		"status": map[string]any{"message": "m"}}
	expect("strategic",
		u.want(t, 200, "PATCH", at, merged(both, sizes(map[string]any{"cpu": "200m"}, nil)), contentType,
			string(strategic)).object(), "200m")
	whole := value(u.want(t, 200, "GET", at, nil).object(), []any{"spec", "containers"})
	value(object{"containers": whole}, []any{"containers", 0, "resources", "requests"}).(map[string]any)["cpu"] = "300m"
	expect("merge",
		u.want(t, 200, "PATCH", at, object{"spec": map[string]any{"containers": whole}}, contentType,
			mergePatch).object(), "300m")
	expect("json",
		u.want(t, 200, "PATCH", at, []any{map[string]any{"op": "replace",
			"path": "/spec/containers/0/resources/requests/cpu", "value": "400m"}},
			contentType, string(types.JSONPatchType)).object(), "400m")
	intent := merged(sizes(map[string]any{"cpu": "500m"}, nil),
		object{"apiVersion": "v1", "kind": "Pod", "metadata": map[string]any{"name": pod.name()}})
	applied := u.want(t, 200, "PATCH", with(at, "fieldManager=sizer&force=true"), intent, contentType,
		string(types.ApplyPatchType)).object()
	expect("apply", applied, "500m")
	entries, _ := applied.at("metadata", "managedFields").([]any)
	if !slices.ContainsFunc(entries, func(e any) bool {
		m := object(e.(map[string]any))
		return m.text("manager") == "sizer" && m.text("subresource") == "resize" && m.text("operation") == "Apply"
	}) {
		t.Errorf("managed fields: %v", entries)
	}
	value(applied, []any{"spec", "containers", 0, "resources", "requests"}).(map[string]any)["cpu"] = "600m"
	put := u.want(t, 200, "PUT", at, merged(applied, both)).object()
	expect("replace", put, "600m")
	if value(put, []any{"metadata", "labels", "from"}) != nil || value(put, []any{"status", "message"}) != nil {
		t.Errorf("it wrote what is not the facet's: %v", put)
	}
	u.want(t, 409, "PUT", at, applied)
	u.want(t, 200, "PATCH", with(at, "dryRun=All"), sizes(map[string]any{"cpu": "700m"}, nil), contentType,
		string(strategic))
	for what, c := range map[string]struct {
		patch object
		cause string
	}{
		"above the limit": {sizes(map[string]any{"cpu": "2"}, nil), "must be less than or equal to cpu limit of 1"},
		"a limit removed": {sizes(nil, map[string]any{"cpu": nil}), "resource limits cannot be removed"},
		"another resource": {sizes(map[string]any{"ephemeral-storage": "1Gi"}, nil),
			"only cpu and memory resources are mutable"},
		"another class": {sizes(map[string]any{"cpu": "1", "memory": "1Gi"}, nil),
			"Pod QOS Class may not change as a result of resizing"},
	} {
		if a := u.want(t, 422, "PATCH", at, c.patch, contentType, string(strategic)).object(); !strings.Contains(
			a.message(), c.cause) {
			t.Errorf("%s: %s", what, a.message())
		}
	}
	if a := u.want(t, 422, "PATCH", u.path(pod.name()), sizes(map[string]any{"cpu": "700m"}, nil), contentType,
		string(strategic)).object(); !strings.Contains(a.message(), "pod updates may not change fields other than") {
		t.Errorf("the pod itself: %s", a.message())
	}
	if got := u.get(t, pod.name()); cpu(got) != "600m" || got.generation() != any(generation) {
		t.Errorf("in the end %v", got)
	}
	u.want(t, 404, "GET", u.path("no-such-pod", "resize"), nil)
	u.want(t, 405, "POST", at, put)
	u.want(t, 405, "DELETE", at, nil)
}
