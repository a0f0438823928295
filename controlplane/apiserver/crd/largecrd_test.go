package crd_test

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/await"
)

const applyYAML, mergeJSON, patchJSON, strategicJSON = "application/apply-patch+yaml", "application/merge-patch+json",
	"application/json-patch+json", "application/strategic-merge-patch+json"

// largeDefinition returns a definition whose schema holds at least so many JSON values, nested and
// documented as generated schemas are. Every description ends in mark.
func largeDefinition(plural string, values int, mark string) map[string]any {
	text := strings.Repeat("Selects pods, and what they do. ", 2) + mark
	leaf := func(i int) map[string]any {
		switch i % 3 {
		case 0:
			return map[string]any{"type": "string", "description": text, "enum": []any{"Always", "Never"}}
		case 1:
			return map[string]any{"type": "integer", "format": "int32", "minimum": 0}
		}
		return map[string]any{"type": "array", "items": map[string]any{"type": "string"}}
	}
	groups, made := map[string]any{}, 0
	for g := 0; made < values; g++ {
		fields := map[string]any{}
		for i := range 20 {
			fields[fmt.Sprintf("field%d", i)] = leaf(i)
		}
		group := map[string]any{"type": "object", "description": text, "properties": fields,
			"required": []any{"field0"}}
		groups[fmt.Sprintf("group%d", g)] = group
		body, _ := json.Marshal(group)
		made += decodelimits.CountJSON(body).Values
	}
	root := map[string]any{"type": "object", "properties": map[string]any{"spec": map[string]any{"type": "object",
		"properties": groups}}}
	kind := strings.ToUpper(plural[:1]) + plural[1:]
	return map[string]any{"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": plural + ".large.example.com"},
		"spec": map[string]any{"group": "large.example.com", "scope": "Namespaced",
			"names": map[string]any{"plural": plural, "singular": plural, "kind": kind, "listKind": kind + "List"},
			"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": root}}}}}
}

func asJSON(v any) string {
	out, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(out)
}

// managersOf returns manager/operation of each managedFields entry, and checks that each owns
// fields.
func managersOf(t *testing.T, body string) (out []string) {
	t.Helper()
	var o struct {
		Metadata struct {
			ManagedFields []struct {
				Manager, Operation, Subresource string
				FieldsV1                        map[string]any
			}
		}
	}
	if err := json.Unmarshal([]byte(body), &o); err != nil {
		t.Fatal(err)
	}
	for _, m := range o.Metadata.ManagedFields {
		if m.Subresource != "" {
			continue
		}
		if len(m.FieldsV1) == 0 {
			t.Errorf("%s owns nothing", m.Manager)
		}
		out = append(out, m.Manager+"/"+m.Operation)
	}
	return out
}

// awaitFewAllocations returns once the process allocates less than 1 MiB in 50 ms. Documents of the
// API are built in the background after a definition has changed, and do not count for the next
// request.
func awaitFewAllocations(t *testing.T) {
	t.Helper()
	var last uint64
	await.Until(t.Context(), t, await.Patience, 50*time.Millisecond, "few allocations", func() error {
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		grown := now.TotalAlloc - last
		last = now.TotalAlloc
		if grown > 1<<20 {
			return fmt.Errorf("%d KiB were allocated since the last look", grown>>10)
		}
		return nil
	})
}

