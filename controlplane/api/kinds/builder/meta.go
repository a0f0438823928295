package builder

import (
	"slices"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	policyv1 "k8s.io/api/policy/v1"
	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/api/validation/path"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	apiregistration "k8s.io/kube-aggregator/pkg/apis/apiregistration"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// nameRule validates a name and returns messages for its errors.
type nameRule = validation.ValidateNameFunc

// PathSegment is the name rule of kinds that allow capitals and colons in names (RBAC). prefix
// reports whether name is only the prefix of a generated name.
func PathSegment(name string, prefix bool) []string {
	if prefix {
		return path.IsValidPathSegmentPrefix(name)
	}
	return path.IsValidPathSegmentName(name)
}

// DNSSubdomain is the name rule for DNS subdomains of the kinds with declarative validation in
// Kubernetes. Its messages count bytes.
func DNSSubdomain(name string, prefix bool) []string {
	if prefix {
		return validation.NameIsDNSSubdomain(name, prefix)
	}
	return content.IsDNS1123Subdomain(name)
}

// checkMeta sets the metadata validation of a kind. AddValidation and AddUpdateValidation add the
// kind's own validation.
func checkMeta(k *api.Kind, rule nameRule) {
	if rule == nil {
		rule = validation.NameIsDNSSubdomain
	}
	k.Validate = func(o api.Object) field.ErrorList {
		errs := validation.ValidateObjectMetaAccessor(o, k.Namespaced, rule, field.NewPath("metadata"))
		if qualifiesFinalizers(k.GVK) {
			errs = append(errs, validateFinalizers(o.GetFinalizers(), field.NewPath("metadata", "finalizers"))...)
		}
		return errs
	}
	k.ValidateUpdate = func(obj, old api.Object) field.ErrorList { return MetaUpdate(obj, old) }
}

// qualifiesFinalizers reports whether the finalizers of a kind need a domain. Kubernetes tolerates
// short names in the groups that extend the API, in PodDisruptionBudgets and in Events of the core
// group.
func qualifiesFinalizers(gvk schema.GroupVersionKind) bool {
	switch gvk.Group {
	case admissionv1.GroupName, apiextensions.GroupName, apiregistration.GroupName, policyv1.GroupName:
		return false
	}
	return gvk != corev1.SchemeGroupVersion.WithKind("Event")
}

// standardFinalizers are the finalizers without a domain.
var standardFinalizers = []string{string(corev1.FinalizerKubernetes), metav1.FinalizerOrphanDependents,
	metav1.FinalizerDeleteDependents}

// validateFinalizers returns an error for each finalizer that is neither standard nor qualified by
// a domain.
func validateFinalizers(finalizers []string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, f := range finalizers {
		errs = append(errs, ValidateFinalizer(f, at.Index(i))...)
	}
	return errs
}

// ValidateFinalizer returns an error if a finalizer is neither a standard finalizer nor qualified
// by a domain.
func ValidateFinalizer(f string, at *field.Path) field.ErrorList {
	if strings.Contains(f, "/") || slices.Contains(standardFinalizers, f) {
		return nil
	}
	return field.ErrorList{field.Invalid(at, f, "name is neither a standard finalizer name nor is it fully qualified")}
}

// MetaUpdate validates a change of the metadata. An omitted resourceVersion is allowed here; the
// registry checks it.
func MetaUpdate(obj, old api.Object) field.ErrorList {
	var errs field.ErrorList
	for _, e := range validation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata")) {
		if e.Field != "metadata.resourceVersion" {
			errs = append(errs, e)
		}
	}
	return errs
}

// FacetMetaUpdate returns the validation of the metadata in requests to subresources that replace
// the object. Subresources do not run the validation of the whole object, which includes the
// finalizers.
func FacetMetaUpdate(gvk schema.GroupVersionKind) func(obj, old api.Object) field.ErrorList {
	qualifies := qualifiesFinalizers(gvk) && gvk.Group != flowcontrolv1.GroupName && gvk.Kind != "CronJob"
	return func(obj, old api.Object) field.ErrorList {
		at := field.NewPath("metadata", "finalizers")
		errs := append(validation.ValidateFinalizers(obj.GetFinalizers(), at), MetaUpdate(obj, old)...)
		if qualifies {
			errs = append(errs, validateFinalizers(obj.GetFinalizers(), at)...)
		}
		return errs
	}
}

// AddValidation adds f to the validation of whole objects.
func AddValidation[P api.Object](k *api.Kind, f func(P) field.ErrorList) {
	before := k.Validate
	k.Validate = func(o api.Object) field.ErrorList { return append(before(o), f(o.(P))...) }
}

// AddUpdateValidation adds f to the validation of updates.
func AddUpdateValidation[P api.Object](k *api.Kind, f func(obj, old P) field.ErrorList) {
	before := k.ValidateUpdate
	k.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(before(obj, old), f(obj.(P), old.(P))...)
	}
}

// CreateValidation adapts a validation function on a kind's Go type to api.Kind.ValidateCreate.
func CreateValidation[P api.Object](f func(P) field.ErrorList) func(api.Object) field.ErrorList {
	return func(o api.Object) field.ErrorList { return f(o.(P)) }
}

// AddStatusValidation adds f to the validation of updates through the status subresource.
func AddStatusValidation[P api.Object](k *api.Kind, f func(obj, old P) field.ErrorList) {
	AddSubresourceValidation(k, "status", f)
}

