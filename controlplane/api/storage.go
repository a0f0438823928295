package api

import (
	"context"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Storage describes where and in which version the objects of one resource are stored. All served
// versions of the resource share one Storage. It is immutable.
type Storage struct {
	// Prefix is the prefix of the objects' keys: "/registry/pods/". It is set explicitly for each
	// resource and never derived from other kinds or their order, because existing clusters have
	// data under it.
	Prefix string
	// Namespaced reports whether the keys contain the namespace before the name.
	Namespaced bool
	// Hub is the version in which objects are stored.
	Hub Version
	// Known are other versions in which older releases may have stored objects.
	Known []Version
	// Index is the field by which objects can be listed and watched without scanning all objects;
	// nil = no such field.
	Index *Index
}

// Index is an indexed field of a storage. Each value selects few objects, such as the node of a
// pod.
type Index struct {
	Field string              // name of the field in field selectors
	Of    func(Object) string // returns the value of the field, for an object in any version
}

// Version describes a version in which objects are stored.
type Version struct {
	GVK     schema.GroupVersionKind
	New     func() Object
	Shallow func(Object) Object // see Ops.Shallow
	// Default sets fields that are missing in an object which was stored before its type had them.
	// nil = no defaults.
	Default func(Object)
	// ToHub converts an object of this version to the hub version; it may modify the object. If
	// ToHub is nil for a version in Known, the object stays in this version, and Conversion.From
	// converts it when it is read.
	ToHub func(Object) (Object, error)
	// Light is the light form of large objects, in which some fields are still encoded; nil = the
	// version has no light form.
	Light *Light
}

// Light describes the light form of the objects of a version: a form that takes less memory,
// because some fields are still encoded. Only Unpack can read these fields. The light form is never
// stored and never leaves the process.
type Light struct {
	// Pack returns the light form of obj in a new struct, which may share nested values with obj.
	// like is the light form of an earlier state of the object, or nil. The result may share equal
	// parts with like.
	Pack func(obj, like Object) (Object, error)
	// Is reports whether an object is in the light form.
	Is func(Object) bool
	// Unpack returns the complete object in a new struct.
	Unpack func(Object) (Object, error)
}

// Conversion converts objects between the version of a kind and the hub version of its storage.
type Conversion struct {
	// From converts objects to the version of the kind, in the same order. The arguments are shared
	// and not modified. Each result is a new struct, which may share nested values with its
	// argument.
	From func(ctx context.Context, objs []Object) ([]Object, error)
	// To converts an object of the kind to the hub version. The result may share nested values with
	// obj.
	To func(ctx context.Context, obj Object) (Object, error)
}

// Ops are the operations on objects of a kind's Go type.
type Ops struct {
	// Shallow returns a shallow copy of obj: a new struct with shared nested values.
	Shallow func(obj Object) Object
	// Assign overwrites the struct to with a shallow copy of the struct from.
	Assign func(to, from Object)
	// SetStatus copies the status of the object from to the object to. If from is nil, it clears
	// the status. SetStatus is nil for kinds without a status.
	SetStatus func(to, from Object)
	// Protobuf reports whether the Go type can be encoded as protobuf.
	Protobuf bool
	// List returns the kind's list with shallow copies of the items. The items have no apiVersion
	// and kind, as in Kubernetes.
	List func(items []Object) runtime.Object
}

// PtrTo is a constraint for the pointer type *T of an API object with standard metadata.
type PtrTo[T any] interface {
	*T
	Object
	metav1.ObjectMetaAccessor
}

// ListOf is a constraint for the pointer type *L of a list.
type ListOf[L any] interface {
	*L
	runtime.Object
}

// OpsOf returns the operations of the Go type T with the list type L. items returns a pointer to
// the list's items. SetStatus is nil in the result: kinds with a status set it.
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

// ShallowOf implements Ops.Shallow for the Go type T.
func ShallowOf[T any, P PtrTo[T]](obj Object) Object {
	out := *obj.(P)
	return P(&out)
}

// DesiredState returns a shallow copy of obj without its type, metadata and status, for comparing
// desired state.
func (k *Kind) DesiredState(obj Object) Object {
	out := k.Type.Ops.Shallow(obj)
	out.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{})
	*Meta(out) = metav1.ObjectMeta{}
	if k.Type.Ops.SetStatus != nil {
		k.Type.Ops.SetStatus(out, nil)
	}
	return out
}

// Meta returns the object's embedded ObjectMeta.
func Meta(obj Object) *metav1.ObjectMeta {
	return obj.(metav1.ObjectMetaAccessor).GetObjectMeta().(*metav1.ObjectMeta)
}

// ConvertEach returns a function for Conversion.From that calls convert for each object.
func ConvertEach(convert func(Object) (Object, error)) func(context.Context, []Object) ([]Object, error) {
	return func(_ context.Context, objs []Object) ([]Object, error) {
		out := make([]Object, len(objs))
		for i, o := range objs {
			var err error
			if out[i], err = convert(o); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
}

// UnpackObject returns the complete object: obj itself or, if obj is in the light form (Light), a
// copy in which all fields are decoded.
func (k *Kind) UnpackObject(obj Object) (Object, error) {
	if k.Storage == nil {
		return obj, nil
	}
	if l := k.Storage.Hub.Light; l != nil && l.Is(obj) {
		return l.Unpack(obj)
	}
	return obj, nil
}
