// Package persistentvolume binds claims and volumes to each other, and releases volumes after their
// claim was deleted.
package persistentvolume

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"
)

// defaultClassAnnotation marks the StorageClass of claims that name no class.
const defaultClassAnnotation = "storageclass.kubernetes.io/is-default-class"

// ClaimAction is the result of PlanClaim: the next writes for a PersistentVolumeClaim.
type ClaimAction struct {
	// volume to bind to the claim, or with which a started binding must be completed
	Bind  *corev1.PersistentVolume
	Phase corev1.PersistentVolumeClaimPhase // new phase of a claim that is not bound; "" leaves it unchanged
	Class string                            // class to assign to a claim without a class
	// provisioner that must create the volume: it is written to the claim's annotations
	Provisioner string
	Event       string // type of the event to record; "" means no event
	Reason      string
	Message     string
}

func pendingAction(kind, reason, format string, args ...any) ClaimAction {
	return ClaimAction{Phase: corev1.ClaimPending, Event: kind, Reason: reason, Message: fmt.Sprintf(format, args...)}
}

func lostAction(reason, message string) ClaimAction {
	return ClaimAction{Phase: corev1.ClaimLost, Event: corev1.EventTypeWarning, Reason: reason, Message: message}
}

// PlanClaim returns the next writes for a claim. volumes and classes are all PersistentVolumes and
// StorageClasses of the cluster.
func PlanClaim(
	claim *corev1.PersistentVolumeClaim, volumes []*corev1.PersistentVolume, classes []*storagev1.StorageClass,
) ClaimAction {
	if metav1.HasAnnotation(claim.ObjectMeta, volume.AnnBindCompleted) {
		return planBound(claim, findVolume(volumes, claim.Spec.VolumeName))
	}
	if claim.DeletionTimestamp != nil {
		return ClaimAction{}
	}
	if claim.Spec.VolumeName != "" {
		return planChosen(claim, findVolume(volumes, claim.Spec.VolumeName))
	}
	if claim.Spec.StorageClassName == nil && claim.Annotations[corev1.BetaStorageClassAnnotation] == "" {
		if c := defaultClass(classes); c != nil {
			return ClaimAction{Class: c.Name}
		}
	}
	return planFree(claim, volumes, classes)
}

// planBound returns the action for a claim that was bound to volume v, which is nil if v does not
// exist. It never binds the claim to another volume.
func planBound(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) ClaimAction {
	switch {
	case claim.Spec.VolumeName == "":
		return lostAction("ClaimLost",
			"Bound claim has lost reference to PersistentVolume. Data on the volume is lost!")
	case v == nil:
		return lostAction("ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!")
	case v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID == claim.UID:
		return ClaimAction{Bind: v}
	}
	return lostAction("ClaimMisbound", "Two claims are bound to the same volume, this one is bound incorrectly")
}

// planChosen returns the action for an unbound claim that names volume v, which is nil if v does
// not exist.
func planChosen(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) ClaimAction {
	switch {
	case v == nil:
		return pendingAction(corev1.EventTypeWarning, "FailedBinding", "volume %q does not exist",
			claim.Spec.VolumeName)
	case v.Spec.ClaimRef == nil:
		if why := mismatchReason(claim, v); why != "" {
			return pendingAction(corev1.EventTypeWarning, "VolumeMismatch",
				"Cannot bind to requested volume %q: %s", v.Name, why)
		}
		return ClaimAction{Bind: v}
	case volume.IsVolumeBoundToClaim(v, claim):
		return ClaimAction{Bind: v}
	}
	return pendingAction(corev1.EventTypeWarning, "FailedBinding", "volume %q already bound to a different claim.",
		v.Name)
}