// F16: definitions of the sizes that real software has are created and changed by every kind of
// write, in time and memory that follow their size. CloudNativePG has about 7,500 values in one
// definition, Prometheus operator 13,000, Argo CD 23,630; the last has 1.2 MiB as JSON, which
// nearly is what can be stored.
func TestLargeDefinitions(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	for plural, values := range map[string]int{"clusters": 7500, "prometheuses": 13000, "applicationsets": 23630,
		"largests": 70000} {
		name := plural + ".large.example.com"
		path := apiservertest.DefinitionsPath + "/" + name
		one, two := largeDefinition(plural, values, "one"), largeDefinition(plural, values, "two")
		body := asJSON(one)
		apply := func(manager string, doc any, query string) apiservertest.Response {
			return r.Call(c, "PATCH", path+"?fieldManager="+manager+query, asJSON(doc), "Content-Type", applyYAML)
		}
		step := func(what string, do func() apiservertest.Response) apiservertest.Response {
			var before, after runtime.MemStats
			awaitFewAllocations(t)
			runtime.ReadMemStats(&before)
			began := time.Now()
			a := do()
			took := time.Since(began)
			runtime.ReadMemStats(&after)
			grown := after.TotalAlloc - before.TotalAlloc
			t.Logf("%s %s: %d after %v, %d MiB allocated for %d KiB", plural, what, a.Code,
				took.Round(time.Millisecond), grown>>20, len(body)>>10)
			if !apiservertest.Instrumented && grown > 64<<20+uint64(600*len(body)) {
				t.Errorf("%s %s: %d bytes were allocated for each byte of the body", plural, what,
					grown/uint64(len(body)))
			}
			if took > 20*time.Second { // 3 on a machine that does nothing else
				t.Errorf("%s %s took %v", plural, what, took)
			}
			return a
		}
		r.OK(step("applied", func() apiservertest.Response { return apply("ci", one, "") }))
		r.Condition(c, name, "Established", "True")
		again := r.OK(step("applied again", func() apiservertest.Response { return apply("ci", one, "") }))
		if got := managersOf(t, again.Body); fmt.Sprint(got) != "[ci/Apply]" {
			t.Errorf("%s: managers after the first manager's applies: %v", plural, got)
		}
		both := r.OK(step("applied by another", func() apiservertest.Response { return apply("cd", one, "") }))
		if got := managersOf(t, both.Body); len(got) != 2 {
			t.Errorf("%s: managers after the second manager's apply: %v", plural, got)
		}
		r.Refused(step("conflict", func() apiservertest.Response {
			return apply("cd", two, "")
		}), 409, "conflict", ".spec.versions")
		forced := r.OK(step("forced", func() apiservertest.Response { return apply("cd", two, "&force=true") }))
		if got := managersOf(t, forced.Body); len(got) != 2 {
			t.Errorf("%s: managers after a forced apply: %v", plural, got)
		}
		var live map[string]any
		if err := json.Unmarshal([]byte(forced.Body), &live); err != nil {
			t.Fatal(err)
		}
		live["spec"].(map[string]any)["versions"] = one["spec"].(map[string]any)["versions"]
		delete(live["metadata"].(map[string]any), "resourceVersion")
		updated := step("updated", func() apiservertest.Response {
			return r.Call(c, "PUT", path, asJSON(live), "Content-Type", "application/json")
		})
		for updated.Code == 422 && strings.Contains(updated.Body, "resourceVersion") {
			// definitions are updated conditionally
			now := r.OK(r.Call(c, "GET", path, ""))
			var meta struct {
				Metadata struct{ ResourceVersion string }
			}
			if err := json.Unmarshal([]byte(now.Body), &meta); err != nil {
				t.Fatal(err)
			}
			live["metadata"].(map[string]any)["resourceVersion"] = meta.Metadata.ResourceVersion
			updated = step("updated", func() apiservertest.Response {
				return r.Call(c, "PUT", path, asJSON(live), "Content-Type", "application/json")
			})
		}
		r.OK(updated)
		r.OK(step("applied after the update", func() apiservertest.Response { return apply("cd", two, "&force=true") }))
		versions := map[string]any{"spec": map[string]any{"versions": one["spec"].(map[string]any)["versions"]}}
		r.OK(step("merged", func() apiservertest.Response {
			return r.Call(c, "PATCH", path, asJSON(versions), "Content-Type", mergeJSON)
		}))
		versions["spec"].(map[string]any)["versions"] = two["spec"].(map[string]any)["versions"]
		r.OK(step("merged strategically", func() apiservertest.Response {
			return r.Call(c, "PATCH", path, asJSON(versions), "Content-Type", strategicJSON)
		}))
		ops := []any{map[string]any{"op": "replace", "path": "/spec/versions",
			"value": one["spec"].(map[string]any)["versions"]},
			map[string]any{"op": "add", "path": "/metadata/labels", "value": map[string]any{"a": "b"}}}
		last := r.OK(step("patched", func() apiservertest.Response {
			return r.Call(c, "PATCH", path, asJSON(ops), "Content-Type", patchJSON)
		}))
		if !strings.Contains(last.Body, "they do. one") || strings.Contains(last.Body, "they do. two") {
			t.Errorf("%s: the last patch is not in the object", plural)
		}
		r.Drop(c, name)
	}
}
