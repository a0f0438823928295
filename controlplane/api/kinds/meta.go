package kinds

import (
	"maps"
	"reflect"
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
)

// nameRule judges a name and says what is wrong with it.
type nameRule = validation.ValidateNameFunc

// pathSegment is the rule of kinds whose names may hold capitals and colons (RBAC).
func pathSegment(name string, prefix bool) []string {
	if prefix {
		return path.IsValidPathSegmentPrefix(name)
	}
	return path.IsValidPathSegmentName(name)
}

// longName is the rule of subdomains of the kinds that Kubernetes validates declaratively, which count bytes.
func longName(name string, prefix bool) []string {
	if prefix {
		return validation.NameIsDNSSubdomain(name, prefix)
	}
	return content.IsDNS1123Subdomain(name)
}

// checkMeta gives a kind the rules of metadata; checks of its own are added by check and checkUpdate.
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
	k.ValidateUpdate = func(obj, old api.Object) field.ErrorList { return metaUpdate(obj, old) }
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
var standardFinalizers = []string{string(corev1.FinalizerKubernetes), metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents}

// validateFinalizers refuses finalizers that are neither standard nor qualified by a domain.
func validateFinalizers(finalizers []string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, f := range finalizers {
		errs = append(errs, validateFinalizer(f, at.Index(i))...)
	}
	return errs
}

func validateFinalizer(f string, at *field.Path) field.ErrorList {
	if strings.Contains(f, "/") || slices.Contains(standardFinalizers, f) {
		return nil
	}
	return field.ErrorList{field.Invalid(at, f, "name is neither a standard finalizer name nor is it fully qualified")}
}

// metaUpdate judges what may change of metadata. That a body may leave its
// resourceVersion out is the registry's business.
func metaUpdate(obj, old api.Object) field.ErrorList {
	var errs field.ErrorList
	for _, e := range validation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata")) {
		if e.Field != "metadata.resourceVersion" {
			errs = append(errs, e)
		}
	}
	return errs
}

// facetMetaUpdate returns the validation of the metadata in requests to subresources that replace the object. Subresources
// do not run the validation of the whole object, which includes the finalizers.
func facetMetaUpdate(gvk schema.GroupVersionKind) func(obj, old api.Object) field.ErrorList {
	qualifies := qualifiesFinalizers(gvk) && gvk.Group != flowcontrolv1.GroupName && gvk.Kind != "CronJob"
	return func(obj, old api.Object) field.ErrorList {
		at := field.NewPath("metadata", "finalizers")
		errs := append(validation.ValidateFinalizers(obj.GetFinalizers(), at), metaUpdate(obj, old)...)
		if qualifies {
			errs = append(errs, validateFinalizers(obj.GetFinalizers(), at)...)
		}
		return errs
	}
}

// check adds f to what k validates.
func check[P api.Object](k *api.Kind, f func(P) field.ErrorList) {
	before := k.Validate
	k.Validate = func(o api.Object) field.ErrorList { return append(before(o), f(o.(P))...) }
}

// checkUpdate adds f to what k validates of a change.
func checkUpdate[P api.Object](k *api.Kind, f func(obj, old P) field.ErrorList) {
	before := k.ValidateUpdate
	k.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(before(obj, old), f(obj.(P), old.(P))...)
	}
}

// onCreate lets a kind's ValidateCreate take its own type.
func onCreate[P api.Object](f func(P) field.ErrorList) func(api.Object) field.ErrorList {
	return func(o api.Object) field.ErrorList { return f(o.(P)) }
}

// checkStatus adds f to what subresource "status" of k validates.
func checkStatus[P api.Object](k *api.Kind, f func(obj, old P) field.ErrorList) {
	checkFacet(k, "status", f)
}

// checkFacet adds f to what a subresource of k validates.
func checkFacet[P api.Object](k *api.Kind, name string, f func(obj, old P) field.ErrorList) {
	sub := k.Subresources[name]
	before := sub.ValidateUpdate
	sub.ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		return append(before(obj, old), f(obj.(P), old.(P))...)
	}
}

// halves are how the spec and the status of a kind are reached.
type halves[P api.Object] struct {
	spec   func(P) any      // the spec, to compare
	keep   func(obj, old P) // copies old's spec into obj
	status func(obj, old P) // copies old's status into obj; old == nil clears it
}

