package api

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// ObjectList is the result of a list with InternalOptions.Pointers. It contains the objects of the
// watch cache themselves; the kind's list type would contain copies. It cannot be encoded.
type ObjectList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []Object
	// Bytes is the approximate size of the items: the sum of their sizes in the store.
	Bytes int64
	// Changed is the resourceVersion of the newest change to any object of the kind. It is not
	// newer than the resourceVersion of the list. A watch that has reached Changed has delivered
	// every change that the list includes.
	Changed string
	// Unreadable are the errors of stored objects that match the list and cannot be read. Each
	// error contains the object, the cause and the remedy. Items does not contain these objects.
	Unreadable []error
}

// DeepCopyObject implements runtime.Object.
func (l *ObjectList) DeepCopyObject() runtime.Object {
	out := *l
	l.ListMeta.DeepCopyInto(&out.ListMeta)
	out.Items = make([]Object, len(l.Items))
	for i, o := range l.Items {
		out.Items[i] = o.DeepCopyObject().(Object)
	}
	return &out
}
