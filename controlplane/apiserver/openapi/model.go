package openapi

import (
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// bodySchema returns a reference to the schema of a kind's objects, and adds the schema to the
// definitions. The schema is the kind's Model if it has one; otherwise it is generated from the Go
// type.
func (d *document) bodySchema(k *api.Kind) object {
	if k.Schema.Model == nil {
		return d.rootTypeRef(k.Type.New(), k.GVK)
	}
	name := customName(k)
	if d.defs[name] == nil {
		def, err := k.Schema.Model(d.v3)
		if err != nil { // admission validates the schema, so this does not occur
			def = object{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
		}
		if fields, _ := def["properties"].(object); fields != nil {
			d.addEmbedded(def)
			fields["metadata"] = d.metadataSchema()
		}
		def[gvkExtension] = []object{{"group": k.GVK.Group, "version": k.GVK.Version, "kind": k.GVK.Kind}}
		d.defs[name] = def
	}
	return object{"$ref": d.refPrefix() + name}
}

// listSchema returns a reference to the schema of a kind's list type, and adds the schema to the
// definitions.
func (d *document) listSchema(k *api.Kind) object {
	if k.Schema.Model == nil {
		return d.rootTypeRef(k.Type.NewList(), k.ListGVK())
	}
	name := customName(k) + "List"
	if d.defs[name] == nil {
		gvk, meta := k.ListGVK(), d.fieldSchema(reflect.TypeFor[metav1.ListMeta]())
		meta["description"] = metav1.PartialObjectMetadataList{}.SwaggerDoc()["metadata"]
		item := d.bodySchema(k)
		def := object{
			"type": "object", "description": gvk.Kind + " is a list of " + k.GVK.Kind, "required": []string{"items"},
			"properties": object{
				"apiVersion": typeMeta("apiVersion"), "kind": typeMeta("kind"), "metadata": meta,
				"items": object{"type": "array", "items": item, "description": "List of " + k.Resource + "."},
			},
			gvkExtension: []object{{"group": gvk.Group, "version": gvk.Version, "kind": gvk.Kind}},
		}
		if fields := d.defs[customName(k)].(object)[selectableExtension]; fields != nil {
			def[selectableExtension] = fields
		}
		d.defs[name] = def
	}
	return object{"$ref": d.refPrefix() + name}
}

// selectableExtension is the extension that lists the fields of a kind that field selectors may
// use.
const selectableExtension = "x-kubernetes-selectable-fields"

// metadataSchema returns the schema of the metadata field of objects.
func (d *document) metadataSchema() object {
	out := d.fieldSchema(reflect.TypeFor[metav1.ObjectMeta]())
	out["description"] = metav1.PartialObjectMetadata{}.SwaggerDoc()["metadata"]
	return out
}

func typeMeta(field string) object {
	return object{"type": "string", "description": metav1.TypeMeta{}.SwaggerDoc()[field]}
}

// addEmbedded adds apiVersion, kind and metadata to the schemas of embedded resources inside
// schema. In v2, a schema that preserves unknown fields gets no properties, because clients would
// reject all other fields.
func (d *document) addEmbedded(schema object) {
	properties, _ := schema["properties"].(object)
	for _, p := range properties {
		if inner, ok := p.(object); ok {
			d.addEmbedded(inner)
		}
	}
	for _, part := range []string{"items", "additionalProperties"} {
		if inner, ok := schema[part].(object); ok {
			d.addEmbedded(inner)
		}
	}
	preserves := schema["x-kubernetes-preserve-unknown-fields"] == true
	if schema["x-kubernetes-embedded-resource"] != true || !d.v3 && preserves {
		return
	}
	if properties == nil {
		properties = object{}
		schema["properties"] = properties
	}
	properties["apiVersion"], properties["kind"] = typeMeta("apiVersion"), typeMeta("kind")
	properties["metadata"] = d.metadataSchema()
	needed, _ := schema["required"].([]any)
	for _, name := range []any{"kind", "apiVersion"} {
		if !slices.Contains(needed, name) {
			needed = append(needed, name)
		}
	}
	schema["required"] = needed
}

// customName returns the definition name of a kind without a Go type: "com.example.v1.Widget".
func customName(k *api.Kind) string {
	parts := strings.Split(k.GVK.Group, ".")
	slices.Reverse(parts)
	return strings.Join(parts, ".") + "." + k.GVK.Version + "." + k.GVK.Kind
}