// mismatchReason returns why volume v cannot be bound to the claim, or "" if it can be bound.
func mismatchReason(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) string {
	have, want := v.Spec.Capacity[corev1.ResourceStorage], claim.Spec.Resources.Requests[corev1.ResourceStorage]
	switch {
	case have.Cmp(want) < 0:
		return "requested PV is too small"
	case volume.GetPersistentVolumeClass(v) != volume.GetPersistentVolumeClaimClass(claim):
		return "storageClassName does not match"
	case ptr.Deref(v.Spec.VolumeAttributesClassName, "") != ptr.Deref(claim.Spec.VolumeAttributesClassName, ""):
		return "volumeAttributesClassName does not match"
	case volume.CheckVolumeModeMismatches(&claim.Spec, &v.Spec):
		return "incompatible volumeMode"
	case !volume.CheckAccessModes(claim, v):
		return "incompatible accessMode"
	}
	return ""
}

// planFree returns the action for an unbound claim that names no volume: it binds the smallest
// volume that matches. If no volume matches, an event reports what the claim waits for.
func planFree(
	claim *corev1.PersistentVolumeClaim, volumes []*corev1.PersistentVolume, classes []*storagev1.StorageClass,
) ClaimAction {
	name := volume.GetPersistentVolumeClaimClass(claim)
	i := slices.IndexFunc(classes, func(c *storagev1.StorageClass) bool { return c.Name == name })
	var class *storagev1.StorageClass
	if i >= 0 {
		class = classes[i]
	}
	waits := class != nil && class.VolumeBindingMode != nil &&
		*class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer &&
		!metav1.HasAnnotation(claim.ObjectMeta, volume.AnnSelectedNode)
	var fitting []*corev1.PersistentVolume
	for _, v := range volumes {
		if volume.CheckAccessModes(claim, v) {
			fitting = append(fitting, v)
		}
	}
	slices.SortFunc(fitting, func(a, b *corev1.PersistentVolume) int { return cmp.Compare(a.Name, b.Name) })
	match, err := volume.FindMatchingVolume(claimForMatching(claim, fitting), fitting, nil, nil, waits, true)
	switch {
	case err != nil:
		return pendingAction(corev1.EventTypeWarning, "FailedBinding", "%v", err)
	case match != nil:
		return ClaimAction{Bind: match}
	case waits:
		return pendingAction(corev1.EventTypeNormal, "WaitForFirstConsumer",
			"waiting for first consumer to be created before binding")
	case name == "":
		return pendingAction(corev1.EventTypeNormal, "FailedBinding",
			"no persistent volumes available for this claim and no storage class is set")
	case class == nil:
		return pendingAction(corev1.EventTypeWarning, "ProvisioningFailed",
			"storageclass.storage.k8s.io %q not found", name)
	case class.Provisioner == volume.NotSupportedProvisioner:
		return pendingAction(corev1.EventTypeNormal, "FailedBinding",
			"no persistent volume of class %q fits and the class provisions none", name)
	}
	a := pendingAction(corev1.EventTypeNormal, "ExternalProvisioning",
		"waiting for a volume to be created by the external provisioner %q or by an administrator", class.Provisioner)
	a.Provisioner = class.Provisioner
	return a
}

// claimForMatching returns the claim to compare with volumes. If a volume was provisioned for the
// claim, the result has the VolumeAttributesClass of that volume, because the claim may refer to
// another class by now. That class is applied after the binding.
func claimForMatching(
	claim *corev1.PersistentVolumeClaim, volumes []*corev1.PersistentVolume,
) *corev1.PersistentVolumeClaim {
	i := slices.IndexFunc(volumes, func(v *corev1.PersistentVolume) bool {
		return v.Spec.ClaimRef != nil && v.Spec.ClaimRef.UID == claim.UID &&
			metav1.HasAnnotation(v.ObjectMeta, volume.AnnDynamicallyProvisioned)
	})
	if i < 0 {
		return claim
	}
	was := *claim
	was.Spec.VolumeAttributesClassName = volumes[i].Spec.VolumeAttributesClassName
	return &was
}

// defaultClass returns the newest StorageClass with defaultClassAnnotation, or nil.
func defaultClass(classes []*storagev1.StorageClass) *storagev1.StorageClass {
	var found *storagev1.StorageClass
	for _, c := range classes {
		if c.Annotations[defaultClassAnnotation] != "true" {
			continue
		}
		if found == nil || found.CreationTimestamp.Before(&c.CreationTimestamp) ||
			found.CreationTimestamp.Equal(&c.CreationTimestamp) && c.Name < found.Name {
			found = c
		}
	}
	return found
}

