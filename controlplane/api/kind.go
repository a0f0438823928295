// Package api is the vocabulary of the control plane: kinds as data, the
// request that travels through the pipeline, identities, and the pure rules of
// every kind (defaulting, validation, printing columns). It does no I/O.
package api

import (
	"reflect"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	selector "k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/fields"
)

// Object is any API object with metadata.
type Object interface {
	runtime.Object
	metav1.Object
}

// Kind is everything the pipeline needs to know about one kind. Adding a kind
// is one value of this type in one file; nothing else switches on kinds.
type Kind struct {
	GVK        schema.GroupVersionKind
	Resource   string // plural lower case: "pods"
	Singular   string
	ShortNames []string
	Categories []string // "all"
	Namespaced bool

	// Virtual kinds (TokenReview, SubjectAccessReview ...) are answered, not stored.
	Virtual bool
	// Verbs that discovery advertises; nil = the full set of a stored kind.
	Verbs []string

	New     func() Object
	NewList func() runtime.Object

	// Default fills what the user left out. nil = nothing to fill.
	Default func(Object)
	// PrepareCreate and PrepareUpdate drop what a client may not set (status on
	// the main resource, spec on status) and keep the generation. nil = none.
	PrepareCreate func(Object)
	PrepareUpdate func(obj, old Object)
	// PrepareDelete, when not nil, is called on an object that has just got its
	// deletionTimestamp and lives on (finalizers or a grace period).
	PrepareDelete func(Object)
	// Validate judges a whole object; ValidateUpdate what may change.
	Validate       func(Object) field.ErrorList
	ValidateUpdate func(obj, old Object) field.ErrorList

	// Answers say what becomes of each field: chain stage 4 refuses what is not built, and warns of what
	// Kubernetes gives no effect. Package kinds sets them from the table of package fields.
	Answers *fields.Answers

	// Columns and Row are the server-side Table: one cell per column.
	Columns []metav1.TableColumnDefinition
	Row     func(obj Object, now time.Time) []any

	// Fields are the field selectors beyond metadata.name and metadata.namespace.
	Fields func(Object) selector.Set

	// Subresources by name ("status", "scale", "binding", "eviction", "token", "log", "exec" ...).
	Subresources map[string]*Subresource

	// Reservations are the secondary keys that must be held while the object
	// exists (ClusterIP, NodePort): created, kept or released in the same commit.
	Reservations func(Object) []Reservation

	// ShowsTrace says that clients see the trace context of these objects, which controllers make.
	ShowsTrace bool

	// ReturnsDeleted says that a deletion which removes the object answers with its last state, not with a Status.
	ReturnsDeleted bool

	// GracePeriod, when not nil, makes deletion graceful: it returns the seconds to
	// wait for this object (0 = delete at once).
	GracePeriod func(obj Object, requested *int64) int64

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

// GroupResource names the kind in API errors.
func (k *Kind) GroupResource() schema.GroupResource {
	return schema.GroupResource{Group: k.GVK.Group, Resource: k.Resource}
}

// Kinds is an immutable table of kinds.
type Kinds struct {
	list  []*Kind
	byGVR map[schema.GroupVersionResource]*Kind
	byGVK map[schema.GroupVersionKind]*Kind
	// byType has the stored type behind the pointer: corev1.Pod.
	byType map[reflect.Type]*Kind
}

// NewKinds indexes the kinds. A duplicate is a programming error and panics.
func NewKinds(list ...*Kind) *Kinds {
	ks := &Kinds{
		byGVR: make(map[schema.GroupVersionResource]*Kind, len(list)),
		byGVK: make(map[schema.GroupVersionKind]*Kind, len(list)),

		byType: make(map[reflect.Type]*Kind, len(list)),
	}
	for _, k := range list {
		if ks.byGVR[k.GVR()] != nil {
			panic("api: kind registered twice: " + k.GVK.String())
		}
		ks.list = append(ks.list, k)
		ks.byGVR[k.GVR()] = k
		ks.byGVK[k.GVK] = k
		if k.New != nil {
			ks.byType[structType(reflect.TypeOf(k.New()))] = k
		}
	}
	return ks
}

// All lists the kinds in registration order.
func (ks *Kinds) All() []*Kind { return ks.list }

// ByResource finds a kind by its place in the URL; nil when unknown.
func (ks *Kinds) ByResource(gvr schema.GroupVersionResource) *Kind { return ks.byGVR[gvr] }

// ByGVK finds a kind by its type; nil when unknown.
func (ks *Kinds) ByGVK(gvk schema.GroupVersionKind) *Kind { return ks.byGVK[gvk] }

// ByType finds the kind of a Go value or (possibly nil) pointer, such as
// (*corev1.Pod)(nil) or a corev1.Pod; nil when the type is no kind of this table.
func (ks *Kinds) ByType(obj any) *Kind {
	if obj == nil {
		return nil
	}
	return ks.byType[structType(reflect.TypeOf(obj))]
}

func structType(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t
}
