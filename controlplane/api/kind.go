// Package api defines the types of the control plane's API: kinds as data, requests, identities,
// and the rules of every kind (defaulting, validation, printer columns) as pure functions. It does
// no I/O.
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

// Kind describes one kind in one version: everything that the request pipeline needs to process its
// requests. A new kind needs only a value of this type; no other code switches on kinds. A Kind is
// immutable once it is in a Table.
type Kind struct {
	GVK        schema.GroupVersionKind
	Resource   string // plural, in lower case: "pods"
	Namespaced bool
	Naming     KindNaming
	Serving    Serving
	Type       GoType

	// Storage is the storage of the objects; nil for virtual kinds. Conversion converts between
	// Storage's hub version and this version; nil if they are equal.
	Storage    *Storage
	Conversion *Conversion

	Writes     WriteRules
	Validation Validation
	Schema     KindSchema
	Lists      ListRules
	Commit     CommitRules
	Deletion   DeletionRules

	// Subresources maps names ("status", "scale", "binding", "eviction", "token", "log", "exec"
	// ...) to subresources.
	Subresources map[string]*Subresource
}

// KindNaming contains the names of a kind in addition to its GVK and its resource.
type KindNaming struct {
	Singular   string
	ShortNames []string
	Categories []string // such as "all"
	ListKind   string   // kind of the list; "" = GVK.Kind followed by "List"
}

// Serving states whether clients can access a kind, and with which verbs.
type Serving struct {
	// Definition is the name of the CustomResourceDefinition that defines the kind; "" for built-in
	// kinds.
	Definition string
	// Hidden kinds are stored but not served: clients cannot access them. Code that iterates over
	// all stored objects includes them.
	Hidden bool
	// Deprecated is the warning returned to every client that uses the kind; "" = none.
	Deprecated string

	// Virtual kinds (TokenReview, SubjectAccessReview, ComponentStatus ...) are computed and not
	// stored.
	Virtual bool
	// Acts reports whether creating an object of a virtual kind changes stored objects (Binding).
	// Requests for other virtual kinds change nothing.
	Acts bool
	// Verbs are the verbs that are served and listed in discovery; nil = all verbs of a stored
	// kind. A virtual kind lists all of its verbs: create, and get and list if it has Type.NewList,
	// Type.Ops, Lists.Columns and Lists.Row.
	Verbs []string

	// ShowsTrace reports whether clients see the trace annotation of these objects. It is set for
	// kinds that controllers create.
	ShowsTrace bool
}

// GoType describes the Go type of a kind's objects.
type GoType struct {
	New     func() Object
	NewList func() runtime.Object
	// Ops are the operations on objects of the kind's Go type. It is zero for virtual kinds that
	// cannot be listed.
	Ops Ops
	// Typed reports whether the Go type of New belongs to this kind only: typed clients and
	// informers find the kind by it.
	Typed bool
}

// WriteRules contains the defaults of a kind, and the rules for creations and updates.
type WriteRules struct {
	// Default sets fields that the client left out. nil = no defaults.
	Default func(Object)
	// OwnedDefault sets those defaults that managedFields attributes to the client that creates an
	// object. Fields that only Default sets have no owner. nil = all defaults are attributed to the
	// client.
	OwnedDefault func(Object)
	// PrepareCreate and PrepareUpdate reset fields that a client may not set (status on the main
	// resource, spec on status) and maintain the generation. nil = nothing to do.
	PrepareCreate func(Object)
	PrepareUpdate func(obj, old Object)

	// Conditional reports whether an update must specify the resourceVersion that it replaces.
	// Updates of other kinds may omit it, and then replace any stored state.
	Conditional bool
	// CreatesByUpdate reports whether an update of an object that does not exist creates it, with
	// all checks of a creation.
	CreatesByUpdate bool
	// Uncounted reports whether updates do not increment the generation.
	Uncounted bool
}

// Validation contains the checks of a kind's objects, and the warnings about them.
type Validation struct {
	// Object checks a whole object, and Update checks a change. Create, if not nil, performs
	// additional checks of new objects.
	Object func(Object) field.ErrorList
	Create func(Object) field.ErrorList
	Update func(obj, old Object) field.ErrorList
	// Warnings, if not nil, returns warnings to the client about a valid object; old is nil on
	// create. CreateWarnings returns warnings about a new object before WriteRules.PrepareCreate.
	Warnings       func(obj, old Object) []string
	CreateWarnings func(obj Object) []string
	// Check, if not nil, replaces Object, Update and the validation of subresources. It is for
	// schemas with rules that compare an object with its old state. facet is the subresource, ""
	// for the object itself; old is nil on create.
	Check func(ctx context.Context, facet string, obj, old Object) field.ErrorList
}

// KindSchema describes the fields of a kind, and how patches and server-side apply treat them.
type KindSchema struct {
	// Answers states how the API server treats each field. The registry drops the fields that
	// Kubernetes drops. Admission rejects fields that are not implemented and warns of fields that
	// have no effect in Kubernetes. Package kinds sets it from the table of package fields.
	Answers *fields.Answers
	// Types returns the type converter for server-side apply; it is called at first use. nil = the
	// schema of the built-in Go types.
	Types func() managedfields.TypeConverter
	// Model returns the kind's OpenAPI schema as JSON, which the caller may modify; nil = the
	// schema of the Go type.
	Model func(v3 bool) (map[string]any, error)
	// PatchTypes are the supported patch types; nil = all.
	PatchTypes []types.PatchType
}

