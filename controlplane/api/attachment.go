package api

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Annotations of Nodes that only kctl writes; a node may not change them.
const (
	// the labels and taints that kctl has set on the Node from a cluster file
	AnnotationClusterFile  = "keelson.dev/cluster-file"
	AnnotationUpgradeDrain = "keelson.dev/upgrade-drain" // the progress of a drain for an upgrade
)

// AnnotationUnconfirmed marks objects of a restored backup about which the store may be out of
// date.
//
// On a Node, it stays until the agent has reported its volumes in use: the node may use volumes
// that the store does not list. Until then no other node gets a volume that only one node may use.
//
// On a PersistentVolume for a single node, it stays for a limited time. During that time, nodes
// that the backup does not contain report their volumes, or stop the pods that use them.
const AnnotationUnconfirmed = "keelson.dev/unheard-since-restore"

// IsUnconfirmed reports whether a Node or a PersistentVolume has AnnotationUnconfirmed.
func IsUnconfirmed(object Object) bool {
	_, ok := object.GetAnnotations()[AnnotationUnconfirmed]
	return ok
}

// AnnotationVolumesInUse is set on a Node by its agent. It means that the agent reports
// status.volumesInUse, even if the list is empty.
const AnnotationVolumesInUse = "keelson.dev/volumes-in-use"

// IsJoining reports whether a Node is new and its agent has not yet reported its volumes in use. It
// returns false for agents that do not set AnnotationFencesAfter, because these report no volumes.
func IsJoining(node *corev1.Node) bool {
	_, fences := node.Annotations[AnnotationFencesAfter]
	_, told := node.Annotations[AnnotationVolumesInUse]
	return fences && !told
}

// IsSinglePod reports whether at most one pod may use a volume (ReadWriteOncePod). Such a volume
// has no other access mode.
func IsSinglePod(volume *corev1.PersistentVolume) bool {
	return slices.Contains(volume.Spec.AccessModes, corev1.ReadWriteOncePod)
}

// IsSingleNode reports whether at most one node may use a volume: it has neither ReadOnlyMany nor
// ReadWriteMany.
func IsSingleNode(volume *corev1.PersistentVolume) bool {
	return !slices.ContainsFunc(volume.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
		return m == corev1.ReadOnlyMany || m == corev1.ReadWriteMany
	})
}

// AnnotationVolumesHeld is set on a Node by its agent. Its value is a JSON list with the names of
// those volumes in use that may be mounted on the node. The other volumes in use are not mounted:
// the node's pods are only waiting for them. A missing or malformed list means all volumes in use.
const AnnotationVolumesHeld = "keelson.dev/volumes-held"

// MayHoldVolume reports whether a volume may be mounted on a node, according to the status and
// annotations of the Node. reported is false if the volume is in use but the agent is of an older
// release, which does not set AnnotationVolumesHeld; holds is then true.
func MayHoldVolume(node *corev1.Node, volume corev1.UniqueVolumeName) (holds, reported bool) {
	held, reported := node.Annotations[AnnotationVolumesHeld]
	if !slices.Contains(node.Status.VolumesInUse, volume) {
		return false, true
	}
	var names []corev1.UniqueVolumeName
	if !reported || json.Unmarshal([]byte(held), &names) != nil {
		return true, reported
	}
	return slices.Contains(names, volume), true
}

// AnnotationClaimsHeld is set on a Node by its agent. Its value is a JSON list of HeldClaim: the
// claims with access mode ReadWriteOncePod that the node's pods use, until their volumes are
// unmounted. A malformed value means that the node may hold any claim.
const AnnotationClaimsHeld = "keelson.dev/claims-held"

// HeldClaim is an entry of AnnotationClaimsHeld: a claim and the pod that uses it.
type HeldClaim struct {
	Pod    types.UID `json:"pod"`
	Claim  types.UID `json:"claim"`
	Volume string    `json:"volume,omitempty"` // the PersistentVolume's name, if it was recorded
}

// HeldClaims returns the entries of AnnotationClaimsHeld of a node. unknown is true if the
// annotation is malformed: the node may hold any claim. Without the annotation, which older agents
// do not set, it returns no entries.
func HeldClaims(node *corev1.Node) (list []HeldClaim, unknown bool) {
	told, tells := node.Annotations[AnnotationClaimsHeld]
	if !tells || told == "[]" {
		return nil, false
	}
	if json.Unmarshal([]byte(told), &list) != nil {
		return nil, true
	}
	return list, false
}

