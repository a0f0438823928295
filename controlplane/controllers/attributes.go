package controllers

import (
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// AttributesClassIndex has claims by the classes of attributes that they have, are to have, or are being changed to.
const AttributesClassIndex = "keelson.attributesClass"

// AttributesClassesOf is the function of that index.
func AttributesClassesOf(o api.Object) []string {
	if c, ok := o.(*corev1.PersistentVolumeClaim); ok {
		return api.AttributesClasses(c)
	}
	return nil
}
