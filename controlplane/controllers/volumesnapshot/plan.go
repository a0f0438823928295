// Package volumesnapshot does two things for volume snapshots (snapshot.storage.k8s.io/v1), for
// which other clusters run two programs. It binds VolumeSnapshots to VolumeSnapshotContents if the
// CustomResourceDefinition of VolumeSnapshots asks for it (ServedBy). A cluster with its own
// snapshot controller installs definitions without that annotation. And it takes and deletes
// snapshots for drivers that have no snapshotter of their own (engine.IsServedByAgent). It
// does the same for group snapshots (groupsnapshot.storage.k8s.io), and creates the member snapshot
// of each claim in a group.
//
// No snapshot is leaked. Before a driver is first called, the content has a finalizer and an
// annotation that a snapshot is being created. A content that is deleted in the meantime stays
// until the driver has returned the snapshot and deleted it. Names are derived from UIDs, so that
// every call and every write can be repeated.
package volumesnapshot

import (
	"fmt"

	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

// ServedBy is an annotation of the CustomResourceDefinition of VolumeSnapshots. With value
// ControlPlane it makes this controller bind VolumeSnapshots to their contents.
const (
	ServedBy     = engine.ServedByAnnotation
	ControlPlane = "control-plane"
	// Definition is the name of the CustomResourceDefinition of VolumeSnapshots.
	Definition = "volumesnapshots." + engine.SnapshotGroup
)

// Finalizers, annotations and class parameters of snapshots. They are those of the upstream
// snapshot controller and the CSI snapshotter.
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

// contentName returns the name of the VolumeSnapshotContent for VolumeSnapshot s. driverName
// returns the name of the snapshot in the CSI request.
func contentName(s *snap.VolumeSnapshot) string { return "snapcontent-" + string(s.UID) }

func driverName(c *snap.VolumeSnapshotContent) string {
	return "snapshot-" + string(c.Spec.VolumeSnapshotRef.UID)
}

// checkSource returns an error if no snapshot can be taken of a claim with PersistentVolume v.
func checkSource(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) error {
	switch {
	case claim.DeletionTimestamp != nil:
		return fmt.Errorf("PersistentVolumeClaim %s is being deleted", claim.Name)
	case claim.Status.Phase != corev1.ClaimBound || claim.Spec.VolumeName == "":
		return fmt.Errorf("PersistentVolumeClaim %s is not bound to a volume yet", claim.Name)
	case v == nil:
		return fmt.Errorf("PersistentVolume %s of claim %s does not exist", claim.Spec.VolumeName, claim.Name)
	case v.Spec.ClaimRef == nil || v.Spec.ClaimRef.UID != claim.UID:
		return fmt.Errorf("PersistentVolume %s is not bound to claim %s", v.Name, claim.Name)
	case v.Spec.CSI == nil:
		return fmt.Errorf("PersistentVolume %s does not belong to a CSI driver: only volumes of CSI drivers can have "+
			"snapshots", v.Name)
	}
	return nil
}

// contentOf returns the VolumeSnapshotContent to create for VolumeSnapshot s with class c and
// PersistentVolume v.
func contentOf(s *snap.VolumeSnapshot, c class, v *corev1.PersistentVolume) (*snap.VolumeSnapshotContent, error) {
	mode := ptr.Deref(v.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
	out := &snap.VolumeSnapshotContent{
		ObjectMeta: metav1.ObjectMeta{Name: contentName(s), Finalizers: []string{contentFinalizer}},
		Spec: snap.VolumeSnapshotContentSpec{
			VolumeSnapshotRef: corev1.ObjectReference{APIVersion: snap.GroupName + "/v1", Kind: "VolumeSnapshot",
				Namespace: s.Namespace, Name: s.Name, UID: s.UID},
			DeletionPolicy: c.policy, Driver: c.driver, VolumeSnapshotClassName: &c.name,
			Source: snap.VolumeSnapshotContentSource{VolumeHandle: &v.Spec.CSI.VolumeHandle}, SourceVolumeMode: &mode,
		},
	}
	return out, ofSnapshots.annotateContent(&out.ObjectMeta, c, s, v.Spec.NodeAffinity)
}

// checkOwnership returns an error if content c, which VolumeSnapshot s names, does not belong to s.
func checkOwnership(s *snap.VolumeSnapshot, c *snap.VolumeSnapshotContent) error {
	made := c.Spec.Source.SnapshotHandle == nil && s.Spec.Source.VolumeSnapshotContentName != nil
	return ofSnapshots.checkOwnership(s, c, c.Spec.VolumeSnapshotRef, made)
}

// isDataDeletable reports whether VolumeSnapshotContent c is being deleted and no VolumeSnapshot
// uses its data any more. The data may then be deleted, if the deletion policy is Delete.
func isDataDeletable(c *snap.VolumeSnapshotContent) bool {
	return c.DeletionTimestamp != nil &&
		(c.Spec.VolumeSnapshotRef.UID == "" || metav1.HasAnnotation(c.ObjectMeta, beingDeleted))
}

// isSourceOf reports whether VolumeSnapshot s is the data source of claim c, and c has no volume
// yet.
func isSourceOf(s *snap.VolumeSnapshot, c *corev1.PersistentVolumeClaim) bool {
	from := c.Spec.DataSource
	return c.Namespace == s.Namespace && c.Spec.VolumeName == "" && from != nil && from.Kind == "VolumeSnapshot" &&
		from.APIGroup != nil && *from.APIGroup == snap.GroupName && from.Name == s.Name
}
