package cel

import (
	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types/traits"
	apiservercel "k8s.io/apiserver/pkg/cel"
)

type fields = map[string]*apiservercel.DeclType

// object declares an object type with the given fields. Fields named in required are always set.
func object(name string, of fields, required ...string) *apiservercel.DeclType {
	out := make(map[string]*apiservercel.DeclField, len(of))
	for field, t := range of {
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
	kind := object("kubernetes.GroupVersionKind", fields{"group": text, "version": text, "kind": text},
		"group", "version", "kind")
	resource := object("kubernetes.GroupVersionResource", fields{"group": text, "version": text, "resource": text},
		"group", "version", "resource")
	user := object("kubernetes.UserInfo", fields{
		"username": text, "uid": text, "groups": listOf(text), "extra": mapTo(listOf(text)),
	})
	return object("kubernetes.AdmissionRequest", fields{
		"kind": kind, "resource": resource, "subResource": text,
		"requestKind": kind, "requestResource": resource, "requestSubResource": text,
		"name": text, "namespace": text, "operation": text, "userInfo": user,
		"dryRun": apiservercel.BoolType, "options": apiservercel.DynType,
	}, "kind", "resource", "requestKind", "requestResource", "name", "operation", "userInfo")
}

// namespaceType returns the type of the variable namespaceObject.
func namespaceType() *apiservercel.DeclType {
	text, moment, number := apiservercel.StringType, apiservercel.TimestampType, apiservercel.IntType
	condition := object("kubernetes.NamespaceCondition", fields{
		"status": text, "type": text, "lastTransitionTime": moment, "message": text, "reason": text,
	}, "status", "type", "lastTransitionTime", "message", "reason")
	return object("kubernetes.Namespace", fields{
		"metadata": object("kubernetes.NamespaceMetadata", fields{
			"name": text, "generateName": text, "namespace": text, "labels": mapTo(text), "annotations": mapTo(text),
			"UID": text, "creationTimestamp": moment, "deletionGracePeriodSeconds": number, "deletionTimestamp": moment,
			"generation": number, "resourceVersion": text, "finalizers": listOf(text),
		}, "name", "generateName", "namespace", "labels", "annotations", "UID", "creationTimestamp",
			"deletionGracePeriodSeconds", "deletionTimestamp", "generation", "resourceVersion", "finalizers"),
		"spec": object("kubernetes.NamespaceSpec", fields{"finalizers": listOf(text)}, "finalizers"),
		"status": object("kubernetes.NamespaceStatus", fields{"conditions": listOf(condition), "phase": text},
			"conditions", "phase"),
	}, "metadata", "spec", "status")
}

// scalars maps scalar CEL types to declared types.
var scalars = map[*cel.Type]*apiservercel.DeclType{
	cel.AnyType: apiservercel.AnyType, cel.BoolType: apiservercel.BoolType, cel.BytesType: apiservercel.BytesType,
	cel.DoubleType: apiservercel.DoubleType, cel.DurationType: apiservercel.DurationType,
	cel.IntType: apiservercel.IntType, cel.NullType: apiservercel.NullType, cel.StringType: apiservercel.StringType,
	cel.TimestampType: apiservercel.TimestampType, cel.UintType: apiservercel.UintType,
}

// declType returns the declared type for a CEL type. A type without a declared form becomes
// dynamic.
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
