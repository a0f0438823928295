package api

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// ObjectList is the answer to a list with Request.Pointers: the watch cache's own
// objects in place of a kind's list type, which would copy every one. It has no
// wire form.
type ObjectList struct {
	metav1.TypeMeta
	metav1.ListMeta
	Items []Object
	// Bytes is about how much the items take: what they take in the store.
	Bytes int64
	// Changed is the resourceVersion of the newest change to any object of the
	// kind, at most that of the list: who follows a watch has seen everything
	// when it has reached this.
	Changed string
	// Unreadable are the errors of stored objects that belong to the list and cannot be read: each names the object, the cause
	// and the remedy. Items lacks these objects.
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