// hasStatus makes the two halves of a kind separately writable: the main
// resource keeps the stored status and counts generations, subresource "status"
// keeps the stored spec. status is where the status stands.
func hasStatus[P api.Object, S any](k *api.Kind, status func(P) *S, h halves[P]) {
	var zero P
	statusIn(k, status)
	// What is compared and restored here must be compared with its defaults: a port
	// without a protocol is a TCP port.
	fill := func(o api.Object) {
		if k.Default != nil {
			k.Default(o)
		}
	}
	k.PrepareCreate = func(o api.Object) {
		h.status(o.(P), zero)
		o.SetGeneration(1)
	}
	k.PrepareUpdate = func(obj, old api.Object) {
		fill(obj)
		h.status(obj.(P), old.(P))
		obj.SetGeneration(old.GetGeneration())
		changed := !apiequality.Semantic.DeepEqual(h.spec(obj.(P)), h.spec(old.(P)))
		terminating := obj.GetDeletionTimestamp() != nil && old.GetDeletionTimestamp() == nil
		if changed || terminating {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
	addSub(k, "status", &api.Subresource{
		Verbs: []string{"get", "patch", "update"},
		PrepareUpdate: func(obj, old api.Object) {
			h.keep(obj.(P), old.(P))
			obj.SetGeneration(old.GetGeneration())
		},
		ValidateUpdate: facetMetaUpdate(k.GVK),
	})
}

// keepsMetadata makes requests to subresource "status" ignore labels, annotations, finalizers and owner references, as
// Kubernetes does for some kinds. It must be called after hasStatus.
func keepsMetadata(k *api.Kind) {
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

// countsGeneration gives a kind without a status generations: what spec returns of it is what a change is told by.
func countsGeneration[P api.Object](k *api.Kind, spec func(P) any) {
	fill := func(o api.Object) {
		if k.Default != nil {
			k.Default(o)
		}
	}
	k.PrepareCreate = func(o api.Object) { o.SetGeneration(1) }
	k.PrepareUpdate = func(obj, old api.Object) {
		fill(obj)
		obj.SetGeneration(old.GetGeneration())
		if !semanticEqual(spec(obj.(P)), spec(old.(P))) {
			obj.SetGeneration(old.GetGeneration() + 1)
		}
	}
}

// uncounted leaves the objects of a kind without a generation, as Kubernetes does with some that have a status. It comes
// after hasStatus.
func uncounted(k *api.Kind) {
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

// statusIn says where the status of a kind stands.
func statusIn[P api.Object, S any](k *api.Kind, status func(P) *S) {
	k.Ops.SetStatus = func(to, from api.Object) {
		var s S
		if from != nil {
			s = *status(from.(P))
		}
		*status(to.(P)) = s
	}
}

// prepare adds f to what happens before an object is created.
func prepare[P api.Object](k *api.Kind, f func(P)) {
	before := k.PrepareCreate
	k.PrepareCreate = func(o api.Object) {
		if before != nil {
			before(o)
		}
		f(o.(P))
	}
}

// prepareUpdate runs f before the generation is judged: f restores what the
// client may leave out.
func prepareUpdate[P api.Object](k *api.Kind, f func(obj, old P)) {
	then := k.PrepareUpdate
	k.PrepareUpdate = func(obj, old api.Object) {
		f(obj.(P), old.(P))
		if then != nil {
			then(obj, old)
		}
	}
}

// proxied are the verbs of the proxy subresources.
var proxied = []string{"create", "delete", "get", "patch", "update"}

func addSub(k *api.Kind, name string, s *api.Subresource) {
	if k.Subresources == nil {
		k.Subresources = map[string]*api.Subresource{}
	}
	k.Subresources[name] = s
}

// sameOr refuses a change of an immutable part.
func sameOr(obj, old any, at *field.Path) field.ErrorList {
	return validation.ValidateImmutableField(obj, old, at)
}

// setDefault fills *p when it is the zero value.
func setDefault[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

// setDefaultPtr fills *p when it points nowhere.
func setDefaultPtr[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}

// oneOf refuses a value that is not listed; an empty one is Required.
func oneOf[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	for _, a := range allowed {
		if v == a {
			return nil
		}
	}
	return field.ErrorList{field.NotSupported(at, v, slices.Sorted(slices.Values(allowed)))}
}

// requiredOf refuses an empty value and one that is not allowed, naming the allowed ones in their order.
func requiredOf[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return listed(v, at, allowed...)
}

// requiredSegment refuses what is empty or cannot stand in a path.
func requiredSegment(v string, at *field.Path) field.ErrorList {
	if v == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return invalid(at, v, path.IsValidPathSegmentName(v))
}

// nonNegative refuses a number below zero.
func nonNegative[T ~int32 | ~int64](v T, at *field.Path) field.ErrorList {
	return validation.ValidateNonnegativeField(int64(v), at)
}

// invalid turns the messages of a syntax check into errors.
func invalid(at *field.Path, v any, msgs []string) field.ErrorList {
	var errs field.ErrorList
	for _, m := range msgs {
		errs = append(errs, field.Invalid(at, v, m))
	}
	return errs
}

func semanticEqual(a, b any) bool { return apiequality.Semantic.DeepEqual(a, b) }

// val is what p points to, or the zero value.
func val[T any](p *T) T {
	if p == nil {
		var zero T
		return zero
	}
	return *p
}

// countSet is how many of a union's members are set: pointer fields of a struct,
// also of a struct that it embeds.
func countSet(union any) int {
	n := 0
	v := reflect.ValueOf(union)
	for i := range v.NumField() {
		switch f := v.Field(i); f.Kind() {
		case reflect.Pointer:
			if !f.IsNil() {
				n++
			}
		case reflect.Struct:
			n += countSet(f.Interface())
		}
	}
	return n
}

// sorted are the keys of m in order: errors come in the same order every time.
func sorted[K ~string, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// forbid refuses the fields that are set.
func forbid(at *field.Path, msg string, set map[string]bool) field.ErrorList {
	var errs field.ErrorList
	for _, name := range sorted(set) {
		if set[name] {
			errs = append(errs, field.Forbidden(at.Child(name), msg))
		}
	}
	return errs
}
