package registry

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Namespaces have finalizers in their spec, with a subresource for them. All rules for these
// finalizers are in this file.

// specFinalizers returns the finalizers in the spec of a namespace; nil for other kinds.
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

// keepAllButSpecFinalizers is the update rule of the subresource "finalize".
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
