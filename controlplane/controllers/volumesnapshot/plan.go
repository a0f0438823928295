// Package volumesnapshot does two things for snapshots of volumes (snapshot.storage.k8s.io/v1), which elsewhere are two
// programs. It binds VolumeSnapshots and VolumeSnapshotContents, where the definition of VolumeSnapshots says that the
// control plane does (ServedBy): who brings a controller of his own brings definitions without that. And it has drivers
// take and delete snapshots which have no snapshotter of their own (controllers.Served). Groups of snapshots
// (groupsnapshot.storage.k8s.io) it serves likewise, and makes the snapshot of each claim in a group.
//
// No snapshot is lost sight of. Before a driver is first called, the content has a finalizer and says that a snapshot is
// being made; a content that goes meanwhile stays until the driver has said what it made, and has deleted it. Names follow
// from UIDs, so that every call and every write can be repeated.
package volumesnapshot

import (
	"fmt"

	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/controllers"
)

// ServedBy on the definition of VolumeSnapshots, with the value ControlPlane, has this controller bind them.
const (
	ServedBy     = controllers.ServedByAnnotation
	ControlPlane = "control-plane"
	// Definition is the name of that definition.
	Definition = "volumesnapshots." + controllers.SnapshotGroup
)

// Names that all programs which serve snapshots agree upon.
const (
	prefix = "snapshot.storage.kubernetes.io/"

	boundFinalizer   = prefix + "volumesnapshot-bound-protection"
	sourceFinalizer  = prefix + "volumesnapshot-as-source-protection"
	contentFinalizer = prefix + "volumesnapshotcontent-bound-protection"
	claimFinalizer   = prefix + "pvc-as-source-protection"

	beingCreated    = prefix + "volumesnapshot-being-created"
	beingDeleted    = prefix + "volumesnapshot-being-deleted"
	defaultClass    = prefix + "is-default-class"
	secretName      = prefix + "deletion-secret-name"
	secretNamespace = prefix + "deletion-secret-namespace"

	reserved             = "csi.storage.k8s.io/"
	secretNameParam      = reserved + "snapshotter-secret-name"
	secretNamespaceParam = reserved + "snapshotter-secret-namespace"
)

// contentName is that of the content made for a snapshot, driverName what the driver is told.
func contentName(s *snap.VolumeSnapshot) string { return "snapcontent-" + string(s.UID) }

func driverName(c *snap.VolumeSnapshotContent) string {
	return "snapshot-" + string(c.Spec.VolumeSnapshotRef.UID)
}

// source is the volume of the claim that a snapshot is to be of.
func source(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) error {
	switch {
	case claim.DeletionTimestamp != nil:
		return fmt.Errorf("PersistentVolumeClaim %s is being deleted", claim.Name)
	case claim.Status.Phase != corev1.ClaimBound || claim.Spec.VolumeName == "":
		return fmt.Errorf("PersistentVolumeClaim %s is not bound to a volume yet", claim.Name)
	case v == nil:
		return fmt.Errorf("PersistentVolume %s of claim %s does not exist", claim.Spec.VolumeName, claim.Name)
	case v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID != claim.UID:
		return fmt.Errorf("PersistentVolume %s is not that of claim %s", v.Name, claim.Name)
	case v.Spec.CSI == nil:
		return fmt.Errorf("PersistentVolume %s is not one of a CSI driver: there are snapshots of such alone", v.Name)
	}
	return nil
}

// contentOf is the content made for a snapshot of a claim.
func contentOf(s *snap.VolumeSnapshot, c class, v *corev1.PersistentVolume) (*snap.VolumeSnapshotContent, error) {
	mode := corev1.PersistentVolumeFilesystem
	if v.Spec.VolumeMode != nil {
		mode = *v.Spec.VolumeMode
	}
	out := &snap.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: contentName(s), Finalizers: []string{contentFinalizer}},
		Spec: snap.VolumeSnapshotContentSpec{
			VolumeSnapshotRef: corev1.ObjectReference{APIVersion: snap.GroupName + "/v1", Kind: "VolumeSnapshot", Namespace: s.Namespace, Name: s.Name, UID: s.UID},
			DeletionPolicy:    c.policy, Driver: c.driver, VolumeSnapshotClassName: &c.name,
			Source: snap.VolumeSnapshotContentSource{VolumeHandle: &v.Spec.CSI.VolumeHandle}, SourceVolumeMode: &mode,
		},
	}
	return out, ofSnapshots.note(&out.ObjectMeta, c, s, v.Spec.NodeAffinity)
}

// belongs says why a content that a snapshot names is not its own.
func belongs(s *snap.VolumeSnapshot, c *snap.VolumeSnapshotContent) error {
	made := c.Spec.Source.SnapshotHandle == nil && s.Spec.Source.VolumeSnapshotContentName != nil
	return ofSnapshots.belongs(s, c, c.Spec.VolumeSnapshotRef, made)
}

// goes says whether the data of a content that is being deleted are its driver's to delete, if its policy is that: nobody
// has them any more.
func goes(c *snap.VolumeSnapshotContent) bool {
	return c.DeletionTimestamp != nil && (c.Spec.VolumeSnapshotRef.UID == "" || metav1.HasAnnotation(c.ObjectMeta, beingDeleted))
}

// isSourceOf says whether a claim is having its volume made of a snapshot.
func isSourceOf(s *snap.VolumeSnapshot, c *corev1.PersistentVolumeClaim) bool {
	from := c.Spec.DataSource
	return c.Namespace == s.Namespace && c.Spec.VolumeName == "" && from != nil && from.Kind == "VolumeSnapshot" &&
		from.APIGroup != nil && *from.APIGroup == snap.GroupName && from.Name == s.Name
}
