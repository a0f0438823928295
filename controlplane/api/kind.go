// Package api defines the types of the control plane's API: kinds as data, requests, identities,
// and the pure rules of every kind (defaulting, validation, printer columns). It does no I/O.
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

// Kind describes one kind in one version: everything that the request pipeline needs to know of it.
// A new kind needs only a value of this type; no other code switches on kinds. A Kind is immutable
// once it is in a Table.
type Kind struct {
	GVK        schema.GroupVersionKind
	Resource   string // plural lower case: "pods"
	Singular   string
	ShortNames []string
	Categories []string // "all"
	Namespaced bool
	ListKind   string // kind of the list; "" = GVK.Kind and "List"

	// Definition is the name of the CustomResourceDefinition that defines the kind; "" for built-in
	// kinds.
	Definition string
	// Hidden kinds are stored but not served: clients do not see them. Code that iterates over
	// everything that is stored includes them.
	Hidden bool
	// Deprecated is the warning returned to every client that uses the kind; "" = none.
	Deprecated string

	// Virtual kinds (TokenReview, SubjectAccessReview, ComponentStatus ...) are computed and not
	// stored.
	Virtual bool
	// Acts reports whether the creation of a virtual kind changes stored objects (Binding). Other
	// virtual kinds are read-only requests.
	Acts bool
	// Verbs are the verbs that are served and listed in discovery; nil = all verbs of a stored
	// kind. A virtual kind lists all of its verbs: create, and get and list if it has NewList, Ops,
	// Columns and Row.
	Verbs []string

	New     func() Object
	NewList func() runtime.Object
	// Ops are the operations on objects of the kind's Go type. Virtual kinds that cannot be listed
	// have none.
	Ops Ops
	// Typed reports whether the Go type of New belongs to this kind only: typed clients and
	// informers find the kind by it.
	Typed bool

	// Storage is the storage of the objects; nil for virtual kinds. Conversion converts between
	// Storage's hub version and this version; nil if they are equal.
	Storage    *Storage
	Conversion *Conversion

	// Default sets fields that the client left out. nil = no defaults.
	Default func(Object)
	// OwnedDefault sets those defaults that are attributed in managedFields to the client that
	// creates an object. Fields that only Default sets have no owner there. nil = all of Default is
	// attributed to the client.
	OwnedDefault func(Object)
	// PrepareCreate and PrepareUpdate reset fields that a client may not set (status on the main
	// resource, spec on status) and maintain the generation. nil = nothing to do.
	PrepareCreate func(Object)
	PrepareUpdate func(obj, old Object)
	// PrepareDelete, if not nil, is called when an object's deletionTimestamp is set and the object
	// still exists (because of finalizers or a grace period).
	PrepareDelete func(Object)
	// DeleteFinalizers are added to an object when its deletion starts.
	DeleteFinalizers []string
	// Validate checks a whole object and ValidateUpdate checks a change. ValidateCreate, if not
	// nil, adds checks for new objects only.
	Validate       func(Object) field.ErrorList
	ValidateCreate func(Object) field.ErrorList
	ValidateUpdate func(obj, old Object) field.ErrorList
	// Warnings, if not nil, returns warnings to the client about a valid object; old is nil on
	// create. CreateWarnings does so for a new object before PrepareCreate.
	Warnings       func(obj, old Object) []string
	CreateWarnings func(obj Object) []string
	// Check, if not nil, replaces Validate, ValidateUpdate and the validation of subresources, for
	// schemas with rules that compare an object with its old state. facet is the subresource, ""
	// for the object itself; old is nil on create.
	Check func(ctx context.Context, facet string, obj, old Object) field.ErrorList

	// Answers state how each field is treated. The registry drops the fields that Kubernetes drops.
	// Admission rejects fields that are not implemented and warns of fields that have no effect in
	// Kubernetes. Package kinds sets them from the table of package fields.
	Answers *fields.Answers

	// Columns and Row define the server-side Table: Row returns one cell per column.
	Columns []metav1.TableColumnDefinition
	Row     func(obj Object, now time.Time) []any

	// Fields returns the field selectors' values beyond metadata.name and metadata.namespace. Its
	// argument is the object in the version of the storage's hub. If FieldsOfVersion is set, it is
	// the object converted to this version.
	Fields          func(Object) selector.Set
	FieldsOfVersion bool

	// Subresources maps names ("status", "scale", "binding", "eviction", "token", "log", "exec"
	// ...) to subresources.
	Subresources map[string]*Subresource

	// Reservations returns the values that the object holds exclusively while it exists (ClusterIP,
	// NodePort). They are created, kept or released in the commit that writes the object.
	Reservations func(Object) []Reservation

	// Presence returns the object that must exist whenever objects of the kind are written, such as
	// the definition of a custom kind. A write that is in progress when that object is deleted is
	// rejected, up to and including its commit. nil = no such object.
	Presence Presence

	// Types returns the type converter for server-side apply and is called on first use; nil = the
	// schema of the built-in Go types.
	Types func() managedfields.TypeConverter
	// Model returns the kind's OpenAPI schema as JSON, which the caller may modify; nil = the
	// schema of the Go type.
	Model func(v3 bool) (map[string]any, error)
	// PatchTypes are the supported patch types; nil = all.
	PatchTypes []types.PatchType

	// ShowsTrace reports whether clients see the trace annotation of these objects. It is set for
	// kinds that controllers create.
	ShowsTrace bool

	// Propagation is the default propagation policy of a deletion; "" = Background.
	Propagation metav1.DeletionPropagation
	// DeleteWarning is the warning returned for a deletion without a propagation policy; "" = none.
	DeleteWarning string

	// ReturnsDeleted reports whether a deletion that removes the object returns its last state and
	// not a Status.
	ReturnsDeleted bool

	// GracePeriod, if not nil, makes deletion graceful: it returns the grace period of the object
	// in seconds (0 = delete immediately).
	GracePeriod func(obj Object, requested *int64) int64

	// Conditional reports whether an update must specify the resourceVersion that it replaces.
	// Updates of other kinds may omit it, and then replace any stored state.
	Conditional bool

	// CreatesByUpdate reports whether an update of an object that does not exist creates it, with
	// all checks of a creation.
	CreatesByUpdate bool

	// Uncounted reports whether updates leave the generation at the value of the new object.
	Uncounted bool

	// TTL after which the store expires an object (Events); 0 = never.
	TTL time.Duration
}

