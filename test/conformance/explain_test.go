package conformance

import (
	"encoding/json"
	"strings"
	"testing"
)

// document is what kubectl explain reads of a group: the schemas, by name.
type document struct {
	Components struct {
		Schemas map[string]map[string]any
	}
}

// Every kind has a schema in the OpenAPI document of its group, which says of each field what it is, down to the last
// one: what kubectl explain --recursive shows. Kinds without a schema say that their fields are any.
func TestEveryKindIsExplained(t *testing.T) {
	documents := map[string]*document{}
	for _, k := range shared.kinds.All() {
		t.Run(k.GVK.Kind+"."+k.GVK.GroupVersion().String(), func(t *testing.T) {
			u := &kindUnderTest{server: shared, Kind: k}
			d := documents[u.group()]
			if d == nil {
				d = &document{}
				if err := json.Unmarshal(shared.want(t, 200, "GET", "/openapi/v3"+u.group(), nil).body, d); err != nil {
					t.Fatal(err)
				}
				documents[u.group()] = d
			}
			root := d.schemaOf(u)
			if root == nil {
				t.Fatal("no schema has its group, version and kind")
			}
			// The types of some libraries come without descriptions.
			_, described := any(k.Type.New()).(interface{ SwaggerDoc() map[string]string })
			if text, _ := root["description"].(string); described && text == "" {
				t.Error("it has no description")
			}
			if n := d.explain(t, root, nil, map[string]bool{}); n < 4 && k.Type.Typed {
				t.Errorf("%d fields", n)
			}
		})
	}
}

// schemaOf finds the schema of a kind by the names that it claims.
func (d *document) schemaOf(u *kindUnderTest) map[string]any {
	for _, s := range d.Components.Schemas {
		list, _ := s["x-kubernetes-group-version-kind"].([]any)
		for _, gvk := range list {
			m, _ := gvk.(map[string]any)
			if len(list) == 1 && m["group"] == u.GVK.Group && m["version"] == u.GVK.Version && m["kind"] == u.GVK.Kind {
				return s
			}
		}
	}
	return nil
}

// explain follows a schema to all of its fields, each schema once, and counts them.
func (d *document) explain(t *testing.T, s map[string]any, at []string, seen map[string]bool) (n int) {
	t.Helper()
	for _, ref := range refs(s) {
		name := strings.TrimPrefix(ref, "#/components/schemas/")
		next := d.Components.Schemas[name]
		if next == nil {
			t.Errorf("%s: %s is not there", strings.Join(at, "."), ref)
		} else if !seen[name] {
			seen[name] = true
			n += d.explain(t, next, at, seen)
		}
	}
	open := s["x-kubernetes-preserve-unknown-fields"] == true || s["x-kubernetes-int-or-string"] == true ||
		s["oneOf"] != nil
	// Quantities, raw extensions and a schema's own values are described and have no type of their own.
	if s["type"] == nil && len(refs(s)) == 0 && !open && s["description"] == nil {
		t.Errorf("%s: a field without a type: %v", strings.Join(at, "."), s)
	}
	properties, _ := s["properties"].(map[string]any)
	for name, p := range properties {
		n += 1 + d.explain(t, p.(map[string]any), append(at, name), seen)
	}
	for _, part := range []string{"items", "additionalProperties"} {
		if of, isSchema := s[part].(map[string]any); isSchema {
			n += d.explain(t, of, append(at, part), seen)
		}
	}
	return n
}

// refs are the schemas that one is made of.
func refs(s map[string]any) (out []string) {
	if ref, ok := s["$ref"].(string); ok {
		out = append(out, ref)
	}
	all, _ := s["allOf"].([]any)
	for _, part := range all {
		if m, ok := part.(map[string]any); ok {
			out = append(out, refs(m)...)
		}
	}
	return out
}
