package registry

import (
	"errors"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/raftstore"
)

// Namespaces are the one kind whose finalizers stand in the spec, with a
// subresource of their own. The rules of it are here, and nowhere else.

// specFinalizers are what holds a terminating namespace apart from metadata.
func specFinalizers(obj api.Object) []corev1.FinalizerName {
	if ns, ok := obj.(*corev1.Namespace); ok {
		return ns.Spec.Finalizers
	}
	return nil
}

func hasSpecFinalizers(obj api.Object) bool {
	_, ok := obj.(*corev1.Namespace)
	return ok
}

// keepAllButSpecFinalizers is the rule of the subresource "finalize".
func keepAllButSpecFinalizers(obj, old api.Object) {
	ns, ok := obj.(*corev1.Namespace)
	if !ok {
		return
	}
	finalizers := ns.Spec.Finalizers
	meta := ns.ObjectMeta
	old.(*corev1.Namespace).DeepCopyInto(ns)
	ns.Finalizers, ns.Labels, ns.Annotations = meta.Finalizers, meta.Labels, meta.Annotations
	ns.Spec.Finalizers = finalizers
}

// errNamespaceMoved says that a namespace changed while admission looked at an object in it.
var errNamespaceMoved = errors.New("the namespace has changed")

// namespaces is the cache of namespaces; nil where they are not served.
func (c *cache) namespaces() *kindCache {
	for _, kc := range c.byKind {
		if _, ok := kc.kind.New().(*corev1.Namespace); ok {
			return kc
		}
	}
	return nil
}

// findNamespace is the namespace of the object that is written, as far as the cache
// knows; nil when there is none or it is not readable.
func (w *write) findNamespace() *entry {
	if kc := w.r.namespaces; w.req.Kind.Namespaced && kc != nil {
		return kc.get(w.req.Namespace)
	}
	return nil
}

// homeCheck lets an object be created only in the namespace as admission saw it: once
// a namespace is marked for deletion nothing comes into it, so that what was found
// empty stays empty.
func (w *write) homeCheck() raftstore.Op {
	return raftstore.Op{Kind: raftstore.OpCheck, Key: w.r.namespaces.prefix + w.home.key, If: raftstore.Precondition{Revision: w.home.rev}}
}
