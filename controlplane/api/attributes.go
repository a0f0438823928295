package api

import corev1 "k8s.io/api/core/v1"

// VolumeAttributesClasses returns the names of the VolumeAttributesClasses of a claim: the desired
// class, the current class, and the target class of a modification in progress.
func VolumeAttributesClasses(claim *corev1.PersistentVolumeClaim) []string {
	var out []string
	add := func(name *string) {
		if name != nil && *name != "" {
			out = append(out, *name)
		}
	}
	add(claim.Spec.VolumeAttributesClassName)
	add(claim.Status.CurrentVolumeAttributesClassName)
	if m := claim.Status.ModifyVolumeStatus; m != nil {
		add(&m.TargetVolumeAttributesClassName)
	}
	return out
}
