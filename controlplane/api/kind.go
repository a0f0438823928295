// Package api is the vocabulary of the control plane: kinds as data, the
// request that travels through the pipeline, identities, and the pure rules of
// every kind (defaulting, validation, printing columns). It does no I/O.
package api

import (
	"context"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	selector "k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/fields"
)

// Object is any API object with metadata.
type Object interface {
	runtime.Object
	metav1.Object
}

// Kind is everything the pipeline needs to know about one kind in one version. Adding a kind
// is one value of this type in one file; nothing else switches on kinds. It is immutable once it is in a table.
type Kind struct {
	GVK        schema.GroupVersionKind
	Resource   string // plural lower case: "pods"
	Singular   string
	ShortNames []string
	Categories []string // "all"
	Namespaced bool
	ListKind   string // of the list; "" = GVK.Kind and "List"

	// Definition is the CustomResourceDefinition that the kind is made of; "" for built-in kinds.
	Definition string
	// Hidden kinds are stored and not served: what goes over all that is stored sees their objects, clients do not.
	Hidden bool
	// Deprecated is what whoever asks for the kind is warned of; "" = nothing.
	Deprecated string

	// Virtual kinds (TokenReview, SubjectAccessReview, ComponentStatus ...) are answered, not stored.
	Virtual bool
	// Acts says that the creation of a virtual kind changes what is stored (Binding); the others ask and tell.
	Acts bool
	// Verbs that are served and that discovery advertises; nil = the full set of a stored kind. A virtual kind names
	// all of its verbs: create, and get and list where it has NewList, Ops, Columns and Row.
	Verbs []string

	New     func() Object
	NewList func() runtime.Object
	// Ops is what is done with the objects as Go values; virtual kinds that are not listed have none.
	Ops Ops
	// Typed says that the Go type of New means this kind and no other: typed clients and informers find the kind by it.
	Typed bool

	// Storage is where the objects lie; nil for virtual kinds. Conversion is between it and this version; nil where
	// they are the same.
	Storage    *Storage
	Conversion *Conversion

	// Default fills what the user left out. nil = nothing to fill.
	Default func(Object)
	// OwnedDefault fills the part of Default that belongs to the client that creates an object: what Default adds to it has
	// no owner in managedFields. nil = all of Default belongs to the client.
	OwnedDefault func(Object)
	// PrepareCreate and PrepareUpdate drop what a client may not set (status on
	// the main resource, spec on status) and keep the generation. nil = none.
	PrepareCreate func(Object)
	PrepareUpdate func(obj, old Object)
	// PrepareDelete, when not nil, is called on an object that has just got its
	// deletionTimestamp and lives on (finalizers or a grace period).
	PrepareDelete func(Object)
	// DeleteFinalizers are added to an object when its deletion begins.
	DeleteFinalizers []string
	// Validate judges a whole object; ValidateUpdate what may change. ValidateCreate, when not nil, adds to Validate what
	// is asked of new objects alone.
	Validate       func(Object) field.ErrorList
	ValidateCreate func(Object) field.ErrorList
	ValidateUpdate func(obj, old Object) field.ErrorList
	// Warnings, when not nil, returns what the client is warned of about a valid object; old is nil on create.
	// CreateWarnings does so about a new object before PrepareCreate.
	Warnings       func(obj, old Object) []string
	CreateWarnings func(obj Object) []string
	// Check, when not nil, judges in place of these two and of what the facets have of them: the rules of a schema
	// compare an object with what it was. facet is the subresource, "" the object itself; old is nil on create.
	Check func(ctx context.Context, facet string, obj, old Object) field.ErrorList

	// Answers say what becomes of each field: the registry removes what Kubernetes drops, chain stage 4 refuses what is
	// not built, and warns of what Kubernetes gives no effect. Package kinds sets them from the table of package fields.
	Answers *fields.Answers

	// Columns and Row are the server-side Table: one cell per column.
	Columns []metav1.TableColumnDefinition
	Row     func(obj Object, now time.Time) []any

	// Fields are the field selectors beyond metadata.name and metadata.namespace. It is asked about an object as it is
	// stored, which is in the version of the storage's hub, unless FieldsOfVersion says that the fields are those of
	// this version, into which objects are brought before they are selected.
	Fields          func(Object) selector.Set
	FieldsOfVersion bool

	// Subresources by name ("status", "scale", "binding", "eviction", "token", "log", "exec" ...).
	Subresources map[string]*Subresource

	// Reservations are the secondary keys that must be held while the object
	// exists (ClusterIP, NodePort): created, kept or released in the same commit.
	Reservations func(Object) []Reservation

	// Presence names the object that must exist for as long as objects of the kind are written: that which defines the
	// kind. A write that is under way when it goes is refused up to and including its commit. nil = none.
	Presence Presence

	// Types makes the converter of server-side apply, once it is needed; nil takes the schema of the built-in Go types.
	Types func() managedfields.TypeConverter
	// Model is the schema of the kind for OpenAPI, as JSON, its own to change; nil takes that of the Go type.
	Model func(v3 bool) (map[string]any, error)
	// PatchTypes are the patches that the objects take; nil = all.
	PatchTypes []types.PatchType

	// ShowsTrace says that clients see the trace context of these objects, which controllers make.
	ShowsTrace bool

	// Propagation is what becomes of the dependents where a deletion does not say; "" = Background.
	Propagation metav1.DeletionPropagation
	// DeleteWarning is what whoever deletes an object without saying that is told; "" = nothing.
	DeleteWarning string

	// ReturnsDeleted says that a deletion which removes the object answers with its last state, not with a Status.
	ReturnsDeleted bool

	// GracePeriod, when not nil, makes deletion graceful: it returns the seconds to
	// wait for this object (0 = delete at once).
	GracePeriod func(obj Object, requested *int64) int64

	// Conditional says that an update has to name the resourceVersion that it replaces; the others may leave it out, and
	// replace whatever is stored.
	Conditional bool

	// CreatesByUpdate says that an update of an object that is not there creates it, with all that a creation is judged by.
	CreatesByUpdate bool

	// Uncounted says that updates do not count the generation, which stays as it was given to the new object.
	Uncounted bool

	// TTL after which the store expires an object (Events); 0 = never.
	TTL time.Duration
}

