// Package openapi describes what is served in OpenAPI v2 and v3, made from the
// Go types by reflection. Documents are made when first asked for and kept
// compressed: few clients ever ask, and the plain text is megabytes.
package openapi

import (
	"reflect"
	"sort"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// object is a JSON object in the making. encoding/json sorts its keys, so documents are deterministic.
type object = map[string]any

// The faces that Kubernetes' API types show about themselves.
type (
	documented interface{ SwaggerDoc() map[string]string }
	named      interface{ OpenAPIModelName() string }
	primitive  interface {
		OpenAPISchemaType() []string
		OpenAPISchemaFormat() string
	}
	alternative interface{ OpenAPIV3OneOfTypes() []string }
)

// schemas collects the definitions that a document refers to.
type schemas struct {
	v3   bool
	defs object
	gvks map[reflect.Type][]schema.GroupVersionKind
}

func newSchemas(v3 bool) *schemas {
	return &schemas{v3: v3, defs: object{}, gvks: map[reflect.Type][]schema.GroupVersionKind{}}
}

func (s *schemas) prefix() string {
	if s.v3 {
		return "#/components/schemas/"
	}
	return "#/definitions/"
}

// top refers to the type of a kind and notes its name.
func (s *schemas) top(obj runtime.Object, gvk schema.GroupVersionKind) object {
	t := reflect.TypeOf(obj).Elem()
	for _, k := range s.gvks[t] {
		if k == gvk {
			return s.ref(t)
		}
	}
	s.gvks[t] = append(s.gvks[t], gvk)
	ref := s.ref(t)
	var list []object
	for _, k := range s.gvks[t] {
		list = append(list, object{"group": k.Group, "version": k.Version, "kind": k.Kind})
	}
	s.defs[modelName(t)].(object)["x-kubernetes-group-version-kind"] = list
	return ref
}

// ref refers to a named type and defines it when it is new.
func (s *schemas) ref(t reflect.Type) object {
	name := modelName(t)
	if _, ok := s.defs[name]; !ok {
		def := object{}
		s.defs[name] = def // before its fields: types refer to themselves
		s.define(t, def)
	}
	return object{"$ref": s.prefix() + name}
}

// modelName is the name of a type among the definitions: its own, or one like "io.k8s.api.core.v1.Pod".
func modelName(t reflect.Type) string {
	if n, ok := reflect.New(t).Interface().(named); ok {
		return n.OpenAPIModelName()
	}
	host, rest, _ := strings.Cut(t.PkgPath(), "/")
	parts := strings.Split(host, ".")
	for i, j := 0, len(parts)-1; i < j; i, j = i+1, j-1 {
		parts[i], parts[j] = parts[j], parts[i]
	}
	return strings.Join(parts, ".") + "." + strings.ReplaceAll(rest, "/", ".") + "." + t.Name()
}

func (s *schemas) define(t reflect.Type, def object) {
	zero := reflect.New(t).Interface()
	docs := map[string]string{}
	if d, ok := zero.(documented); ok {
		docs = d.SwaggerDoc()
	}
	if text := docs[""]; text != "" {
		def["description"] = text
	}
	if p, ok := zero.(primitive); ok && len(p.OpenAPISchemaType()) > 0 {
		if a, ok := zero.(alternative); ok && s.v3 { // v2 has no words for a number or a string
			var types []object
			for _, t := range a.OpenAPIV3OneOfTypes() {
				types = append(types, object{"type": t})
			}
			def["oneOf"] = types
		} else {
			def["type"] = p.OpenAPISchemaType()[0]
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
	s.fields(t, docs, props, &required)
	if len(props) > 0 {
		def["properties"] = props
	}
	if len(required) > 0 {
		sort.Strings(required)
		def["required"] = required
	}
}

// freeForm are types whose Go fields are not their JSON.
func freeForm(t reflect.Type) bool {
	switch t.Name() {
	case "RawExtension", "FieldsV1", "Unknown":
		return strings.HasPrefix(t.PkgPath(), "k8s.io/apimachinery/")
	}
	return false
}

// fields adds the JSON fields of a struct; those of inlined structs are its own.
func (s *schemas) fields(t reflect.Type, docs map[string]string, props object, required *[]string) {
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
				s.fields(in, inner, props, required)
			}
			continue
		}
		p := s.property(f.Type)
		if text := docs[name]; text != "" {
			p["description"] = text
		}
		if v := f.Tag.Get("patchStrategy"); v != "" {
			p["x-kubernetes-patch-strategy"] = v
		}
		if v := f.Tag.Get("patchMergeKey"); v != "" {
			p["x-kubernetes-patch-merge-key"] = v
		}
		props[name] = p
		if !strings.Contains(opts, "omitempty") && !strings.Contains(opts, "omitzero") && f.Type.Kind() != reflect.Pointer {
			*required = append(*required, name)
		}
	}
}

// property is the schema of a field of type t, its own to add to.
func (s *schemas) property(t reflect.Type) object {
	switch t.Kind() {
	case reflect.Pointer:
		return s.property(t.Elem())
	case reflect.Struct:
		ref := s.ref(t)
		if s.v3 {
			// A sibling of $ref would be ignored.
			return object{"allOf": []object{ref}}
		}
		return ref
	case reflect.Map:
		return object{"type": "object", "additionalProperties": s.element(t.Elem())}
	case reflect.Slice, reflect.Array:
		if t.Elem().Kind() == reflect.Uint8 {
			return object{"type": "string", "format": "byte"}
		}
		return object{"type": "array", "items": s.element(t.Elem())}
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

func (s *schemas) element(t reflect.Type) object {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() == reflect.Struct {
		return s.ref(t)
	}
	return s.property(t)
}
