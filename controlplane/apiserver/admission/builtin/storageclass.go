package builtin

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

const (
	defaultClassAnnotation     = "storageclass.kubernetes.io/is-default-class"
	betaDefaultClassAnnotation = "storageclass.beta.kubernetes.io/is-default-class"
	betaClassAnnotation        = "volume.beta.kubernetes.io/storage-class"
)

// defaultStorageClass returns a plugin that sets the default StorageClass of a claim without a
// class.
func defaultStorageClass(c admission.Cluster) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if !a.IsCoreResource("persistentvolumeclaims") || !a.CreatesObject() {
			return nil
		}
		claim := a.Whole.(*corev1.PersistentVolumeClaim)
		if _, beta := claim.Annotations[betaClassAnnotation]; beta || claim.Spec.StorageClassName != nil {
			return nil
		}
		classes, err := c.List(ctx, "storageclasses", "", true)
		if err != nil {
			return admission.AsStatus(err)
		}
		if name := defaultClass(classes); name != "" {
			claim.Spec.StorageClassName = &name
		}
		return nil
	}
}

// defaultClass returns the name of the default class; "" if no class is the default. If several
// classes are the default, it is the newest, and among equally old ones the first by name.
func defaultClass(classes []api.Object) string {
	var best *storagev1.StorageClass
	for _, o := range classes {
		sc := o.(*storagev1.StorageClass)
		if sc.Annotations[defaultClassAnnotation] != "true" && sc.Annotations[betaDefaultClassAnnotation] != "true" {
			continue
		}
		if best == nil || best.CreationTimestamp.Before(&sc.CreationTimestamp) ||
			sc.CreationTimestamp.Equal(&best.CreationTimestamp) && sc.Name < best.Name {
			best = sc
		}
	}
	if best == nil {
		return ""
	}
	return best.Name
}

// claimGrowth returns a plugin that rejects a larger storage request of a claim unless the claim is
// bound and its class allows volume expansion.
func claimGrowth(c admission.Cluster) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if !a.IsCoreResource("persistentvolumeclaims") || !a.UpdatesObject() {
			return nil
		}
		now, was := a.Whole.(*corev1.PersistentVolumeClaim), a.Stored.(*corev1.PersistentVolumeClaim)
		size, before := now.Spec.Resources.Requests[corev1.ResourceStorage],
			was.Spec.Resources.Requests[corev1.ResourceStorage]
		if size.Cmp(before) <= 0 {
			return nil
		}
		if was.Status.Phase != corev1.ClaimBound {
			return admission.NewForbidden(a, now, errors.New("Only bound persistent volume claims can be expanded"))
		}
		if name := claimClass(now); name != "" {
			if o, ok := c.Get(ctx, "storageclasses", "", name); ok {
				if grows := o.(*storagev1.StorageClass).AllowVolumeExpansion; grows != nil && *grows {
					return nil
				}
			}
		}
		return admission.NewForbidden(a, now,
			errors.New("only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc "+
				"must support resize"))
	}
}

// claimClass returns the name of a claim's class, "" for none.
func claimClass(claim *corev1.PersistentVolumeClaim) string {
	if name, beta := claim.Annotations[betaClassAnnotation]; beta {
		return name
	}
	if claim.Spec.StorageClassName != nil {
		return *claim.Spec.StorageClassName
	}
	return ""
}
