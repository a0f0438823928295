package authz

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/podref"
)

// refers reports whether the pod needs the named object of its own namespace on its node. It is
// false for mirror pods, which their node itself creates.
func refers(p *corev1.Pod, resource, name string) bool {
	if name == "" || podref.IsMirror(p) {
		return false
	}
	for r := range podref.Of(p) {
		if r.Resource == resource && r.Name == name {
			return true
		}
	}
	return false
}
