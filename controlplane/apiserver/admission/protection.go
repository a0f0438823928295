package admission

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
)

// The finalizers that the controller of volume protection takes away.
const (
	claimProtection  = "kubernetes.io/pvc-protection"
	volumeProtection = "kubernetes.io/pv-protection"
	classProtection  = "kubernetes.io/vac-protection"
)

// storageObjectInUse marks new claims, volumes and classes of their attributes, so that none goes while it is in use, not even at once.
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

// taintNewNode keeps pods off a new node until it is found to be ready.
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
