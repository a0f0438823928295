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

// TypeConverterForModel returns the server-side apply converter for a kind with the given OpenAPI
// schema, which may contain MetaRef.
func TypeConverterForModel(gvk schema.GroupVersionKind, model *spec.Schema) (managedfields.TypeConverter, error) {
	root := *model
	root.Extensions = spec.Extensions{}
	for name, value := range model.Extensions {
		root.Extensions[name] = value
	}
	root.Extensions["x-kubernetes-group-version-kind"] = []any{map[string]any{
		"group": gvk.Group, "version": gvk.Version, "kind": gvk.Kind,
	}}
	return managedfields.NewTypeConverter(map[string]*spec.Schema{gvk.Kind: &root, metaModel: objectMetaSchema()},
		false)
}

func scalarSchema(t string) spec.Schema {
	return spec.Schema{SchemaProps: spec.SchemaProps{Type: spec.StringOrArray{t}}}
}

func listSchema(items spec.Schema, listType string, keys ...string) spec.Schema {
	s := scalarSchema("array")
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

func objectSchema(fields map[string]spec.Schema) spec.Schema {
	s := scalarSchema("object")
	s.Properties = fields
	return s
}

func mapSchema(values spec.Schema) spec.Schema {
	s := scalarSchema("object")
	s.AdditionalProperties = &spec.SchemaOrBool{Allows: true, Schema: &values}
	return s
}

// anySchema returns a schema that accepts any value and preserves unknown fields.
func anySchema() spec.Schema {
	return spec.Schema{VendorExtensible: spec.VendorExtensible{
		Extensions: spec.Extensions{"x-kubernetes-preserve-unknown-fields": true}}}
}

// objectMetaSchema returns a schema of ObjectMeta that is detailed enough for field ownership.
func objectMetaSchema() *spec.Schema {
	text, number, yes := scalarSchema("string"), scalarSchema("integer"), scalarSchema("boolean")
	owner := objectSchema(map[string]spec.Schema{
		"apiVersion": text, "kind": text, "name": text, "uid": text, "controller": yes, "blockOwnerDeletion": yes,
	})
	owner.Extensions = spec.Extensions{"x-kubernetes-map-type": "atomic"}
	manager := objectSchema(map[string]spec.Schema{
		"manager": text, "operation": text, "apiVersion": text, "time": text, "fieldsType": text,
		"fieldsV1": anySchema(), "subresource": text,
	})
	meta := objectSchema(map[string]spec.Schema{
		"name": text, "generateName": text, "namespace": text, "selfLink": text, "uid": text, "resourceVersion": text,
		"generation": number, "creationTimestamp": text, "deletionTimestamp": text,
		"deletionGracePeriodSeconds": number,
		"labels":                     mapSchema(text), "annotations": mapSchema(text),
		"finalizers":      listSchema(text, "set"),
		"ownerReferences": listSchema(owner, "map", "uid"), "managedFields": listSchema(manager, "atomic"),
	})
	return &meta
}

// DefinitionTypes returns the server-side apply converter for CustomResourceDefinitions. Their
// lists are atomic, except for the conditions. It is built on first use.
var DefinitionTypes = sync.OnceValue(func() managedfields.TypeConverter {
	condition := objectSchema(map[string]spec.Schema{
		"type": scalarSchema("string"), "status": scalarSchema("string"), "lastTransitionTime": scalarSchema("string"),
		"reason":  scalarSchema("string"),
		"message": scalarSchema("string"), "observedGeneration": scalarSchema("integer"),
	})
	atomic := listSchema(anySchema(), "atomic")
	model := objectSchema(map[string]spec.Schema{
		"apiVersion": scalarSchema("string"), "kind": scalarSchema("string"), "metadata": MetaRef(),
		"spec": objectSchema(map[string]spec.Schema{
			"group": scalarSchema("string"), "scope": scalarSchema("string"),
			"preserveUnknownFields": scalarSchema("boolean"), "versions": atomic,
			"names": objectSchema(map[string]spec.Schema{
				"plural": scalarSchema("string"), "singular": scalarSchema("string"), "kind": scalarSchema("string"),
				"listKind":   scalarSchema("string"),
				"shortNames": atomic, "categories": atomic,
			}),
			"conversion": objectSchema(map[string]spec.Schema{
				"strategy": scalarSchema("string"),
				"webhook": objectSchema(map[string]spec.Schema{
					"conversionReviewVersions": atomic,
					"clientConfig": objectSchema(map[string]spec.Schema{
						"url": scalarSchema("string"), "caBundle": scalarSchema("string"),
						"service": objectSchema(map[string]spec.Schema{
							"name": scalarSchema("string"), "namespace": scalarSchema("string"),
							"path": scalarSchema("string"), "port": scalarSchema("integer"),
						}),
					}),
				}),
			}),
		}),
		"status": objectSchema(map[string]spec.Schema{
			"conditions": listSchema(condition, "map", "type"), "storedVersions": atomic,
			"observedGeneration": scalarSchema("integer"),
			"acceptedNames": objectSchema(map[string]spec.Schema{
				"plural": scalarSchema("string"), "singular": scalarSchema("string"), "kind": scalarSchema("string"),
				"listKind":   scalarSchema("string"),
				"shortNames": atomic, "categories": atomic,
			}),
		}),
	})
	types, err := TypeConverterForModel(schema.GroupVersionKind{Group: "apiextensions.k8s.io", Version: "v1",
		Kind: "CustomResourceDefinition"}, &model)
	if err != nil {
		panic("custom: the model of definitions: " + err.Error()) // the model is a constant
	}
	return types
})

// APIServiceTypes returns the server-side apply converter for APIServices, which are not in
// k8s.io/api. It is built on first use.
var APIServiceTypes = sync.OnceValue(func() managedfields.TypeConverter {
	condition := objectSchema(map[string]spec.Schema{
		"type": scalarSchema("string"), "status": scalarSchema("string"), "lastTransitionTime": scalarSchema("string"),
		"reason":  scalarSchema("string"),
		"message": scalarSchema("string"),
	})
	model := objectSchema(map[string]spec.Schema{
		"apiVersion": scalarSchema("string"), "kind": scalarSchema("string"), "metadata": MetaRef(),
		"spec": objectSchema(map[string]spec.Schema{
			"group": scalarSchema("string"), "version": scalarSchema("string"),
			"insecureSkipTLSVerify": scalarSchema("boolean"), "caBundle": scalarSchema("string"),
			"groupPriorityMinimum": scalarSchema("integer"), "versionPriority": scalarSchema("integer"),
			"service": objectSchema(map[string]spec.Schema{
				"name": scalarSchema("string"), "namespace": scalarSchema("string"), "port": scalarSchema("integer"),
			}),
		}),
		"status": objectSchema(map[string]spec.Schema{"conditions": listSchema(condition, "map", "type")}),
	})
	types, err := TypeConverterForModel(schema.GroupVersionKind{Group: "apiregistration.k8s.io", Version: "v1",
		Kind: "APIService"}, &model)
	if err != nil {
		panic("custom: the model of APIServices: " + err.Error()) // the model is a constant
	}
	return types
})
