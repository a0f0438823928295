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

// New returns a stored kind with the Go type T and the list type L. items returns a pointer to the
// list's items. The kind has its own storage, named after its resource, and the columns name and
// age. The caller adds everything else.
func New[T, L any, P api.PtrTo[T], PL api.ListOf[L]](names Names, items func(*L) *[]T) *api.Kind {
	k := &api.Kind{
		GVK:        names.GroupVersion.WithKind(names.Kind),
		Resource:   names.Plural,
		Namespaced: !names.ClusterScoped,
		Naming:     api.KindNaming{Singular: names.Singular, ShortNames: names.Short, Categories: names.Categories},
		Type: api.GoType{
			New:     func() api.Object { return P(new(T)) },
			NewList: func() runtime.Object { return PL(new(L)) },
			Ops:     api.OpsOf[T, L, P, PL](items),
			Typed:   true,
		},
		Storage: &api.Storage{Prefix: api.StorageRoot + names.Plural + "/", Namespaced: !names.ClusterScoped},
		Writes:  api.WriteRules{Conditional: names.Conditional, CreatesByUpdate: names.CreateOnUpdate},
		Lists: api.ListRules{
			Columns: Columns(NameColumn, AgeColumn),
			Row: func(o api.Object, now time.Time) []any {
				return []any{o.GetName(), Age(o, now)}
			},
		},
	}
	if names.InAllCategory {
		k.Naming.Categories = append([]string{"all"}, names.Categories...)
	}
	addMetaValidation(k, names.Rule)
	return k
}

// NewVirtual returns a virtual kind: its objects are computed, not stored. Its only verb is create.
func NewVirtual[T any, P api.PtrTo[T]](names Names) *api.Kind {
	return &api.Kind{
		GVK:        names.GroupVersion.WithKind(names.Kind),
		Resource:   names.Plural,
		Namespaced: !names.ClusterScoped,
		Naming:     api.KindNaming{Singular: names.Singular},
		Serving:    api.Serving{Virtual: true, Verbs: []string{"create"}},
		Type:       api.GoType{New: func() api.Object { return P(new(T)) }, Typed: true},
	}
}

// Default, Row and Fields convert functions for a kind's Go type to the function types of api.Kind.

func Default[P api.Object](f func(P)) func(api.Object) {
	return func(o api.Object) { f(o.(P)) }
}

// Row converts a function that returns the table row of an object of one Go type to the type of
// api.Kind.Lists.Row.
func Row[P api.Object](row func(obj P, now time.Time) []any) func(api.Object, time.Time) []any {
	return func(o api.Object, now time.Time) []any { return row(o.(P), now) }
}

// Fields converts a function that returns the field set of an object of one Go type to the type of
// api.Kind.Lists.Fields.
func Fields[P api.Object](fieldSet func(P) fields.Set) func(api.Object) fields.Set {
	return func(o api.Object) fields.Set { return fieldSet(o.(P)) }
}
