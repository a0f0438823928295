package authz

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// refers says whether the pod needs the named object of its own namespace on its node.
func refers(p *corev1.Pod, resource, name string) bool {
	switch resource {
	case "serviceaccounts":
		return p.Spec.ServiceAccountName == name
	case "persistentvolumeclaims":
		return slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool {
			return v.PersistentVolumeClaim != nil && v.PersistentVolumeClaim.ClaimName == name ||
				v.Ephemeral != nil && p.Name+"-"+v.Name == name
		})
	case "secrets":
		return slices.ContainsFunc(p.Spec.ImagePullSecrets, func(r corev1.LocalObjectReference) bool { return r.Name == name }) ||
			slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return volumeSecret(&v, name) }) ||
			anyContainer(p, func(env []corev1.EnvVar, from []corev1.EnvFromSource) bool {
				return slices.ContainsFunc(env, func(e corev1.EnvVar) bool {
					return e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil && e.ValueFrom.SecretKeyRef.Name == name
				}) || slices.ContainsFunc(from, func(f corev1.EnvFromSource) bool {
					return f.SecretRef != nil && f.SecretRef.Name == name
				})
			})
	case "configmaps":
		return slices.ContainsFunc(p.Spec.Volumes, func(v corev1.Volume) bool { return volumeConfigMap(&v, name) }) ||
			anyContainer(p, func(env []corev1.EnvVar, from []corev1.EnvFromSource) bool {
				return slices.ContainsFunc(env, func(e corev1.EnvVar) bool {
					return e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil && e.ValueFrom.ConfigMapKeyRef.Name == name
				}) || slices.ContainsFunc(from, func(f corev1.EnvFromSource) bool {
					return f.ConfigMapRef != nil && f.ConfigMapRef.Name == name
				})
			})
	}
	return false
}

func anyContainer(p *corev1.Pod, f func([]corev1.EnvVar, []corev1.EnvFromSource) bool) bool {
	for i := range p.Spec.InitContainers {
		if f(p.Spec.InitContainers[i].Env, p.Spec.InitContainers[i].EnvFrom) {
			return true
		}
	}
	for i := range p.Spec.Containers {
		if f(p.Spec.Containers[i].Env, p.Spec.Containers[i].EnvFrom) {
			return true
		}
	}
	for i := range p.Spec.EphemeralContainers {
		if f(p.Spec.EphemeralContainers[i].Env, p.Spec.EphemeralContainers[i].EnvFrom) {
			return true
		}
	}
	return false
}

func volumeSecret(v *corev1.Volume, name string) bool {
	switch {
	case v.Secret != nil:
		return v.Secret.SecretName == name
	case v.Projected != nil:
		return slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
			return s.Secret != nil && s.Secret.Name == name
		})
	case v.CSI != nil:
		return v.CSI.NodePublishSecretRef != nil && v.CSI.NodePublishSecretRef.Name == name
	}
	return false
}

func volumeConfigMap(v *corev1.Volume, name string) bool {
	switch {
	case v.ConfigMap != nil:
		return v.ConfigMap.Name == name
	case v.Projected != nil:
		return slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool {
			return s.ConfigMap != nil && s.ConfigMap.Name == name
		})
	}
	return false
}
