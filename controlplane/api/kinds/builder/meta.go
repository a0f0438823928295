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

// PathSegment is the name rule of kinds that allow capitals and colons in names (RBAC). prefix is
// true if name is only the prefix of a generated name.
func PathSegment(name string, prefix bool) []string {
	if prefix {
		return path.IsValidPathSegmentPrefix(name)
	}
	return path.IsValidPathSegmentName(name)
}

// DNSSubdomain is the name rule for DNS subdomains of the kinds with declarative validation in
// Kubernetes. It differs from the general rule in its messages, which count bytes.
func DNSSubdomain(name string, prefix bool) []string {
	if prefix {
		return validation.NameIsDNSSubdomain(name, prefix)
	}
	return content.IsDNS1123Subdomain(name)
}

// addMetaValidation sets the validation of a kind's metadata. AddValidation and AddUpdateValidation
// add the validation of its other fields.
func addMetaValidation(k *api.Kind, rule nameRule) {
	if rule == nil {
		rule = validation.NameIsDNSSubdomain
	}
	k.Validation.Object = func(o api.Object) field.ErrorList {
		errs := validation.ValidateObjectMetaAccessor(o, k.Namespaced, rule, field.NewPath("metadata"))
		if qualifiesFinalizers(k.GVK) {
			errs = append(errs, validateFinalizers(o.GetFinalizers(), field.NewPath("metadata", "finalizers"))...)
		}
		return errs
	}
	k.Validation.Update = func(obj, old api.Object) field.ErrorList { return ValidateMetaUpdate(obj, old) }
}

// qualifiesFinalizers reports whether the names of finalizers of a kind must have a domain.
// Kubernetes tolerates names without a domain in the groups that extend the API, in
// PodDisruptionBudgets and in Events of the core group.
func qualifiesFinalizers(gvk schema.GroupVersionKind) bool {
	switch gvk.Group {
	case admissionv1.GroupName, apiextensions.GroupName, apiregistration.GroupName, policyv1.GroupName:
		return false
	}
	return gvk != corev1.SchemeGroupVersion.WithKind("Event")
}

// standardFinalizers are the valid finalizers without a domain.
var standardFinalizers = []string{string(corev1.FinalizerKubernetes), metav1.FinalizerOrphanDependents,
	metav1.FinalizerDeleteDependents}

// validateFinalizers returns an error for each finalizer that is neither standard nor qualified by
// a domain.
func validateFinalizers(finalizers []string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, f := range finalizers {
		errs = append(errs, ValidateFinalizer(f, fldPath.Index(i))...)
	}
	return errs
}

// ValidateFinalizer returns an error if a finalizer is neither a standard finalizer nor qualified
// by a domain.
func ValidateFinalizer(f string, fldPath *field.Path) field.ErrorList {
	if strings.Contains(f, "/") || slices.Contains(standardFinalizers, f) {
		return nil
	}
	return field.ErrorList{field.Invalid(fldPath, f,
		"name is neither a standard finalizer name nor is it fully qualified")}
}

// ValidateMetaUpdate validates a change of the metadata. It accepts an omitted resourceVersion,
// which the registry checks.
func ValidateMetaUpdate(obj, old api.Object) field.ErrorList {
	var errs field.ErrorList
	for _, e := range validation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata")) {
		if e.Field != "metadata.resourceVersion" {
			errs = append(errs, e)
		}
	}
	return errs
}

// SubresourceMetaValidation returns the validation of the metadata in requests to subresources that
// replace the object. Such requests do not run the validation of the whole object, which includes
// the finalizers.
func SubresourceMetaValidation(gvk schema.GroupVersionKind) func(obj, old api.Object) field.ErrorList {
	qualifies := qualifiesFinalizers(gvk) && gvk.Group != flowcontrolv1.GroupName && gvk.Kind != "CronJob"
	return func(obj, old api.Object) field.ErrorList {
		fldPath := field.NewPath("metadata", "finalizers")
		errs := append(validation.ValidateFinalizers(obj.GetFinalizers(), fldPath), ValidateMetaUpdate(obj, old)...)
		if qualifies {
			errs = append(errs, validateFinalizers(obj.GetFinalizers(), fldPath)...)
		}
		return errs
	}
}

// AddValidation adds f to the validation of whole objects.
func AddValidation[P api.Object](k *api.Kind, f func(P) field.ErrorList) {
	before := k.Validation.Object
	k.Validation.Object = func(o api.Object) field.ErrorList { return append(before(o), f(o.(P))...) }
}

// AddUpdateValidation adds f to the validation of updates.
func AddUpdateValidation[P api.Object](k *api.Kind, f func(obj, old P) field.ErrorList) {
	before := k.Validation.Update
	k.Validation.Update = func(obj, old api.Object) field.ErrorList {
		return append(before(obj, old), f(obj.(P), old.(P))...)
	}
}

