package openapi

import (
	_ "embed"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/applyconfigurations"
	smd "sigs.k8s.io/structured-merge-diff/v6/schema"
)

// structure is what server-side apply knows of the built-in types: how lists and maps are merged, by which keys, and
// what fields are when nobody states them. The schema is that of the library, which keeps it once it has been read.
func structure() (*smd.Schema, error) {
	s := runtime.NewScheme()
	if err := corev1.AddToScheme(s); err != nil {
		return nil, err
	}
	any := &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}}
	value, err := applyconfigurations.NewTypeConverter(s).ObjectToTyped(any)
	if err != nil {
		return nil, fmt.Errorf("reading the schema of the built-in types: %w", err)
	}
	return value.Schema(), nil
}

// mapOf is what is known of a struct; nil when nothing is.
func mapOf(known *smd.Schema, model string) *smd.Map {
	if known == nil {
		return nil
	}
	def, ok := known.FindNamedType(model)
	if !ok {
		return nil
	}
	return def.Map
}

// describeMap adds how the fields of a struct are merged.
func describeMap(def object, m *smd.Map) {
	if m == nil {
		return
	}
	if m.ElementRelationship == smd.Atomic {
		def["x-kubernetes-map-type"] = "atomic"
	}
	var unions []object
	for _, u := range m.Unions {
		by := object{}
		for _, f := range u.Fields {
			by[f.FieldName] = f.DiscriminatorValue
		}
		one := object{"fields-to-discriminateBy": by}
		if u.Discriminator != nil {
			one["discriminator"] = *u.Discriminator
		}
		unions = append(unions, one)
	}
	if unions != nil {
		def["x-kubernetes-unions"] = unions
	}
}

// describeField adds how a field is merged, and what it is when nobody states it.
func (s *schemas) describeField(p object, m *smd.Map, t reflect.Type, name string) {
	if m == nil {
		if s.v3 && t.Kind() == reflect.Struct { // of lists and options, which nobody applies
			p["default"] = object{}
		}
		return
	}
	f, ok := m.FindField(name)
	if !ok {
		return
	}
	if s.v3 && f.Default != nil { // v2 tells no defaults
		p["default"] = asJSON(f.Default)
	}
	in := f.Type.Inlined
	switch {
	case in.List != nil && p["type"] == "array":
		p["x-kubernetes-list-type"] = "atomic"
		if in.List.ElementRelationship == smd.Associative {
			p["x-kubernetes-list-type"] = "set"
			if len(in.List.Keys) > 0 {
				p["x-kubernetes-list-type"], p["x-kubernetes-list-map-keys"] = "map", in.List.Keys
			}
		}
	case in.Map != nil && p["type"] == "object" && in.Map.ElementRelationship == smd.Atomic,
		f.Type.ElementRelationship != nil && *f.Type.ElementRelationship == smd.Atomic && s.v3:
		p["x-kubernetes-map-type"] = "atomic"
	}
}

// asJSON is a value of YAML as one of JSON.
func asJSON(v any) any {
	m, ok := v.(map[any]any)
	if !ok {
		return v
	}
	out := object{}
	for key, value := range m {
		out[fmt.Sprint(key)] = asJSON(value)
	}
	return out
}

// markersText is what the types of Kubernetes' API say in comments only: the values of enumerations, and the fields that
// are always written and need not be stated. A line has the sort, the type, and the values or fields.
//
//go:embed markers.txt
var markersText string

// markers are the lines of a sort, by type.
func markers(sort string) map[string][]string {
	out := map[string][]string{}
	for line := range strings.Lines(markersText) {
		if words := strings.Fields(line); len(words) > 2 && words[0] == sort {
			for _, v := range words[2:] {
				out[words[1]] = append(out[words[1]], strings.Trim(v, `"`))
			}
		}
	}
	return out
}

var (
	enums    = sync.OnceValue(func() map[string][]string { return markers("enum") })
	optional = sync.OnceValue(func() map[string][]string { return markers("optional") })
)

// needed says that a field must be stated.
func needed(in reflect.Type, name, options string) bool {
	return !strings.Contains(options, "omitempty") && !strings.Contains(options, "omitzero") &&
		!slices.Contains(optional()[in.PkgPath()+"."+in.Name()], name)
}

// describeEnum adds the values of a field whose type is an enumeration.
func describeEnum(p object, t reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	into := p
	if t.Kind() == reflect.Slice {
		t = t.Elem()
		into, _ = p["items"].(object)
	}
	values := enums()[t.PkgPath()+"."+t.Name()]
	if t.Kind() != reflect.String || values == nil || into == nil {
		return
	}
	into["enum"] = values
	var text strings.Builder
	if was, _ := p["description"].(string); was != "" {
		text.WriteString(was + "\n\n")
	}
	text.WriteString("Possible enum values:")
	for _, v := range values {
		fmt.Fprintf(&text, "\n - `%q`", v)
	}
	p["description"] = text.String()
}
