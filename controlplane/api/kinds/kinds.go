// Package kinds is the table of the built-in kinds: for each its names,
// defaulting, validation, printing columns, field selectors and subresources.
// Everything here is a pure function of its arguments; the wording of errors and
// the columns are those of Kubernetes, so that its clients show the same thing.
package kinds

import (
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// All returns the table of every built-in kind.
func All() *api.Kinds {
	return api.NewKinds(
		namespaceKind(), nodeKind(), podKind(), serviceKind(), endpointsKind(),
		configMapKind(), secretKind(), serviceAccountKind(), eventKind(),
		persistentVolumeKind(), persistentVolumeClaimKind(),
		deploymentKind(), replicaSetKind(),
		endpointSliceKind(), leaseKind(),
		storageClassKind(), csiDriverKind(), csiNodeKind(), volumeAttachmentKind(),
		priorityClassKind(), podDisruptionBudgetKind(),
		roleKind(), clusterRoleKind(), roleBindingKind(), clusterRoleBindingKind(),
		tokenReviewKind(), selfSubjectReviewKind(),
		subjectAccessReviewKind(), selfSubjectAccessReviewKind(),
		localSubjectAccessReviewKind(), selfSubjectRulesReviewKind(),
	)
}

// ptrTo says that P is *T and an API object.
type ptrTo[T any] interface {
	*T
	api.Object
}

// listOf says that P is *L and a list.
type listOf[L any] interface {
	*L
	runtime.Object
}

// names are how a kind is spelled.
type names struct {
	gv       schema.GroupVersion
	kind     string
	plural   string
	singular string
	short    []string
	all      bool // member of the category "all"
}

// newKind starts a stored kind of Go types T and L (its list). The caller adds
// what is particular to the kind; name and age are the columns until then.
func newKind[T, L any, P ptrTo[T], PL listOf[L]](n names) *api.Kind {
	k := &api.Kind{
		GVK:        n.gv.WithKind(n.kind),
		Resource:   n.plural,
		Singular:   n.singular,
		ShortNames: n.short,
		New:        func() api.Object { return P(new(T)) },
		NewList:    func() runtime.Object { return PL(new(L)) },
		Columns:    columns(nameCol, ageCol),
		Row: func(o api.Object, now time.Time) []any {
			return []any{o.GetName(), age(o, now)}
		},
	}
	if n.all {
		k.Categories = []string{"all"}
	}
	return k
}

// newVirtual starts a kind that is answered, not stored.
func newVirtual[T any, P ptrTo[T]](n names) *api.Kind {
	return &api.Kind{
		GVK:      n.gv.WithKind(n.kind),
		Resource: n.plural,
		Singular: n.singular,
		Virtual:  true,
		Verbs:    []string{"create"},
		New:      func() api.Object { return P(new(T)) },
	}
}

// on1, on2, judge1 and judge2 let the functions of a kind take its own type.

func on1[P api.Object](f func(P)) func(api.Object) {
	return func(o api.Object) { f(o.(P)) }
}

func on2[P api.Object](f func(obj, old P)) func(obj, old api.Object) {
	return func(obj, old api.Object) { f(obj.(P), old.(P)) }
}

func judge1[P api.Object](f func(P) field.ErrorList) func(api.Object) field.ErrorList {
	return func(o api.Object) field.ErrorList { return f(o.(P)) }
}

func judge2[P api.Object](f func(obj, old P) field.ErrorList) func(obj, old api.Object) field.ErrorList {
	return func(obj, old api.Object) field.ErrorList { return f(obj.(P), old.(P)) }
}

func row[P api.Object](f func(obj P, now time.Time) []any) func(api.Object, time.Time) []any {
	return func(o api.Object, now time.Time) []any { return f(o.(P), now) }
}