// ListRules contains the columns of a kind's Table, and the values for its field selectors.
type ListRules struct {
	// Columns and Row define the server-side Table: Row returns one cell per column.
	Columns []metav1.TableColumnDefinition
	Row     func(obj Object, now time.Time) []any

	// Fields returns the values of field selectors other than metadata.name and metadata.namespace.
	// Its argument is the object in the version of the storage's hub. If FieldsOfVersion is set, it
	// is the object converted to this version.
	Fields          func(Object) selector.Set
	FieldsOfVersion bool
}

// CommitRules contains the conditions and effects of commits that write objects of a kind.
type CommitRules struct {
	// Reservations returns the values that the object holds exclusively while it exists (ClusterIP,
	// NodePort). The commit that writes the object also creates, keeps or releases them.
	Reservations func(Object) []Reservation
	// Presence returns the object that must exist whenever objects of the kind are written, such as
	// the CustomResourceDefinition of a custom kind. If that object is deleted while a write is in
	// progress, the commit of the write is rejected. nil = no such object.
	Presence Presence
	// TTL is the time after which the store deletes an object (Events); 0 = never.
	TTL time.Duration
}

// DeletionRules states how objects of a kind are deleted.
type DeletionRules struct {
	// Prepare, if not nil, is called when an object's deletionTimestamp is set and the object still
	// exists (because of finalizers or a grace period).
	Prepare func(Object)
	// Finalizers are added to an object when its deletion starts.
	Finalizers []string
	// Propagation is the default propagation policy of a deletion; "" = Background.
	Propagation metav1.DeletionPropagation
	// Warning is returned to the client for a deletion without a propagation policy; "" = none.
	Warning string
	// ReturnsDeleted reports whether a deletion that removes the object returns its last state and
	// not a Status.
	ReturnsDeleted bool
	// GracePeriod, if not nil, makes deletion graceful. It returns the grace period of the object
	// in seconds; 0 means that the object is deleted immediately.
	GracePeriod func(obj Object, requested *int64) int64
}

// Subresource is a subresource of a kind.
type Subresource struct {
	GVK   schema.GroupVersionKind // type of the body; zero = the type of the kind (status)
	New   func() runtime.Object   // returns an empty body; nil = a body of the kind
	Verbs []string                // for discovery, such as "get", "update", "patch" and "create"
	// PrepareUpdate, if not nil, makes the subresource a part of the stored object: PUT and PATCH
	// merge its fields from obj into a copy of old. It is nil for subresources that open a
	// connection (exec, log) or create something (binding, eviction, token).
	PrepareUpdate  func(obj, old Object)
	ValidateUpdate func(obj, old Object) field.ErrorList
	// OwnedFields are the paths of the fields that PUT and PATCH of the subresource may set, such
	// as spec.ephemeralContainers. A field manager owns no other fields by such a write. nil = the
	// fields that a write of the object may set.
	OwnedFields []string

	// View and Merge are set together for a subresource with a body of another type (scale). GET
	// returns View(stored). PUT and PATCH call Merge, which writes the subresource's fields from
	// body into obj, a copy of the stored object. The result must pass the kind's Validation. An
	// error of Merge is a
	// *apierrors.StatusError.
	View  func(obj Object) runtime.Object
	Merge func(obj Object, body runtime.Object) error

	// Replicas is the path in the parent object of the number that the body contains as
	// spec.replicas. nil = spec.replicas.
	Replicas []string

	// Answers states how the API server treats each field of the body. It is set if New is set.
	Answers *fields.Answers
}

// Reservation is a unique value, such as a cluster IP, that at most one object in the cluster may
// have. The store reserves it for the object.
type Reservation struct {
	Space string // "clusterips", "nodeports"
	Value string // "10.96.0.10", "TCP-30080"
	Field string // the field that contains the value, for errors: "spec.clusterIP"
}

// GVR returns the group, version and resource of the kind.
func (k *Kind) GVR() schema.GroupVersionResource {
	return k.GVK.GroupVersion().WithResource(k.Resource)
}

// ValidateObject validates obj as a whole object. If stored is not nil, it omits errors that the
// stored object also has, with the same field and value. So stricter rules of a new release do not
// prevent updates such as a new label or the removal of a finalizer.
func (k *Kind) ValidateObject(obj, stored Object) field.ErrorList {
	if k.Validation.Object == nil {
		return nil
	}
	errs := k.Validation.Object(obj)
	if stored == nil && k.Validation.Create != nil {
		errs = append(errs, k.Validation.Create(obj)...)
	}
	if len(errs) == 0 || stored == nil {
		return errs
	}
	had := make(map[string]bool)
	for _, e := range k.Validation.Object(stored) {
		had[e.Error()] = true
	}
	return slices.DeleteFunc(errs, func(e *field.Error) bool { return had[e.Error()] })
}

// allPatches are all patch types, in the order in which Kubernetes lists them.
var allPatches = []types.PatchType{
	types.JSONPatchType, types.MergePatchType, types.StrategicMergePatchType, types.ApplyYAMLPatchType,
}

// SupportedPatchTypes returns the patch types that the kind supports.
func (k *Kind) SupportedPatchTypes() []types.PatchType {
	if k.Schema.PatchTypes != nil {
		return k.Schema.PatchTypes
	}
	return allPatches
}

// GroupResource returns the group and resource of the kind, for API errors.
func (k *Kind) GroupResource() schema.GroupResource {
	return schema.GroupResource{Group: k.GVK.Group, Resource: k.Resource}
}
