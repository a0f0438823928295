package registry

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
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
