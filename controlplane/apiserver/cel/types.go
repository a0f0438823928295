package cel

import (
	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types/traits"
	apiservercel "k8s.io/apiserver/pkg/cel"
)

type fieldTypes = map[string]*apiservercel.DeclType

// objectType declares an object type with the given fields. The fields listed in required are
// always set.
func objectType(name string, fields fieldTypes, required ...string) *apiservercel.DeclType {
	out := make(map[string]*apiservercel.DeclField, len(fields))
	for field, t := range fields {
		out[field] = apiservercel.NewDeclField(field, t, false, nil, nil)
	}
	for _, field := range required {
		out[field].Required = true
	}
	return apiservercel.NewObjectType(name, out)
}

func listOf(t *apiservercel.DeclType) *apiservercel.DeclType { return apiservercel.NewListType(t, -1) }

func mapTo(t *apiservercel.DeclType) *apiservercel.DeclType {
	return apiservercel.NewMapType(apiservercel.StringType, t, -1)
}

// requestType returns the type of the variable request: an AdmissionRequest without the objects.
func requestType() *apiservercel.DeclType {
	text := apiservercel.StringType
	kind := objectType("kubernetes.GroupVersionKind", fieldTypes{"group": text, "version": text, "kind": text},
		"group", "version", "kind")
	resource := objectType("kubernetes.GroupVersionResource",
		fieldTypes{"group": text, "version": text, "resource": text},
		"group", "version", "resource")
	user := objectType("kubernetes.UserInfo", fieldTypes{
		"username": text, "uid": text, "groups": listOf(text), "extra": mapTo(listOf(text)),
	})
	return objectType("kubernetes.AdmissionRequest", fieldTypes{
		"kind": kind, "resource": resource, "subResource": text,
		"requestKind": kind, "requestResource": resource, "requestSubResource": text,
		"name": text, "namespace": text, "operation": text, "userInfo": user,
		"dryRun": apiservercel.BoolType, "options": apiservercel.DynType,
	}, "kind", "resource", "requestKind", "requestResource", "name", "operation", "userInfo")
}

// namespaceType returns the type of the variable namespaceObject: a Namespace without some fields.
func namespaceType() *apiservercel.DeclType {
	text, moment, number := apiservercel.StringType, apiservercel.TimestampType, apiservercel.IntType
	condition := objectType("kubernetes.NamespaceCondition", fieldTypes{
		"status": text, "type": text, "lastTransitionTime": moment, "message": text, "reason": text,
	}, "status", "type", "lastTransitionTime", "message", "reason")
	return objectType("kubernetes.Namespace", fieldTypes{
		"metadata": objectType("kubernetes.NamespaceMetadata", fieldTypes{
			"name": text, "generateName": text, "namespace": text, "labels": mapTo(text), "annotations": mapTo(text),
			"UID": text, "creationTimestamp": moment, "deletionGracePeriodSeconds": number, "deletionTimestamp": moment,
			"generation": number, "resourceVersion": text, "finalizers": listOf(text),
		}, "name", "generateName", "namespace", "labels", "annotations", "UID", "creationTimestamp",
			"deletionGracePeriodSeconds", "deletionTimestamp", "generation", "resourceVersion", "finalizers"),
		"spec": objectType("kubernetes.NamespaceSpec", fieldTypes{"finalizers": listOf(text)}, "finalizers"),
		"status": objectType("kubernetes.NamespaceStatus", fieldTypes{"conditions": listOf(condition), "phase": text},
			"conditions", "phase"),
	}, "metadata", "spec", "status")
}

// scalars maps the scalar types of CEL to the declared types (DeclType) of Kubernetes.
var scalars = map[*cel.Type]*apiservercel.DeclType{
	cel.AnyType: apiservercel.AnyType, cel.BoolType: apiservercel.BoolType, cel.BytesType: apiservercel.BytesType,
	cel.DoubleType: apiservercel.DoubleType, cel.DurationType: apiservercel.DurationType,
	cel.IntType: apiservercel.IntType, cel.NullType: apiservercel.NullType, cel.StringType: apiservercel.StringType,
	cel.TimestampType: apiservercel.TimestampType, cel.UintType: apiservercel.UintType,
}

// declType returns the declared type (DeclType) for a CEL type. It returns the dynamic type for a
// CEL type without a declared type.
func declType(t *cel.Type) *apiservercel.DeclType {
	if d := scalars[t]; d != nil {
		return d
	}
	if !t.HasTrait(traits.ContainerType) || !t.HasTrait(traits.IndexerType) {
		return apiservercel.DynType
	}
	switch p := t.Parameters(); len(p) {
	case 1:
		return listOf(declType(p[0]))
	case 2:
		return apiservercel.NewMapType(declType(p[0]), declType(p[1]), -1)
	}
	return apiservercel.DynType
}
