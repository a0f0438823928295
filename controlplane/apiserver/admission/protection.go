package admission

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
)

// The finalizers that the protection controllers remove.
const (
	claimProtection  = "kubernetes.io/pvc-protection"
	volumeProtection = "kubernetes.io/pv-protection"
	classProtection  = "kubernetes.io/vac-protection"
)

// storageObjectInUse adds a protection finalizer to new PersistentVolumeClaims, PersistentVolumes
// and VolumeAttributesClasses. None of them is removed while in use, not even right after its
// creation.
func storageObjectInUse(_ context.Context, a *Attempt) error {
	if !a.Creates() {
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
func taintNewNode(_ context.Context, a *Attempt) error {
	node, ok := a.Whole.(*corev1.Node)
	if !ok || !a.Creates() {
		return nil
	}
	taint := corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule}
	if !slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&taint) }) {
		node.Spec.Taints = append(node.Spec.Taints, taint)
	}
	return nil
}
