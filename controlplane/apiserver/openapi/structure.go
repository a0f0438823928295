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

// structure returns the server-side apply schema of the built-in types, which contains the merge
// behavior and keys of lists and maps, and defaults. It is read from client-go once.
var structure = sync.OnceValues(func() (*smd.Schema, error) {
	s := runtime.NewScheme()
	if err := corev1.AddToScheme(s); err != nil {
		return nil, err
	}
	example := &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}}
	value, err := applyconfigurations.NewTypeConverter(s).ObjectToTyped(example)
	if err != nil {
		return nil, fmt.Errorf("reading the schema of the built-in types: %w", err)
	}
	return value.Schema(), nil
})

// mapOf returns the server-side apply schema of the struct with the definition name model; nil if
// the schema has no such struct.
func mapOf(schema *smd.Schema, model string) *smd.Map {
	if schema == nil {
		return nil
	}
	def, ok := schema.FindNamedType(model)
	if !ok {
		return nil
	}
	return def.Map
}

// describeMap adds to a struct's definition how server-side apply merges its fields.
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

// describeField adds the merge behavior and the default of a field to the OpenAPI schema of the
// field.
func (s *schemas) describeField(
	property object, m *smd.Map, owner reflect.Type, field reflect.StructField, name string,
) {
	if m == nil {
		s.describeUnknown(property, owner, field, name)
	} else if of, ok := m.FindField(name); ok {
		s.describeKnown(property, of)
	}
	if how := fieldMarker(mapTypes()[typeName(owner)], name); how != "" {
		property["x-kubernetes-map-type"] = how
	}
}

// describeKnown adds the merge behavior and default of a field to its OpenAPI schema property. It
// takes both from the server-side apply schema.
func (s *schemas) describeKnown(property object, field smd.StructField) {
	if s.v3 && field.Default != nil { // v2 documents have no defaults
		property["default"] = asJSON(field.Default)
	}
	in := field.Type.Inlined
	switch {
	case in.List != nil && property["type"] == "array":
		property["x-kubernetes-list-type"] = "atomic"
		if in.List.ElementRelationship == smd.Associative {
			property["x-kubernetes-list-type"] = "set"
			if len(in.List.Keys) > 0 {
				property["x-kubernetes-list-type"], property["x-kubernetes-list-map-keys"] = "map", in.List.Keys
			}
		}
	case in.Map != nil && property["type"] == "object" && in.Map.ElementRelationship == smd.Atomic,
		field.Type.ElementRelationship != nil && *field.Type.ElementRelationship == smd.Atomic && s.v3:
		property["x-kubernetes-map-type"] = "atomic"
	}
}

// describeUnknown adds the merge behavior and default of a field of a type that has no server-side
// apply schema: lists, options and types of other modules.
func (s *schemas) describeUnknown(property object, owner reflect.Type, field reflect.StructField, name string) {
	sort, keys, _ := strings.Cut(fieldMarker(listTypes()[typeName(owner)], name), ":")
	if sort != "" {
		property["x-kubernetes-list-type"] = sort
	}
	if keys != "" {
		property["x-kubernetes-list-map-keys"] = strings.Split(keys, ",")
	}
	if !s.v3 {
		return
	}
	if text := fieldMarker(defaults()[typeName(owner)], name); text != "" {
		property["default"] = json.RawMessage(text)
	} else if field.Type.Kind() == reflect.Struct || !strings.Contains(field.Tag.Get("json"), ",omit") {
		if zero := zeroOf(field.Type); zero != nil {
			property["default"] = zero
		}
	}
}

// fieldMarker returns the value of a field in markers like "conditions=map:type"; "" if the field
// is not listed.
func fieldMarker(words []string, field string) string {
	for _, w := range words {
		if name, value, _ := strings.Cut(w, "="); name == field {
			return value
		}
	}
	return ""
}

// zeroOf returns the zero value that is the default of a field of type t; nil if it has no default.
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

// readMarkers returns the values of all lines of markers.txt that start with the word sort, by type
// name. Values of enumerations are quoted and may contain blanks.
func readMarkers(sort string) map[string][]string {
	out := map[string][]string{}
	for line := range strings.Lines(markersText) {
		words := strings.SplitN(strings.TrimSpace(line), " ", 3)
		if len(words) == 3 && words[0] == sort {
			out[words[1]] = splitValues(words[2])
		}
	}
	return out
}

// splitValues splits a text at blanks. A quoted value may contain blanks and is returned without
// quotes.
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
	enums     = sync.OnceValue(func() map[string][]string { return readMarkers("enum") })
	optional  = sync.OnceValue(func() map[string][]string { return readMarkers("optional") })
	required  = sync.OnceValue(func() map[string][]string { return readMarkers("required") })
	listTypes = sync.OnceValue(func() map[string][]string { return readMarkers("list") })
	bare      = sync.OnceValue(func() map[string][]string { return readMarkers("bare") })
	defaults  = sync.OnceValue(func() map[string][]string { return readMarkers("default") })
	mapTypes  = sync.OnceValue(func() map[string][]string { return readMarkers("map") })
)

// typeName returns the name of a type in markers.txt.
func typeName(t reflect.Type) string { return t.PkgPath() + "." + t.Name() }

// isRequired reports whether the field name of the type owner is required. options are the options
// in its JSON tag.
func isRequired(owner reflect.Type, name, options string) bool {
	if strings.Contains(options, "omitempty") || strings.Contains(options, "omitzero") {
		return slices.Contains(required()[typeName(owner)], name)
	}
	return !slices.Contains(optional()[typeName(owner)], name)
}

// describeEnum adds the possible values of a field to its schema property, if its type t is an
// enumeration.
func describeEnum(property object, t reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	into := property
	if t.Kind() == reflect.Slice {
		t = t.Elem()
		into, _ = property["items"].(object)
	}
	values := enums()[t.PkgPath()+"."+t.Name()]
	if t.Kind() != reflect.String || values == nil || into == nil {
		return
	}
	into["enum"] = values
	var text strings.Builder
	if was, _ := property["description"].(string); was != "" {
		text.WriteString(was + "\n\n")
	}
	text.WriteString("Possible enum values:")
	for _, v := range values {
		fmt.Fprintf(&text, "\n - `%q`", v)
	}
	property["description"] = text.String()
}
