package openapi

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
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
var structure = sync.OnceValues(func() (*smd.Schema, error) {
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
})

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

// describeField adds to the schema of a field how the field is merged, and its default.
func (s *schemas) describeField(p object, m *smd.Map, in reflect.Type, f reflect.StructField, name string) {
	if m == nil {
		s.describeUnknown(p, in, f, name)
	} else if of, ok := m.FindField(name); ok {
		s.describeKnown(p, of)
	}
	if how := fieldMarker(mapTypes()[typeName(in)], name); how != "" {
		p["x-kubernetes-map-type"] = how
	}
}

// describeKnown adds what server-side apply knows of a field.
func (s *schemas) describeKnown(p object, f smd.StructField) {
	if s.v3 && f.Default != nil { // v2 has no defaults
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

// describeUnknown adds how a field is merged of a type that nobody applies: lists, options, and types of other modules.
func (s *schemas) describeUnknown(p object, in reflect.Type, f reflect.StructField, name string) {
	sort, keys, _ := strings.Cut(fieldMarker(listTypes()[typeName(in)], name), ":")
	if sort != "" {
		p["x-kubernetes-list-type"] = sort
	}
	if keys != "" {
		p["x-kubernetes-list-map-keys"] = strings.Split(keys, ",")
	}
	if !s.v3 {
		return
	}
	if text := fieldMarker(defaults()[typeName(in)], name); text != "" {
		p["default"] = json.RawMessage(text)
	} else if f.Type.Kind() == reflect.Struct || !strings.Contains(f.Tag.Get("json"), ",omit") {
		if zero := zeroOf(f.Type); zero != nil {
			p["default"] = zero
		}
	}
}

// fieldMarker returns the value of a field among words like "conditions=map:type"; "" when none exists.
func fieldMarker(words []string, field string) string {
	for _, w := range words {
		if name, value, _ := strings.Cut(w, "="); name == field {
			return value
		}
	}
	return ""
}

// zeroOf returns the value that a field has when nobody states it; nil when that is no value.
func zeroOf(t reflect.Type) any {
	switch t.Kind() {
	case reflect.String:
		return ""
	case reflect.Bool:
		return false
	case reflect.Int32, reflect.Int64:
		return 0
	case reflect.Struct:
		if _, ok := reflect.New(t).Interface().(primitive); !ok && !freeForm(t) {
			return object{}
		}
	}
	return nil
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

// markersText has what reflection cannot see, from the comments of Kubernetes' API types. A line has the sort, the type,
// and the values or fields. The sorts are the values of enumerations (enum), fields that are always written and need not
// be stated (optional) or the reverse (required), how lists and maps are merged (list, map), defaults (default), and
// fields without a comment (bare).
//
//go:embed markers.txt
var markersText string

// markers are the lines of a sort, by type. The values of enumerations are quoted, and may contain blanks.
func markers(sort string) map[string][]string {
	out := map[string][]string{}
	for line := range strings.Lines(markersText) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if len(words) == 3 && words[0] == sort {
			out[words[1]] = splitValues(words[2])
		}
	}
	return out
}

// splitValues returns the words of a text. A quoted word is unquoted.
func splitValues(text string) (out []string) {
	for text = strings.TrimSpace(text); text != ""; text = strings.TrimSpace(text) {
		if quoted, err := strconv.QuotedPrefix(text); err == nil {
			value, _ := strconv.Unquote(quoted)
			out, text = append(out, value), text[len(quoted):]
			continue
		}
		word, rest, _ := strings.Cut(text, " ")
		out, text = append(out, word), rest
	}
	return out
}

var (
	enums     = sync.OnceValue(func() map[string][]string { return markers("enum") })
	optional  = sync.OnceValue(func() map[string][]string { return markers("optional") })
	required  = sync.OnceValue(func() map[string][]string { return markers("required") })
	listTypes = sync.OnceValue(func() map[string][]string { return markers("list") })
	bare      = sync.OnceValue(func() map[string][]string { return markers("bare") })
	defaults  = sync.OnceValue(func() map[string][]string { return markers("default") })
	mapTypes  = sync.OnceValue(func() map[string][]string { return markers("map") })
)

// typeName is the name of a type in markers.
func typeName(t reflect.Type) string { return t.PkgPath() + "." + t.Name() }

// needed reports whether a field must be stated.
func needed(in reflect.Type, name, options string) bool {
	if strings.Contains(options, "omitempty") || strings.Contains(options, "omitzero") {
		return slices.Contains(required()[typeName(in)], name)
	}
	return !slices.Contains(optional()[typeName(in)], name)
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
