// Package builder constructs the descriptions (api.Kind) of the built-in kinds: names, storage,
// metadata rules, status subresource, scale subresource and columns. The packages of the API groups
// use it.
package builder

import (
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Names are the names and basic properties of a kind.
type Names struct {
	GroupVersion  schema.GroupVersion
	Kind          string
	Plural        string
	Singular      string
	Short         []string
	InAllCategory bool // the kind is in the category "all"
	// the kind has no namespace
	ClusterScoped bool
	Rule          nameRule // rule for metadata.name; nil = a DNS subdomain
	// Conditional kinds require a resourceVersion in every update.
	Conditional bool
	// CreateOnUpdate kinds are created by an update if the object does not exist.
	CreateOnUpdate bool
	// Categories are the categories other than "all".
	Categories []string
}

// New returns a stored kind of the Go type T with the list type L; items returns the list's items
// field. The kind has its own storage, named after its resource, and the columns name and age. The
// caller adds everything else.
func New[T, L any, P api.PtrTo[T], PL api.ListOf[L]](n Names, items func(*L) *[]T) *api.Kind {
	k := &api.Kind{
		GVK:        n.GroupVersion.WithKind(n.Kind),
		Resource:   n.Plural,
		Singular:   n.Singular,
		ShortNames: n.Short,
		Categories: n.Categories,
		Namespaced: !n.ClusterScoped,
		New:        func() api.Object { return P(new(T)) },
		NewList:    func() runtime.Object { return PL(new(L)) },
		Ops:        api.OpsOf[T, L, P, PL](items),
		Typed:      true,

		Conditional:     n.Conditional,
		CreatesByUpdate: n.CreateOnUpdate,

		Storage: &api.Storage{Prefix: api.StorageRoot + n.Plural + "/", Namespaced: !n.ClusterScoped},
		Columns: Columns(NameColumn, AgeColumn),
		Row: func(o api.Object, now time.Time) []any {
			return []any{o.GetName(), Age(o, now)}
		},
	}
	if n.InAllCategory {
		k.Categories = append([]string{"all"}, n.Categories...)
	}
	checkMeta(k, n.Rule)
	return k
}

// NewVirtual returns a virtual kind: its objects are computed, not stored. Its only verb is create.
func NewVirtual[T any, P api.PtrTo[T]](n Names) *api.Kind {
	return &api.Kind{
		GVK:        n.GroupVersion.WithKind(n.Kind),
		Resource:   n.Plural,
		Singular:   n.Singular,
		Virtual:    true,
		Typed:      true,
		Namespaced: !n.ClusterScoped,
		Verbs:      []string{"create"},
		New:        func() api.Object { return P(new(T)) },
	}
}

// Default, Row and Fields adapt functions on a kind's Go type to the function types of api.Kind.

func Default[P api.Object](f func(P)) func(api.Object) {
	return func(o api.Object) { f(o.(P)) }
}

// Row adapts a row function for one Go type to api.Kind.Row.
func Row[P api.Object](f func(obj P, now time.Time) []any) func(api.Object, time.Time) []any {
	return func(o api.Object, now time.Time) []any { return f(o.(P), now) }
}

// Fields adapts a field set function for one Go type to api.Kind.Fields.
func Fields[P api.Object](f func(P) fields.Set) func(api.Object) fields.Set {
	return func(o api.Object) fields.Set { return f(o.(P)) }
}
