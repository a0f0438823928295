package builtin

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// Finalizers that keep objects in use from being removed. The protection controllers remove these
// finalizers.
const (
	claimProtection  = "kubernetes.io/pvc-protection"
	volumeProtection = "kubernetes.io/pv-protection"
	classProtection  = "kubernetes.io/vac-protection"
)

// storageObjectInUse adds a protection finalizer to new PersistentVolumeClaims, PersistentVolumes
// and VolumeAttributesClasses. Because the finalizer exists from the start, such an object is never
// removed while it is in use.
func storageObjectInUse(_ context.Context, a *admission.Attempt) error {
	if !a.CreatesObject() {
		return nil
	}
	switch o := a.Whole.(type) {
	case *corev1.PersistentVolumeClaim:
		addFinalizer(o, claimProtection)
	case *corev1.PersistentVolume:
		addFinalizer(o, volumeProtection)
	case *storagev1.VolumeAttributesClass:
		addFinalizer(o, classProtection)
	}
	return nil
}

func addFinalizer(o api.Object, name string) {
	if have := o.GetFinalizers(); !slices.Contains(have, name) {
		o.SetFinalizers(append(slices.Clone(have), name))
	}
}

// taintNewNode adds the taint not-ready to a new node, so that no pods are scheduled to it before
// it is ready.
func taintNewNode(_ context.Context, a *admission.Attempt) error {
	node, ok := a.Whole.(*corev1.Node)
	if !ok || !a.CreatesObject() {
		return nil
	}
	taint := corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}
	if !slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&taint) }) {
		node.Spec.Taints = append(node.Spec.Taints, taint)
	}
	return nil
}
