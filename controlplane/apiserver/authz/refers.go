package authz

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/podref"
)

// refers says whether the pod needs the named object of its own namespace on its
// node. A mirror pod needs nothing: its node has written it.
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
