package openapi

import (
	"reflect"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// body refers to the schema of a kind's objects: its own, where it brings one, or that of the Go type.
func (d *document) body(k *api.Kind) object {
	if k.Model == nil {
		return d.top(k.New(), k.GVK)
	}
	name := customName(k)
	if d.defs[name] == nil {
		def, err := k.Model(d.v3)
		if err != nil { // which the judgement of its definition keeps away
			def = object{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
		}
		fields, _ := def["properties"].(object)
		if fields == nil {
			fields = object{}
		}
		fields["metadata"] = d.property(reflect.TypeFor[metav1.ObjectMeta]())
		def["properties"] = fields
		def[gvkExtension] = []object{{"group": k.GVK.Group, "version": k.GVK.Version, "kind": k.GVK.Kind}}
		d.defs[name] = def
	}
	return object{"$ref": d.prefix() + name}
}

// list refers to the schema of a kind's lists.
func (d *document) list(k *api.Kind) object {
	if k.Model == nil {
		return d.top(k.NewList(), k.ListGVK())
	}
	name := customName(k) + "List"
	if d.defs[name] == nil {
		gvk, text := k.ListGVK(), object{"type": "string"}
		d.defs[name] = object{
			"type": "object", "description": gvk.Kind + " is a list of " + k.GVK.Kind, "required": []string{"items"},
			"properties": object{
				"apiVersion": text, "kind": text, "metadata": d.property(reflect.TypeFor[metav1.ListMeta]()),
				"items": object{"type": "array", "items": d.body(k)},
			},
			gvkExtension: []object{{"group": gvk.Group, "version": gvk.Version, "kind": gvk.Kind}},
		}
	}
	return object{"$ref": d.prefix() + name}
}

// customName is the name of a kind without a Go type among the definitions: "com.example.v1.Widget".
func customName(k *api.Kind) string {
	parts := strings.Split(k.GVK.Group, ".")
	slices.Reverse(parts)
	return strings.Join(parts, ".") + "." + k.GVK.Version + "." + k.GVK.Kind
}