// AddSubresourceValidation adds f to the validation of updates through a subresource.
func AddSubresourceValidation[P api.Object](k *api.Kind, name string, f func(obj, old P) field.ErrorList) {
	sub := k.Subresources[name]
	before := sub.ValidateUpdate
	sub.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(before(obj, old), f(obj.(P), old.(P))...)
	}
}

// Accessors give access to the spec and the status of a kind.
type Accessors[P api.Object] struct {
	Spec     func(P) any      // returns the spec, for comparison
	CopySpec func(obj, old P) // copies old's spec into obj
	Status   func(obj, old P) // copies old's status into obj; old == nil clears it
}

// SeparateStatus makes spec and status of a kind separately writable. The main resource keeps the
// stored status and increments the generation when the spec changes. The subresource "status" keeps
// the stored spec. status returns the status field of an object.
func SeparateStatus[P api.Object, S any](k *api.Kind, status func(P) *S, h Accessors[P]) {
	var zero P
	LocateStatus(k, status)
	// Specs are compared and restored with their defaults: a port without a protocol is a TCP port.
	fill := func(o api.Object) {
		if k.Default != nil {
			k.Default(o)
		}
	}
	k.PrepareCreate = func(o api.Object) {
		h.Status(o.(P), zero)
		o.SetGeneration(1)
	}
	k.PrepareUpdate = func(obj, old api.Object) {
		fill(obj)
		h.Status(obj.(P), old.(P))
		obj.SetGeneration(old.GetGeneration())
		changed := !apiequality.Semantic.DeepEqual(h.Spec(obj.(P)), h.Spec(old.(P)))
		terminating := obj.GetDeletionTimestamp() != nil && old.GetDeletionTimestamp() == nil
		if changed || terminating {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
	AddSubresource(k, "status", &api.Subresource{
		Verbs: []string{"get", "patch", "update"},
		PrepareUpdate: func(obj, old api.Object) {
			h.CopySpec(obj.(P), old.(P))
			obj.SetGeneration(old.GetGeneration())
		},
		ValidateUpdate: FacetMetaUpdate(k.GVK),
	})
}

// KeepMetadataOnStatus makes requests to subresource "status" ignore labels, annotations,
// finalizers and owner references, as Kubernetes does for some kinds. It must be called after
// SeparateStatus.
func KeepMetadataOnStatus(k *api.Kind) {
	status := k.Subresources["status"]
	before := status.PrepareUpdate
	status.PrepareUpdate = func(obj, old api.Object) {
		before(obj, old)
		obj.SetLabels(old.GetLabels())
		obj.SetAnnotations(old.GetAnnotations())
		obj.SetFinalizers(old.GetFinalizers())
		obj.SetOwnerReferences(old.GetOwnerReferences())
	}
}

// CountGenerations maintains the generation of a kind without a status. An update increments it if
// the result of spec differs from the stored object's.
func CountGenerations[P api.Object](k *api.Kind, spec func(P) any) {
	fill := func(o api.Object) {
		if k.Default != nil {
			k.Default(o)
		}
	}
	k.PrepareCreate = func(o api.Object) { o.SetGeneration(1) }
	k.PrepareUpdate = func(obj, old api.Object) {
		fill(obj)
		obj.SetGeneration(old.GetGeneration())
		if !fieldrules.SemanticEqual(spec(obj.(P)), spec(old.(P))) {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
}

// OmitGeneration leaves the objects of a kind without a generation, as Kubernetes does for some
// kinds with a status. It must be called after SeparateStatus.
func OmitGeneration(k *api.Kind) {
	create, update := k.PrepareCreate, k.PrepareUpdate
	k.PrepareCreate = func(o api.Object) {
		create(o)
		o.SetGeneration(0)
	}
	k.PrepareUpdate = func(obj, old api.Object) {
		update(obj, old)
		obj.SetGeneration(old.GetGeneration())
	}
}

// LocateStatus sets api.Ops.SetStatus of a kind. status returns the status field of an object.
func LocateStatus[P api.Object, S any](k *api.Kind, status func(P) *S) {
	k.Ops.SetStatus = func(to, from api.Object) {
		var s S
		if from != nil {
			s = *status(from.(P))
		}
		*status(to.(P)) = s
	}
}

// PrepareCreate adds f to the functions that prepare a new object, after the existing ones.
func PrepareCreate[P api.Object](k *api.Kind, f func(P)) {
	before := k.PrepareCreate
	k.PrepareCreate = func(o api.Object) {
		if before != nil {
			before(o)
		}
		f(o.(P))
	}
}

// PrepareUpdate adds f to the functions that prepare an update, before the existing ones. So f can
// restore omitted fields before the generation is compared.
func PrepareUpdate[P api.Object](k *api.Kind, f func(obj, old P)) {
	then := k.PrepareUpdate
	k.PrepareUpdate = func(obj, old api.Object) {
		f(obj.(P), old.(P))
		if then != nil {
			then(obj, old)
		}
	}
}

// ProxyVerbs are the verbs of the proxy subresources.
var ProxyVerbs = []string{"create", "delete", "get", "patch", "update"}

// AddSubresource adds a subresource to a kind, or replaces it.
func AddSubresource(k *api.Kind, name string, s *api.Subresource) {
	if k.Subresources == nil {
		k.Subresources = map[string]*api.Subresource{}
	}
	k.Subresources[name] = s
}