// AnnotationFencesAfter is set on a Node by its agent. The agent stops its pods with attached
// volumes after this number of seconds without contact to the control plane. "0" means that it
// never stops them.
const AnnotationFencesAfter = "keelson.dev/fences-after"

// FenceDelay returns the time without contact to the control plane after which a node stops its
// pods with attached volumes. 0 means never, or that AnnotationFencesAfter is missing or malformed.
func FenceDelay(node *corev1.Node) time.Duration {
	return ParseFenceDelay(node.Annotations[AnnotationFencesAfter])
}

// ParseFenceDelay parses a value of AnnotationFencesAfter. It returns 0 (never) for a malformed
// value.
func ParseFenceDelay(text string) time.Duration {
	seconds, err := strconv.Atoi(text)
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// AnnotationNodeFencesAfter is set on a VolumeAttachment: the last value of AnnotationFencesAfter
// that the attachment's Node reported. It remains after the Node is deleted. Older releases keep
// the annotation and ignore it.
const AnnotationNodeFencesAfter = "keelson.dev/node-fences-after"

// RecordFenceDelay returns a copy of the attachment with AnnotationNodeFencesAfter set to the value
// that the node reports. If the attachment already has that value, or if the node reports none, it
// returns the attachment itself and changed is false.
func RecordFenceDelay(attachment *storagev1.VolumeAttachment, node *corev1.Node) (
	updated *storagev1.VolumeAttachment, changed bool,
) {
	reported, reports := node.Annotations[AnnotationFencesAfter]
	if have, has := attachment.Annotations[AnnotationNodeFencesAfter]; !reports || has && have == reported {
		return attachment, false
	}
	updated = attachment.DeepCopy()
	metav1.SetMetaDataAnnotation(&updated.ObjectMeta, AnnotationNodeFencesAfter, reported)
	return updated, true
}

// IsOutOfService reports whether a node is not Ready and has the out-of-service taint, with which
// an operator declares that it is shut down.
func IsOutOfService(node *corev1.Node) bool {
	return !IsNodeReady(node) && slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeOutOfService
	})
}

// AttachmentName returns the name of the VolumeAttachment of a CSI volume to a node. The name is
// the same as in Kubernetes, because CSI attachers and operators look it up.
func AttachmentName(handle, driver, node string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(handle+driver+node)))
}

// ISCSIAttacher is the attacher of iSCSI volumes, implemented by the control plane. It performs no
// operation: the VolumeAttachments only record which node may use a volume.
const ISCSIAttacher = "iscsi.keelson.dev"

// VolumeAttacher returns the attacher of a volume and the volume's handle for that attacher. ok is
// false for volumes that are not attached to nodes. Names of iSCSI targets are converted to lower
// case, because they are case-insensitive (RFC 3722).
func VolumeAttacher(volume *corev1.PersistentVolume) (attacher, handle string, ok bool) {
	switch {
	case volume == nil:
	case volume.Spec.CSI != nil:
		return volume.Spec.CSI.Driver, volume.Spec.CSI.VolumeHandle, true
	case volume.Spec.ISCSI != nil:
		return ISCSIAttacher, fmt.Sprintf("%s:%d", strings.ToLower(volume.Spec.ISCSI.IQN), volume.Spec.ISCSI.Lun), true
	}
	return "", "", false
}

// AttachedVolumeName returns the name of an attached volume as it is listed in the status of a
// Node, the same as in Kubernetes.
func AttachedVolumeName(driver, handle string) corev1.UniqueVolumeName {
	if driver == ISCSIAttacher {
		return corev1.UniqueVolumeName("kubernetes.io/iscsi/" + handle)
	}
	return corev1.UniqueVolumeName("kubernetes.io/csi/" + driver + "^" + handle)
}

// ParseAttachedVolumeName returns the driver and the handle in a name that AttachedVolumeName has
// returned. ok is false for any other name.
func ParseAttachedVolumeName(name corev1.UniqueVolumeName) (driver, handle string, ok bool) {
	if handle, ok = strings.CutPrefix(string(name), "kubernetes.io/iscsi/"); ok {
		return ISCSIAttacher, handle, true
	}
	rest, ok := strings.CutPrefix(string(name), "kubernetes.io/csi/")
	if !ok {
		return "", "", false
	}
	return strings.Cut(rest, "^") // driver names contain no "^"
}

// RequiresAttach reports whether volumes of a driver must be attached to a node before they are
// mounted. That is the default: it is true for a nil driver, when no CSIDriver object exists.
func RequiresAttach(driver *storagev1.CSIDriver) bool {
	return driver == nil || driver.Spec.AttachRequired == nil || *driver.Spec.AttachRequired
}