// CreateValidation converts a validation function for a kind's Go type to the type of
// api.Kind.Validation.Create.
func CreateValidation[P api.Object](validate func(P) field.ErrorList) func(api.Object) field.ErrorList {
	return func(o api.Object) field.ErrorList { return validate(o.(P)) }
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
	CopySpec func(obj, old P) // copies the spec of old into obj
	Status   func(obj, old P) // copies the status of old into obj; if old is nil, clears it
}

// SeparateStatus makes spec and status of a kind separately writable. A write of the main resource
// keeps the stored status, and increments the generation if the spec has changed. A write of the
// subresource "status" keeps the stored spec. status returns a pointer to the status of an object.
func SeparateStatus[P api.Object, S any](k *api.Kind, status func(P) *S, accessors Accessors[P]) {
	var zero P
	LocateStatus(k, status)
	// Specs are compared and restored after defaulting, so that omitted fields with a default are
	// equal.
	fill := func(o api.Object) {
		if k.Writes.Default != nil {
			k.Writes.Default(o)
		}
	}
	k.Writes.PrepareCreate = func(o api.Object) {
		accessors.Status(o.(P), zero)
		o.SetGeneration(1)
	}
	k.Writes.PrepareUpdate = func(obj, old api.Object) {
		fill(obj)
		accessors.Status(obj.(P), old.(P))
		obj.SetGeneration(old.GetGeneration())
		changed := !apiequality.Semantic.DeepEqual(accessors.Spec(obj.(P)), accessors.Spec(old.(P)))
		terminating := obj.GetDeletionTimestamp() != nil && old.GetDeletionTimestamp() == nil
		if changed || terminating {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
	AddSubresource(k, "status", &api.Subresource{
		Verbs: []string{"get", "patch", "update"},
		PrepareUpdate: func(obj, old api.Object) {
			accessors.CopySpec(obj.(P), old.(P))
			obj.SetGeneration(old.GetGeneration())
		},
		ValidateUpdate: SubresourceMetaValidation(k.GVK),
	})
}

// KeepMetadataOnStatus makes requests to the subresource "status" ignore labels, annotations,
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

// CountGenerations makes updates maintain the generation of a kind without a status. An update
// increments it if the results of spec for the updated and the stored object differ.
func CountGenerations[P api.Object](k *api.Kind, spec func(P) any) {
	fill := func(o api.Object) {
		if k.Writes.Default != nil {
			k.Writes.Default(o)
		}
	}
	k.Writes.PrepareCreate = func(o api.Object) { o.SetGeneration(1) }
	k.Writes.PrepareUpdate = func(obj, old api.Object) {
		fill(obj)
		obj.SetGeneration(old.GetGeneration())
		if !fieldrules.SemanticEqual(spec(obj.(P)), spec(old.(P))) {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
}

// OmitGeneration makes objects of a kind have no generation, as in Kubernetes for some kinds with a
// status. It must be called after SeparateStatus.
func OmitGeneration(k *api.Kind) {
	create, update := k.Writes.PrepareCreate, k.Writes.PrepareUpdate
	k.Writes.PrepareCreate = func(o api.Object) {
		create(o)
		o.SetGeneration(0)
	}
	k.Writes.PrepareUpdate = func(obj, old api.Object) {
		update(obj, old)
		obj.SetGeneration(old.GetGeneration())
	}
}

// LocateStatus sets api.Ops.SetStatus of a kind. status returns a pointer to the status of an
// object.
func LocateStatus[P api.Object, S any](k *api.Kind, status func(P) *S) {
	k.Type.Ops.SetStatus = func(to, from api.Object) {
		var s S
		if from != nil {
			s = *status(from.(P))
		}
		*status(to.(P)) = s
	}
}

// PrepareCreate adds a function that prepares a new object before it is stored. It is called after
// the functions that were added before.
func PrepareCreate[P api.Object](k *api.Kind, prepare func(P)) {
	before := k.Writes.PrepareCreate
	k.Writes.PrepareCreate = func(o api.Object) {
		if before != nil {
			before(o)
		}
		prepare(o.(P))
	}
}

// PrepareUpdate adds a function that prepares an updated object before it is stored. It is called
// before the functions that were added earlier, so that it can restore omitted fields before the
// generation is compared.
func PrepareUpdate[P api.Object](k *api.Kind, prepare func(obj, old P)) {
	then := k.Writes.PrepareUpdate
	k.Writes.PrepareUpdate = func(obj, old api.Object) {
		prepare(obj.(P), old.(P))
		if then != nil {
			then(obj, old)
		}
	}
}

// ProxyVerbs are the verbs of the subresource "proxy".
var ProxyVerbs = []string{"create", "delete", "get", "patch", "update"}

// AddSubresource adds a subresource to a kind, or replaces it.
func AddSubresource(k *api.Kind, name string, s *api.Subresource) {
	if k.Subresources == nil {
		k.Subresources = map[string]*api.Subresource{}
	}
	k.Subresources[name] = s
}
