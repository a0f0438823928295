// Package kinds is the table of the built-in kinds: for each its names,
// defaulting, validation, printing columns, field selectors and subresources.
// Everything here is a pure function of its arguments; the wording of errors and
// the columns are those of Kubernetes, so that its clients show the same thing.
package kinds

import (
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	answers "keelson.dev/keelson/controlplane/api/fields"
)

// All returns the table of every built-in kind.
func All() *api.Kinds {
	return api.NewKinds(answered(
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
	)...)
}

// answered gives each kind the answers of all its fields, and of those of the bodies of its subresources.
func answered(all ...*api.Kind) []*api.Kind {
	table := answers.Load()
	for _, k := range all {
		k.Answers = table.For(k.New())
		for _, s := range k.Subresources {
			if s.New != nil {
				s.Answers = table.For(s.New())
			}
		}
	}
	return all
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
	// global kinds have no namespace
	global bool
	rule   nameRule // of metadata.name; nil = a DNS subdomain
}

// newKind starts a stored kind of Go types T and L (its list). The caller adds
// what is particular to the kind; name and age are the columns until then.
func newKind[T, L any, P ptrTo[T], PL listOf[L]](n names) *api.Kind {
	k := &api.Kind{
		GVK:        n.gv.WithKind(n.kind),
		Resource:   n.plural,
		Singular:   n.singular,
		ShortNames: n.short,
		Namespaced: !n.global,
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
	checkMeta(k, n.rule)
	return k
}

// newVirtual starts a kind that is answered, not stored.
func newVirtual[T any, P ptrTo[T]](n names) *api.Kind {
	return &api.Kind{
		GVK:        n.gv.WithKind(n.kind),
		Resource:   n.plural,
		Singular:   n.singular,
		Virtual:    true,
		Namespaced: !n.global,
		Verbs:      []string{"create"},
		New:        func() api.Object { return P(new(T)) },
	}
}

// defaults, row and fieldsOf let the functions of a kind take its own type.

func defaults[P api.Object](f func(P)) func(api.Object) {
	return func(o api.Object) { f(o.(P)) }
}

func row[P api.Object](f func(obj P, now time.Time) []any) func(api.Object, time.Time) []any {
	return func(o api.Object, now time.Time) []any { return f(o.(P), now) }
}

func fieldsOf[P api.Object](f func(P) fields.Set) func(api.Object) fields.Set {
	return func(o api.Object) fields.Set { return f(o.(P)) }
}
