package objectmeta

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Namespaces have finalizers in their spec, and the subresource "finalize" to change them. All
// rules for these finalizers are in this file.

// SpecFinalizers returns the finalizers in the spec of a namespace; nil for other kinds.
func SpecFinalizers(obj api.Object) []corev1.FinalizerName {
	if ns, ok := obj.(*corev1.Namespace); ok {
		return ns.Spec.Finalizers
	}
	return nil
}

// HasSpecFinalizers reports whether the kind of obj has finalizers in its spec.
func HasSpecFinalizers(obj api.Object) bool {
	_, ok := obj.(*corev1.Namespace)
	return ok
}

// KeepAllButSpecFinalizers resets obj to the stored object, except for the finalizers in its spec.
// It is the update rule of the subresource "finalize".
func KeepAllButSpecFinalizers(obj, stored api.Object) {
	ns, ok := obj.(*corev1.Namespace)
	if !ok {
		return
	}
	finalizers := ns.Spec.Finalizers
	meta := ns.ObjectMeta
	stored.(*corev1.Namespace).DeepCopyInto(ns)
	ns.Finalizers, ns.Labels, ns.Annotations = meta.Finalizers, meta.Labels, meta.Annotations
	ns.Spec.Finalizers = finalizers
}
