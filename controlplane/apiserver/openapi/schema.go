// Package openapi serves the OpenAPI v2 and v3 documents of the served kinds. It generates them
// from Go types by reflection and from the schemas of custom resources. Documents consist of pieces
// that are generated on first use and stored compressed. Few clients request them, and the
// uncompressed text has several megabytes.
package openapi

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sort"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	smd "sigs.k8s.io/structured-merge-diff/v6/schema"
)

// object is a JSON object. encoding/json sorts its keys, so documents are deterministic.
type object = map[string]any

// Methods with which Go types of the Kubernetes API describe their OpenAPI schema.
type (
	documented interface{ SwaggerDoc() map[string]string }
	named      interface{ OpenAPIModelName() string }
	primitive  interface {
		OpenAPISchemaType() []string
		OpenAPISchemaFormat() string
	}
	alternative interface{ OpenAPIV3OneOfTypes() []string }
)

// schemas collects definitions and the Go types that they reference.
type schemas struct {
	v3    bool
	defs  object
	types typeSet
	// define makes typeRef define the types that it references. Otherwise they are defined once for
	// all kinds of a document.
	define bool
	// known is the server-side apply schema of the built-in types.
	known *smd.Schema
}

// typeSet is a set of Go types, with the kinds that each type represents as an object, list or
// request body.
type typeSet map[reflect.Type]map[schema.GroupVersionKind]bool

func (s typeSet) addType(t reflect.Type, gvks ...schema.GroupVersionKind) {
	if s[t] == nil {
		s[t] = map[schema.GroupVersionKind]bool{}
	}
	for _, gvk := range gvks {
		s[t][gvk] = true
	}
}

// kindsOf returns the kinds of a type in a fixed order.
func (s typeSet) kindsOf(t reflect.Type) []schema.GroupVersionKind {
	return slices.SortedFunc(maps.Keys(s[t]), func(a, b schema.GroupVersionKind) int {
		return strings.Compare(a.String(), b.String())
	})
}

// hashKey returns a hash that identifies the set.
func (s typeSet) hashKey() (sum [sha256.Size]byte) {
	lines := make([]string, 0, len(s))
	for t := range s {
		lines = append(lines, fmt.Sprintln(modelName(t), s.kindsOf(t)))
	}
	slices.Sort(lines)
	return sha256.Sum256([]byte(strings.Join(lines, "")))
}

func newSchemas(v3 bool) *schemas { return &schemas{v3: v3, defs: object{}, types: typeSet{}} }

// typeDefinitions returns the definitions of Go types and of all types that they reference.
func typeDefinitions(types typeSet, v3 bool) (object, error) {
	s := newSchemas(v3)
	s.define = true
	var err error
	if s.known, err = structure(); err != nil {
		return nil, err
	}
	for t := range types {
		s.typeRef(t)
		var list []object
		for _, k := range types.kindsOf(t) {
			list = append(list, object{"group": k.Group, "version": k.Version, "kind": k.Kind})
		}
		if list != nil {
			s.defs[modelName(t)].(object)[gvkExtension] = list
		}
	}
	return s.defs, nil
}

func (s *schemas) refPrefix() string {
	if s.v3 {
		return "#/components/schemas/"
	}
	return "#/definitions/"
}

// rootTypeRef returns a reference to the type of obj and records that it represents the kind gvk.
func (s *schemas) rootTypeRef(obj runtime.Object, gvk schema.GroupVersionKind) object {
	t := reflect.TypeOf(obj).Elem()
	s.types.addType(t, gvk)
	return s.typeRef(t)
}

// typeRef returns a reference to the definition of a named type. If s.define is true, it also adds
// the definition.
func (s *schemas) typeRef(t reflect.Type) object {
	name := modelName(t)
	s.types.addType(t)
	if _, ok := s.defs[name]; !ok && s.define {
		def := object{}
		s.defs[name] = def // set before its fields are described, because types may be recursive
		s.describeType(t, def)
	}
	return object{"$ref": s.refPrefix() + name}
}

// modelName returns the definition name of a type: the name that the type itself declares, or else
// one like "io.k8s.api.core.v1.Pod".
func modelName(t reflect.Type) string {
	if n, ok := reflect.New(t).Interface().(named); ok {
		return n.OpenAPIModelName()
	}
	return modelNameOf(t.PkgPath(), t.Name())
}

// modelNameOf returns the definition name for a package and type name: "io.k8s.api.core.v1.Pod".
func modelNameOf(pkg, name string) string {
	host, rest, _ := strings.Cut(pkg, "/")
	parts := strings.Split(host, ".")
	slices.Reverse(parts)
	return strings.Join(parts, ".") + "." + strings.ReplaceAll(rest, "/", ".") + "." + name
}

