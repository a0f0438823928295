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

// structure returns the server-side apply schema of the built-in types: merge behavior and keys of
// lists and maps, and defaults. It is read from client-go once.
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

// mapOf returns the server-side apply schema of a struct, nil if it has none.
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

// describeMap adds how server-side apply merges the fields of a struct.
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

// describeField adds the merge behavior and the default of a field to its schema.
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

// describeKnown adds the merge behavior and default of a field from the server-side apply schema.
func (s *schemas) describeKnown(p object, f smd.StructField) {
	if s.v3 && f.Default != nil { // v2 documents have no defaults
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

// describeUnknown adds the merge behavior and default of a field without a server-side apply
// schema. Such types are lists, options and types of other modules.
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

// fieldMarker returns the value of a field in words like "conditions=map:type", "" if the field
// does not occur.
func fieldMarker(words []string, field string) string {
	for _, w := range words {
		if name, value, _ := strings.Cut(w, "="); name == field {
			return value
		}
	}
	return ""
}

// zeroOf returns the zero value of a type as its default, nil if it has no default.
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

// asJSON converts a decoded YAML value to a value that JSON can encode.
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

// markersText holds properties of Kubernetes' API types that reflection cannot find, taken from the
// source comments. Each line has a sort, a type, and its values or fields. The sorts are:
//   - enum: the values of an enumeration
//   - optional: optional fields that are always written
//   - required: required fields that are omitted if empty
//   - list, map: the merge behavior of fields that are lists or maps
//   - default: the defaults of fields
//   - bare: fields without a comment
//
//go:embed markers.txt
var markersText string

// markers returns the values of all lines of a sort, by type. Values of enumerations are quoted and
// may contain blanks.
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

// typeName returns the name of a type in markers.txt.
func typeName(t reflect.Type) string { return t.PkgPath() + "." + t.Name() }

// needed reports whether a field is required.
func needed(in reflect.Type, name, options string) bool {
	if strings.Contains(options, "omitempty") || strings.Contains(options, "omitzero") {
		return slices.Contains(required()[typeName(in)], name)
	}
	return !slices.Contains(optional()[typeName(in)], name)
}

// describeEnum adds the possible values of a field to its schema p, if its type t is an
// enumeration.
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
