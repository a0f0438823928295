// Package builder constructs the descriptions (api.Kind) of the built-in kinds: names, storage, metadata rules,
// status subresource, scale subresource and columns. The packages of the API groups use it.
package builder

import (
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Names are how a kind is spelled.
type Names struct {
	GroupVersion  schema.GroupVersion
	Kind          string
	Plural        string
	Singular      string
	Short         []string
	InAllCategory bool // member of the category "all"
	// ClusterScoped kinds have no namespace
	ClusterScoped bool
	Rule          nameRule // of metadata.name; nil = a DNS subdomain
	// Conditional kinds are updated at a stated resourceVersion only
	Conditional bool
	// CreateOnUpdate kinds are created by an update of an object that is not there
	CreateOnUpdate bool
	// Categories are those beside "all"
	Categories []string
}

// New starts a stored kind of Go types T and L (its list, in which items finds the objects). The caller adds
// what is particular to the kind; name and age are the columns until then. It has a storage of its own, below its resource.
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

// NewVirtual starts a kind that is answered, not stored.
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

// defaults, row and Fields let the functions of a kind take its own type.

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
