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

// NameRule judges a name and says what is wrong with it.
type nameRule = validation.ValidateNameFunc

// PathSegment is the rule of kinds whose names may hold capitals and colons (RBAC).
func PathSegment(name string, prefix bool) []string {
	if prefix {
		return path.IsValidPathSegmentPrefix(name)
	}
	return path.IsValidPathSegmentName(name)
}

// DNSSubdomain is the rule of subdomains of the kinds that Kubernetes validates declaratively, which count bytes.
func DNSSubdomain(name string, prefix bool) []string {
	if prefix {
		return validation.NameIsDNSSubdomain(name, prefix)
	}
	return content.IsDNS1123Subdomain(name)
}

// checkMeta gives a kind the rules of metadata; checks of its own are added by check and AddUpdateValidation.
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

// qualifiesFinalizers reports whether the finalizers of a kind need a domain. Kubernetes tolerates short names in the groups
// that extend the API, in PodDisruptionBudgets and in Events of the core group.
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

// validateFinalizers refuses finalizers that are neither standard nor qualified by a domain.
func validateFinalizers(finalizers []string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, f := range finalizers {
		errs = append(errs, ValidateFinalizer(f, at.Index(i))...)
	}
	return errs
}

// ValidateFinalizer returns an error if a finalizer is neither a standard finalizer nor qualified by a domain.
func ValidateFinalizer(f string, at *field.Path) field.ErrorList {
	if strings.Contains(f, "/") || slices.Contains(standardFinalizers, f) {
		return nil
	}
	return field.ErrorList{field.Invalid(at, f, "name is neither a standard finalizer name nor is it fully qualified")}
}

// MetaUpdate judges what may change of metadata. That a body may leave its
// resourceVersion out is the registry's business.
func MetaUpdate(obj, old api.Object) field.ErrorList {
	var errs field.ErrorList
	for _, e := range validation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata")) {
		if e.Field != "metadata.resourceVersion" {
			errs = append(errs, e)
		}
	}
	return errs
}

// FacetMetaUpdate returns the validation of the metadata in requests to subresources that replace the object. Subresources
// do not run the validation of the whole object, which includes the finalizers.
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

// AddValidation adds f to what k validates.
func AddValidation[P api.Object](k *api.Kind, f func(P) field.ErrorList) {
	before := k.Validate
	k.Validate = func(o api.Object) field.ErrorList { return append(before(o), f(o.(P))...) }
}

// AddUpdateValidation adds f to what k validates of a change.
func AddUpdateValidation[P api.Object](k *api.Kind, f func(obj, old P) field.ErrorList) {
	before := k.ValidateUpdate
	k.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(before(obj, old), f(obj.(P), old.(P))...)
	}
}

// CreateValidation lets a kind's ValidateCreate take its own type.
func CreateValidation[P api.Object](f func(P) field.ErrorList) func(api.Object) field.ErrorList {
	return func(o api.Object) field.ErrorList { return f(o.(P)) }
}

// AddStatusValidation adds f to what subresource "status" of k validates.
func AddStatusValidation[P api.Object](k *api.Kind, f func(obj, old P) field.ErrorList) {
	AddSubresourceValidation(k, "status", f)
}

// AddSubresourceValidation adds f to what a subresource of k validates.
func AddSubresourceValidation[P api.Object](k *api.Kind, name string, f func(obj, old P) field.ErrorList) {
	sub := k.Subresources[name]
	before := sub.ValidateUpdate
	sub.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(before(obj, old), f(obj.(P), old.(P))...)
	}
}

// Accessors are how the spec and the status of a kind are reached.
type Accessors[P api.Object] struct {
	Spec     func(P) any      // the spec, to compare
	CopySpec func(obj, old P) // copies old's spec into obj
	Status   func(obj, old P) // copies old's status into obj; old == nil clears it
}

// SeparateStatus makes the two halves of a kind separately writable: the main
// resource keeps the stored status and counts generations, subresource "status"
// keeps the stored spec. status is where the status stands.
func SeparateStatus[P api.Object, S any](k *api.Kind, status func(P) *S, h Accessors[P]) {
	var zero P
	LocateStatus(k, status)
	// What is compared and restored here must be compared with its defaults: a port
	// without a protocol is a TCP port.
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

// KeepMetadataOnStatus makes requests to subresource "status" ignore labels, annotations, finalizers and owner references, as
// Kubernetes does for some kinds. It must be called after SeparateStatus.
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

// CountGenerations gives a kind without a status generations: what spec returns of it is what a change is told by.
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

// OmitGeneration leaves the objects of a kind without a generation, as Kubernetes does with some that have a status. It comes
// after SeparateStatus.
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

// LocateStatus says where the status of a kind stands.
func LocateStatus[P api.Object, S any](k *api.Kind, status func(P) *S) {
	k.Ops.SetStatus = func(to, from api.Object) {
		var s S
		if from != nil {
			s = *status(from.(P))
		}
		*status(to.(P)) = s
	}
}

// PrepareCreate adds f to what happens before an object is created.
func PrepareCreate[P api.Object](k *api.Kind, f func(P)) {
	before := k.PrepareCreate
	k.PrepareCreate = func(o api.Object) {
		if before != nil {
			before(o)
		}
		f(o.(P))
	}
}

// PrepareUpdate runs f before the generation is judged: f restores what the
// client may leave out.
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