// Subresource is a subresource of a kind.
type Subresource struct {
	GVK   schema.GroupVersionKind // type of the body; zero = the type of the kind (status)
	New   func() runtime.Object   // returns an empty body; nil = a body of the kind
	Verbs []string                // for discovery: "get", "update", "patch", "create"
	// PrepareUpdate, if not nil, makes the subresource a part of the stored object: PUT and PATCH
	// merge its fields from obj into a copy of old. It is nil for subresources that connect (exec,
	// log) or create (binding, eviction, token).
	PrepareUpdate  func(obj, old Object)
	ValidateUpdate func(obj, old Object) field.ErrorList

	// View and Merge are set together for a subresource with a body of another type (scale). GET
	// returns View(stored). PUT and PATCH call Merge, which writes the subresource's fields from
	// body into obj, a copy of the stored object. The result must pass the kind's Validate and
	// ValidateUpdate. An error of Merge is a *apierrors.StatusError.
	View  func(obj Object) runtime.Object
	Merge func(obj Object, body runtime.Object) error

	// Replicas is the path in the object of the number that the body shows as spec.replicas; nil =
	// spec.replicas.
	Replicas []string

	// Answers state how each field of the body is treated, where New is set.
	Answers *fields.Answers
}

// Reservation is a value that at most one object in the cluster may hold.
type Reservation struct {
	Space string // "clusterips", "nodeports"
	Value string // "10.96.0.10", "TCP-30080"
	Field string // the field that holds it, for errors: "spec.clusterIP"
}

// GVR returns the group, version and resource of the kind.
func (k *Kind) GVR() schema.GroupVersionResource {
	return k.GVK.GroupVersion().WithResource(k.Resource)
}

// Judge validates obj as a whole object. If old is not nil, errors that Validate also returns for
// old, with the same field and value, are dropped. So stricter rules of a new release do not block
// updates such as a new label or the removal of a finalizer.
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

// allPatches are all patch types, in the order in which Kubernetes lists them.
var allPatches = []types.PatchType{
	types.JSONPatchType, types.MergePatchType, types.StrategicMergePatchType, types.ApplyYAMLPatchType,
}

// Patches returns the patch types that the kind supports.
func (k *Kind) Patches() []types.PatchType {
	if k.PatchTypes != nil {
		return k.PatchTypes
	}
	return allPatches
}

// GroupResource returns the group and resource of the kind, for API errors.
func (k *Kind) GroupResource() schema.GroupResource {
	return schema.GroupResource{Group: k.GVK.Group, Resource: k.Resource}
}