func (s *schemas) describeType(t reflect.Type, def object) {
	zero := reflect.New(t).Interface()
	docs := map[string]string{}
	if d, ok := zero.(documented); ok {
		docs = d.SwaggerDoc()
	}
	if text := docs[""]; text != "" {
		def["description"] = text
	}
	if p, ok := zero.(primitive); ok {
		if a, ok := zero.(alternative); ok && s.v3 { // v2 cannot express alternatives such as a number or a string
			var types []object
			for _, t := range a.OpenAPIV3OneOfTypes() {
				types = append(types, object{"type": t})
			}
			def["oneOf"] = types
		} else if types := p.OpenAPISchemaType(); len(types) > 0 {
			def["type"] = types[0]
		} else if def["description"] == nil {
			def["description"] = t.Name() + " is a value of any of several types."
		}
		if f := p.OpenAPISchemaFormat(); f != "" {
			def["format"] = f
		}
		return
	}
	def["type"] = "object"
	if t.Kind() != reflect.Struct || freeForm(t) {
		return
	}
	props := object{}
	var required []string
	known := mapOf(s.known, modelName(t))
	s.addFields(t, docs, known, props, &required)
	describeMap(def, known)
	if len(props) > 0 {
		def["properties"] = props
	}
	if len(required) > 0 {
		sort.Strings(required)
		def["required"] = required
	}
}

// freeForm reports whether a type has its own JSON encoding, so that its schema cannot be derived
// from its Go fields.
func freeForm(t reflect.Type) bool {
	switch t.Name() {
	case "RawExtension", "FieldsV1", "Unknown":
		return strings.HasPrefix(t.PkgPath(), "k8s.io/apimachinery/")
	}
	return false
}

// addFields adds the schemas of a struct's JSON fields to props, including the fields of inlined
// structs. It appends the names of required fields to required.
func (s *schemas) addFields(t reflect.Type, docs map[string]string, atoms *smd.Map, props object, required *[]string) {
	for i := range t.NumField() {
		f := t.Field(i)
		tag, ok := f.Tag.Lookup("json")
		if !ok || tag == "-" || !f.IsExported() {
			continue
		}
		name, opts, _ := strings.Cut(tag, ",")
		if name == "" {
			if in := f.Type; f.Anonymous || strings.Contains(opts, "inline") {
				if in.Kind() == reflect.Pointer {
					in = in.Elem()
				}
				inner := docs
				if d, ok := reflect.New(in).Interface().(documented); ok {
					inner = d.SwaggerDoc()
				}
				s.addFields(in, inner, atoms, props, required)
			}
			continue
		}
		p := s.fieldSchema(f.Type)
		if text := docs[name]; text != "" {
			p["description"] = text
		}
		describeEnum(p, f.Type)
		s.describeField(p, atoms, t, f, name)
		if v := f.Tag.Get("patchStrategy"); v != "" {
			p["x-kubernetes-patch-strategy"] = v
		}
		if v := f.Tag.Get("patchMergeKey"); v != "" {
			p["x-kubernetes-patch-merge-key"] = v
		}
		isBare := len(docs) > 0 || slices.Contains(bare()[typeName(t)], name)
		if refs, _ := p["allOf"].([]object); len(p) == 1 && len(refs) == 1 && isBare {
			p = refs[0] // a reference without siblings needs no allOf
		}
		props[name] = p
		if isRequired(t, name, opts) {
			*required = append(*required, name)
		}
	}
}

// fieldSchema returns a new schema of a field of type t, which the caller may extend.
func (s *schemas) fieldSchema(t reflect.Type) object {
	switch t.Kind() {
	case reflect.Pointer:
		return s.fieldSchema(t.Elem())
	case reflect.Struct:
		ref := s.typeRef(t)
		if s.v3 {
			// A sibling of $ref would be ignored.
			return object{"allOf": []object{ref}}
		}
		return ref
	case reflect.Map:
		return object{"type": "object", "additionalProperties": s.elementSchema(t.Elem())}
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return object{"type": "string", "format": "byte"}
		}
		return object{"type": "array", "items": s.elementSchema(t.Elem())}
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Int64, reflect.Int, reflect.Uint64, reflect.Uint32:
		return object{"type": "integer", "format": "int64"}
	case reflect.Int32, reflect.Int16, reflect.Int8, reflect.Uint16, reflect.Uint8:
		return object{"type": "integer", "format": "int32"}
	case reflect.Float64, reflect.Float32:
		return object{"type": "number", "format": "double"}
	}
	return object{"type": "object"}
}

func (s *schemas) elementSchema(t reflect.Type) object {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() == reflect.Struct {
		return s.typeRef(t)
	}
	return s.fieldSchema(t)
}
