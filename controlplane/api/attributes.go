package api

import corev1 "k8s.io/api/core/v1"

// AttributesClasses returns the names of the VolumeAttributesClasses of a claim: the desired, the
// current and the target class of a modification in progress.
func AttributesClasses(c *corev1.PersistentVolumeClaim) []string {
	var out []string
	add := func(name *string) {
		if name != nil && *name != "" {
			out = append(out, *name)
		}
	}
	add(c.Spec.VolumeAttributesClassName)
	add(c.Status.CurrentVolumeAttributesClassName)
	if m := c.Status.ModifyVolumeStatus; m != nil {
		add(&m.TargetVolumeAttributesClassName)
	}
	return out
}
