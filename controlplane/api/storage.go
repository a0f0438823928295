package api

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Storage is where the objects of one resource lie, and in which form. The kinds that are its served versions share
// one value of this type. It is immutable.
type Storage struct {
	// Prefix begins the keys of the objects: "/registry/pods/". It is stated for each resource and never follows from
	// what else is served or in which order: clusters have their data under it.
	Prefix string
	// Namespaced says that the keys have the namespace in front of the name.
	Namespaced bool
	// Hub is the version in which objects are written.
	Hub Version
	// Known are the further versions in which they may have been written before.
	Known []Version
	// Index is the field by which objects are found and watched without looking at the others; nil = none.
	Index *Index
}

// Index is a field by whose value few of many objects are asked for: the node of a pod.
type Index struct {
	Field string              // as selectors name it
	Of    func(Object) string // its value in an object of any version
}

// Version is a version of an object that may be stored.
type Version struct {
	GVK     schema.GroupVersionKind
	New     func() Object
	Shallow func(Object) Object // as Ops.Shallow
	// Default fills what an object lacks that was stored when its type had fewer fields. nil = nothing.
	Default func(Object)
	// ToHub turns an object of this version, which it may use up, into one of the hub version. nil, in Known, leaves it
	// as it is until it is read: Conversion.From gets it then.
	ToHub func(Object) (Object, error)
	// Light is how large objects are kept in memory; nil = as they are.
	Light *Light
}

// Light is a form of the objects of a version that takes less memory: all of the object is in it, some of it in a form
// that only Unpack reads. It is never stored and never leaves the process.
type Light struct {
	// Pack returns the light form of obj, in a struct of its own, which may share with obj what hangs below, and with the
	// light form of an earlier state of the object what both have alike; that may be nil.
	Pack func(obj, like Object) (Object, error)
	// Is says that an object is in the light form.
	Is func(Object) bool
	// Unpack returns the object itself, in a struct of its own.
	Unpack func(Object) (Object, error)
}

// Conversion is how objects of a kind are read from a storage whose objects are of another version, and written to it.
type Conversion struct {
	// From returns objects in the version of the kind, in the same order. The arguments are shared and stay as they are;
	// each result is a struct of its own, which may share with them what hangs below.
	From func(ctx context.Context, objs []Object) ([]Object, error)
	// To returns an object of the kind in the version of the hub, which may share with it what hangs below.
	To func(ctx context.Context, obj Object) (Object, error)
}

// Ops is what is done with the objects of a kind as Go values.
type Ops struct {
	// Shallow returns a new struct with what obj holds; what hangs below is shared.
	Shallow func(obj Object) Object
	// Assign makes to a shallow copy of from.
	Assign func(to, from Object)
	// SetStatus gives to the status of from, or none when from is nil. nil for kinds without a status.
	SetStatus func(to, from Object)
	// Protobuf says that the Go type has a protobuf form.
	Protobuf bool
	// List returns the kind's list of shallow copies of the items. Items of a list carry no apiVersion and kind.
	List func(items []Object) runtime.Object
}

// PtrTo says that P is *T and an API object with Kubernetes' metadata.
type PtrTo[T any] interface {
	*T
	Object
	metav1.ObjectMetaAccessor
}

// ListOf says that P is *L and a list.
type ListOf[L any] interface {
	*L
	runtime.Object
}

// OpsOf are the operations of Go type T with the list L, whose items are found by items. The kind adds SetStatus.
func OpsOf[T, L any, P PtrTo[T], PL ListOf[L]](items func(*L) *[]T) Ops {
	_, proto := any(P(new(T))).(interface{ Size() int })
	return Ops{
		Shallow:  ShallowOf[T, P],
		Assign:   func(to, from Object) { *to.(P) = *from.(P) },
		Protobuf: proto,
		List: func(objs []Object) runtime.Object {
			list := new(L)
			out := make([]T, len(objs))
			for i, o := range objs {
				out[i] = *o.(P)
				P(&out[i]).GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
			}
			*items(list) = out
			return PL(list)
		},
	}
}

// ShallowOf is Ops.Shallow of Go type T.
func ShallowOf[T any, P PtrTo[T]](obj Object) Object {
	out := *obj.(P)
	return P(&out)
}

// Bare is a shallow copy of obj without its type, metadata and status: what is desired of it.
func (k *Kind) Bare(obj Object) Object {
	out := k.Ops.Shallow(obj)
	out.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	*Meta(out) = metav1.ObjectMeta{}
	if k.Ops.SetStatus != nil {
		k.Ops.SetStatus(out, nil)
	}
	return out
}

// Meta is the metadata of an object as the struct that every stored Go type embeds.
func Meta(obj Object) *metav1.ObjectMeta {
	return obj.(metav1.ObjectMetaAccessor).GetObjectMeta().(*metav1.ObjectMeta)
}

// EachFrom is a Conversion.From that converts one object after the other.
func EachFrom(f func(Object) (Object, error)) func(context.Context, []Object) ([]Object, error) {
	return func(_ context.Context, objs []Object) ([]Object, error) {
		out := make([]Object, len(objs))
		for i, o := range objs {
			var err error
			if out[i], err = f(o); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
}

// Whole is an object of the kind as it is, which may be in the light form.
func (k *Kind) Whole(obj Object) (Object, error) {
	if k.Storage == nil {
		return obj, nil
	}
	if l := k.Storage.Hub.Light; l != nil && l.Is(obj) {
		return l.Unpack(obj)
	}
	return obj, nil
}
