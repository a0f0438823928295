package custom

import (
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// metaModel is the name of the ObjectMeta schema among the OpenAPI models.
const metaModel = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"

// MetaRef returns a reference to the ObjectMeta schema, for use in models.
func MetaRef() spec.Schema {
	return spec.Schema{SchemaProps: spec.SchemaProps{Ref: spec.MustCreateRef("#/definitions/" + metaModel)}}
}

// TypesOf returns the server-side apply converter for the kind gvk with the OpenAPI schema model,
// which may contain MetaRef.
func TypesOf(gvk schema.GroupVersionKind, model *spec.Schema) (managedfields.TypeConverter, error) {
	root := *model
	root.Extensions = spec.Extensions{}
	for name, value := range model.Extensions {
		root.Extensions[name] = value
	}
	root.Extensions["x-kubernetes-group-version-kind"] = []any{map[string]any{
		"group": gvk.Group, "version": gvk.Version, "kind": gvk.Kind,
	}}
	return managedfields.NewTypeConverter(map[string]*spec.Schema{gvk.Kind: &root, metaModel: objectMeta()}, false)
}

func scalar(t string) spec.Schema {
	return spec.Schema{SchemaProps: spec.SchemaProps{Type: spec.StringOrArray{t}}}
}

func listOf(items spec.Schema, listType string, keys ...string) spec.Schema {
	s := scalar("array")
	s.Items = &spec.SchemaOrArray{Schema: &items}
	s.Extensions = spec.Extensions{"x-kubernetes-list-type": listType}
	if len(keys) > 0 {
		all := make([]any, len(keys))
		for i, k := range keys {
			all[i] = k
		}
		s.Extensions["x-kubernetes-list-map-keys"] = all
	}
	return s
}

func objectOf(fields map[string]spec.Schema) spec.Schema {
	s := scalar("object")
	s.Properties = fields
	return s
}

func mapOf(values spec.Schema) spec.Schema {
	s := scalar("object")
	s.AdditionalProperties = &spec.SchemaOrBool{Allows: true, Schema: &values}
	return s
}

// anything returns a schema that accepts any value and preserves unknown fields.
func anything() spec.Schema {
	return spec.Schema{VendorExtensible: spec.VendorExtensible{Extensions: spec.Extensions{"x-kubernetes-preserve-unknown-fields": true}}}
}

// objectMeta returns a schema of ObjectMeta that is detailed enough for field ownership.
func objectMeta() *spec.Schema {
	text, number, yes := scalar("string"), scalar("integer"), scalar("boolean")
	owner := objectOf(map[string]spec.Schema{
		"apiVersion": text, "kind": text, "name": text, "uid": text, "controller": yes, "blockOwnerDeletion": yes,
	})
	owner.Extensions = spec.Extensions{"x-kubernetes-map-type": "atomic"}
	manager := objectOf(map[string]spec.Schema{
		"manager": text, "operation": text, "apiVersion": text, "time": text, "fieldsType": text, "fieldsV1": anything(), "subresource": text,
	})
	meta := objectOf(map[string]spec.Schema{
		"name": text, "generateName": text, "namespace": text, "selfLink": text, "uid": text, "resourceVersion": text,
		"generation": number, "creationTimestamp": text, "deletionTimestamp": text, "deletionGracePeriodSeconds": number,
		"labels": mapOf(text), "annotations": mapOf(text), "finalizers": listOf(text, "set"),
		"ownerReferences": listOf(owner, "map", "uid"), "managedFields": listOf(manager, "atomic"),
	})
	return &meta
}

// DefinitionTypes returns the server-side apply converter for CustomResourceDefinitions. Their
// lists are atomic, except for the conditions. It is built on first use.
var DefinitionTypes = sync.OnceValue(func() managedfields.TypeConverter {
	condition := objectOf(map[string]spec.Schema{
		"type": scalar("string"), "status": scalar("string"), "lastTransitionTime": scalar("string"), "reason": scalar("string"),
		"message": scalar("string"), "observedGeneration": scalar("integer"),
	})
	atomic := listOf(anything(), "atomic")
	model := objectOf(map[string]spec.Schema{
		"apiVersion": scalar("string"), "kind": scalar("string"), "metadata": MetaRef(),
		"spec": objectOf(map[string]spec.Schema{
			"group": scalar("string"), "scope": scalar("string"), "preserveUnknownFields": scalar("boolean"), "versions": atomic,
			"names": objectOf(map[string]spec.Schema{
				"plural": scalar("string"), "singular": scalar("string"), "kind": scalar("string"), "listKind": scalar("string"),
				"shortNames": atomic, "categories": atomic,
			}),
			"conversion": objectOf(map[string]spec.Schema{
				"strategy": scalar("string"),
				"webhook": objectOf(map[string]spec.Schema{
					"conversionReviewVersions": atomic,
					"clientConfig": objectOf(map[string]spec.Schema{
						"url": scalar("string"), "caBundle": scalar("string"),
						"service": objectOf(map[string]spec.Schema{
							"name": scalar("string"), "namespace": scalar("string"), "path": scalar("string"), "port": scalar("integer"),
						}),
					}),
				}),
			}),
		}),
		"status": objectOf(map[string]spec.Schema{
			"conditions": listOf(condition, "map", "type"), "storedVersions": atomic, "observedGeneration": scalar("integer"),
			"acceptedNames": objectOf(map[string]spec.Schema{
				"plural": scalar("string"), "singular": scalar("string"), "kind": scalar("string"), "listKind": scalar("string"),
				"shortNames": atomic, "categories": atomic,
			}),
		}),
	})
	types, err := TypesOf(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1", Kind: "CustomResourceDefinition"}, &model)
	if err != nil {
		panic("custom: the model of definitions: " + err.Error()) // the model is a constant
	}
	return types
})

// APIServiceTypes returns the server-side apply converter for APIServices, which are not in
// k8s.io/api. It is built on first use.
var APIServiceTypes = sync.OnceValue(func() managedfields.TypeConverter {
	condition := objectOf(map[string]spec.Schema{
		"type": scalar("string"), "status": scalar("string"), "lastTransitionTime": scalar("string"), "reason": scalar("string"),
		"message": scalar("string"),
	})
	model := objectOf(map[string]spec.Schema{
		"apiVersion": scalar("string"), "kind": scalar("string"), "metadata": MetaRef(),
		"spec": objectOf(map[string]spec.Schema{
			"group": scalar("string"), "version": scalar("string"), "insecureSkipTLSVerify": scalar("boolean"), "caBundle": scalar("string"),
			"groupPriorityMinimum": scalar("integer"), "versionPriority": scalar("integer"),
			"service": objectOf(map[string]spec.Schema{
				"name": scalar("string"), "namespace": scalar("string"), "port": scalar("integer"),
			}),
		}),
		"status": objectOf(map[string]spec.Schema{"conditions": listOf(condition, "map", "type")}),
	})
	types, err := TypesOf(schema.GroupVersionKind{Group: "apiregistration.k8s.io", Version: "v1", Kind: "APIService"}, &model)
	if err != nil {
		panic("custom: the model of APIServices: " + err.Error()) // the model is a constant
	}
	return types
})
