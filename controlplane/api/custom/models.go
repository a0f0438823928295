package custom

import (
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/kube-openapi/pkg/validation/spec"
)

// metaModel is the name of metadata among the models.
const metaModel = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"

// MetaRef refers to metadata within models.
func MetaRef() spec.Schema {
	return spec.Schema{SchemaProps: spec.SchemaProps{Ref: spec.MustCreateRef("#/definitions/" + metaModel)}}
}

// TypesOf is the converter of server-side apply for the kind with this model, which may use MetaRef.
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

// anything is what no schema describes.
func anything() spec.Schema {
	return spec.Schema{VendorExtensible: spec.VendorExtensible{Extensions: spec.Extensions{"x-kubernetes-preserve-unknown-fields": true}}}
}

// objectMeta describes metadata as far as it matters who owns which part.
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

// DefinitionTypes is the converter of server-side apply for custom resource definitions: their lists are atomic but
// for the conditions. It is made when the first one is applied.
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
		panic("custom: the model of definitions: " + err.Error()) // it is a constant
	}
	return types
})

// APIServiceTypes is the converter of server-side apply for APIServices, whose Go type is not among those of k8s.io/api.
// It is made when the first one is applied.
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
		panic("custom: the model of APIServices: " + err.Error()) // it is a constant
	}
	return types
})
