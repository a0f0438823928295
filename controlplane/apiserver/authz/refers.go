package authz

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/podref"
)

// refersTo reports whether the pod references the object with the given resource and name in the
// pod's namespace, so that its node must be able to read the object. It is false for mirror pods,
// because nodes create their mirror pods themselves.
func refersTo(pod *corev1.Pod, resource, name string) bool {
	if name == "" || podref.IsMirror(pod) {
		return false
	}
	for r := range podref.References(pod) {
		if r.Resource == resource && r.Name == name {
			return true
		}
	}
	return false
}
