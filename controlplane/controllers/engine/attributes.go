package engine

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// AttributesClassIndex indexes PersistentVolumeClaims by VolumeAttributesClass: the class in the
// spec, the current class, and the target class of a modification.
const AttributesClassIndex = "keelson.attributesClass"

// ClaimAttributesClasses is the index function of AttributesClassIndex.
func ClaimAttributesClasses(o api.Object) []string {
	if c, ok := o.(*corev1.PersistentVolumeClaim); ok {
		return api.VolumeAttributesClasses(c)
	}
	return nil
}