// Subresource is one named facet of a kind.
type Subresource struct {
	GVK   schema.GroupVersionKind // of the body; zero = that of the kind (status)
	New   func() runtime.Object   // the body; nil = that of the kind
	Verbs []string                // for discovery: "get", "update", "patch", "create"
	// Update, when not nil, makes the subresource a facet of the stored object:
	// PUT and PATCH merge from obj what it owns into a copy of old.
	// nil for connect-style (exec, log) and create-style (binding, eviction, token) subresources.
	PrepareUpdate  func(obj, old Object)
	ValidateUpdate func(obj, old Object) field.ErrorList

	// View and Merge, set together, make a facet whose body is of another type
	// (scale): GET answers View(stored), PUT and PATCH hand the new body to Merge,
	// which writes what the facet owns into obj, a copy of the stored object.
	// The result then passes the kind's own Validate and ValidateUpdate.
	// An error of Merge is a *apierrors.StatusError.
	View  func(obj Object) runtime.Object
	Merge func(obj Object, body runtime.Object) error

	// Replicas is where in the object the number stands that the body shows as spec.replicas; nil = in that place.
	Replicas []string

	// Answers are those of the body, where New is set.
	Answers *fields.Answers
}

// Reservation is a value of which there is only one in the cluster.
type Reservation struct {
	Space string // "clusterips", "nodeports"
	Value string // "10.96.0.10", "TCP-30080"
	Field string // the field that holds it, for errors: "spec.clusterIP"
}

// GVR is the group, version and resource of the kind.
func (k *Kind) GVR() schema.GroupVersionResource {
	return k.GVK.GroupVersion().WithResource(k.Resource)
}

// Judge says what is wrong with obj by the rules of a whole object. When old is not nil, a fault that the stored object
// has as well, in the same place with the same value, is let be: rules that a release makes stricter hold up
// neither a new label nor the removal of a finalizer.
func (k *Kind) Judge(obj, old Object) field.ErrorList {
	if k.Validate == nil {
		return nil
	}
	errs := k.Validate(obj)
	if old == nil && k.ValidateCreate != nil {
		errs = append(errs, k.ValidateCreate(obj)...)
	}
	if len(errs) == 0 || old == nil {
		return errs
	}
	had := make(map[string]bool)
	for _, e := range k.Validate(old) {
		had[e.Error()] = true
	}
	return slices.DeleteFunc(errs, func(e *field.Error) bool { return had[e.Error()] })
}

// allPatches are the types of patches, as Kubernetes lists them.
var allPatches = []types.PatchType{
	types.JSONPatchType, types.MergePatchType, types.StrategicMergePatchType, types.ApplyYAMLPatchType,
}

// Patches are the types of patches that the objects of the kind take.
func (k *Kind) Patches() []types.PatchType {
	if k.PatchTypes != nil {
		return k.PatchTypes
	}
	return allPatches
}

// GroupResource names the kind in API errors.
func (k *Kind) GroupResource() schema.GroupResource {
	return schema.GroupResource{Group: k.GVK.Group, Resource: k.Resource}
}
