package fleet

import (
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
)

// references lists what a node must hold besides o because it holds o: pods lead to their
// configuration and claims, claims to volumes, volumes to drivers and their secrets. The graph has no cycles.
func references(o api.Object) []key {
	switch o := o.(type) {
	case *v1.Pod:
		return podReferences(o)
	case *v1.PersistentVolumeClaim:
		return claimReferences(o)
	case *v1.PersistentVolume:
		return volumeReferences(o)
	}
	return nil
}

// refSet collects keys without duplicates, in order.
type refSet struct {
	seen map[key]bool
	list []key
}

func (r *refSet) add(k kind, namespace, name string) {
	ref := key{k, namespace, name}
	if name == "" || r.seen[ref] {
		return
	}
	if r.seen == nil {
		r.seen = make(map[key]bool)
	}
	r.seen[ref] = true
	r.list = append(r.list, ref)
}

func podReferences(p *v1.Pod) []key {
	var r refSet
	ns := p.Namespace
	r.add(kindServiceAccount, ns, p.Spec.ServiceAccountName)
	for _, s := range p.Spec.ImagePullSecrets {
		r.add(kindSecret, ns, s.Name)
	}
	for i := range p.Spec.InitContainers {
		r.environment(ns, p.Spec.InitContainers[i].Env, p.Spec.InitContainers[i].EnvFrom)
	}
	for i := range p.Spec.Containers {
		r.environment(ns, p.Spec.Containers[i].Env, p.Spec.Containers[i].EnvFrom)
	}
	for i := range p.Spec.EphemeralContainers {
		r.environment(ns, p.Spec.EphemeralContainers[i].Env, p.Spec.EphemeralContainers[i].EnvFrom)
	}
	for i := range p.Spec.Volumes {
		r.volume(p, &p.Spec.Volumes[i])
	}
	return r.list
}

func (r *refSet) environment(ns string, env []v1.EnvVar, from []v1.EnvFromSource) {
	for i := range env {
		f := env[i].ValueFrom
		if f == nil {
			continue
		}
		if f.ConfigMapKeyRef != nil {
			r.add(kindConfigMap, ns, f.ConfigMapKeyRef.Name)
		}
		if f.SecretKeyRef != nil {
			r.add(kindSecret, ns, f.SecretKeyRef.Name)
		}
	}
	for i := range from {
		if from[i].ConfigMapRef != nil {
			r.add(kindConfigMap, ns, from[i].ConfigMapRef.Name)
		}
		if from[i].SecretRef != nil {
			r.add(kindSecret, ns, from[i].SecretRef.Name)
		}
	}
}

func (r *refSet) volume(p *v1.Pod, v *v1.Volume) {
	ns := p.Namespace
	switch {
	case v.ConfigMap != nil:
		r.add(kindConfigMap, ns, v.ConfigMap.Name)
	case v.Secret != nil:
		r.add(kindSecret, ns, v.Secret.SecretName)
	case v.PersistentVolumeClaim != nil:
		r.add(kindClaim, ns, v.PersistentVolumeClaim.ClaimName)
	case v.Ephemeral != nil:
		r.add(kindClaim, ns, p.Name+"-"+v.Name)
	case v.CSI != nil:
		r.add(kindCSIDriver, "", v.CSI.Driver)
		if v.CSI.NodePublishSecretRef != nil {
			r.add(kindSecret, ns, v.CSI.NodePublishSecretRef.Name)
		}
	case v.Projected != nil:
		for _, s := range v.Projected.Sources {
			if s.ConfigMap != nil {
				r.add(kindConfigMap, ns, s.ConfigMap.Name)
			}
			if s.Secret != nil {
				r.add(kindSecret, ns, s.Secret.Name)
			}
		}
	}
}

func claimReferences(c *v1.PersistentVolumeClaim) []key {
	var r refSet
	r.add(kindPersistentVolume, "", c.Spec.VolumeName)
	if c.Spec.StorageClassName != nil {
		r.add(kindStorageClass, "", *c.Spec.StorageClassName)
	}
	return r.list
}

func volumeReferences(v *v1.PersistentVolume) []key {
	csi := v.Spec.CSI
	if csi == nil {
		return nil
	}
	var r refSet
	r.add(kindCSIDriver, "", csi.Driver)
	for _, s := range []*v1.SecretReference{csi.NodeStageSecretRef, csi.NodePublishSecretRef, csi.NodeExpandSecretRef} {
		if s != nil {
			r.add(kindSecret, s.Namespace, s.Name)
		}
	}
	return r.list
}