func findVolume(volumes []*corev1.PersistentVolume, name string) *corev1.PersistentVolume {
	i := slices.IndexFunc(volumes, func(v *corev1.PersistentVolume) bool { return v.Name == name })
	if name == "" || i < 0 {
		return nil
	}
	return volumes[i]
}

// VolumeAction is the result of PlanVolume: the next writes for a PersistentVolume.
type VolumeAction struct {
	Phase   corev1.PersistentVolumePhase // new phase; "" leaves it unchanged
	Reason  string                       // reason of phase Failed
	Message string
	Unbind  bool // remove the reference to a claim that is bound to another volume
	Claim   bool // the claim must be reconciled before the volume
}

// PlanVolume returns the next writes for volume v. claim is the claim that claimRef names, or nil
// if no claim with that UID exists.
func PlanVolume(v *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) VolumeAction {
	ref := v.Spec.ClaimRef
	switch {
	case ref == nil:
		return VolumeAction{Phase: corev1.VolumeAvailable}
	case ref.UID == "":
		// reserved for a claim of this name, which may be created later
		return VolumeAction{Phase: corev1.VolumeAvailable, Claim: true}
	case claim == nil:
		return releasedAction(v)
	case claim.Spec.VolumeName == v.Name:
		return VolumeAction{Phase: corev1.VolumeBound}
	case claim.Spec.VolumeName == "":
		return VolumeAction{Claim: true} // the binding is not complete: reconcile the claim
	case metav1.HasAnnotation(v.ObjectMeta, volume.AnnDynamicallyProvisioned) &&
		v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete:
		return releasedAction(v) // provisioned for a claim that was bound to another volume
	}
	return VolumeAction{Unbind: true}
}

// releasedAction returns the action for volume v after its claim was deleted. The data is never
// given to another claim: either v is kept, or its provisioner deletes the data and v.
func releasedAction(v *corev1.PersistentVolume) VolumeAction {
	switch {
	case v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRecycle:
		return VolumeAction{Phase: corev1.VolumeFailed, Reason: "VolumeFailedRecycle",
			Message: "No recycler plugin found for the volume!"}
	case v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete &&
		!metav1.HasAnnotation(v.ObjectMeta, volume.AnnDynamicallyProvisioned):
		return VolumeAction{Phase: corev1.VolumeFailed, Reason: "VolumeFailedDelete",
			Message: "the volume was not provisioned dynamically, so no provisioner can delete its data"}
	}
	return VolumeAction{Phase: corev1.VolumeReleased}
}

// BoundVolume returns a copy of v that refers to claim. changed is false if v already refers to it.
func BoundVolume(v *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim) (
	next *corev1.PersistentVolume, changed bool, err error,
) {
	return volume.GetBindVolumeToClaim(v, claim)
}

// BoundClaim returns a copy of claim that is bound to v and has the annotation that the binding is
// complete. changed is false if claim already has both.
func BoundClaim(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) (
	next *corev1.PersistentVolumeClaim, changed bool,
) {
	next = claim.DeepCopy()
	if next.Spec.VolumeName != v.Name {
		next.Spec.VolumeName = v.Name
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, volume.AnnBoundByController, "yes")
		changed = true
	}
	if !metav1.HasAnnotation(next.ObjectMeta, volume.AnnBindCompleted) {
		metav1.SetMetaDataAnnotation(&next.ObjectMeta, volume.AnnBindCompleted, "yes")
		changed = true
	}
	return next, changed
}

// Unbound returns a copy of v without its reference to a claim. A reference that a user wrote is
// kept without the UID, so that a recreated claim of that name can be bound.
func Unbound(v *corev1.PersistentVolume) *corev1.PersistentVolume {
	next := v.DeepCopy()
	if metav1.HasAnnotation(next.ObjectMeta, volume.AnnBoundByController) {
		next.Spec.ClaimRef = nil
		delete(next.Annotations, volume.AnnBoundByController)
	} else {
		next.Spec.ClaimRef.UID = ""
	}
	return next
}
