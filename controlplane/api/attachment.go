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
	// the labels and taints that a cluster file has set on the Node
	AnnotationClusterFile  = "keelson.dev/cluster-file"
	AnnotationUpgradeDrain = "keelson.dev/upgrade-drain" // the progress of a drain for an upgrade
)

// AnnotationUnheard marks objects of a restored backup about which the store may be out of date.
//
// On a Node it stays until the agent has reported its volumes in use: the node may use volumes that
// the store does not know of. Until then no other node gets a volume that only one node may use.
//
// On a PersistentVolume for a single node it stays for a time limit. Within it, nodes that are
// missing in the backup report their volumes or stop the pods that use them.
const AnnotationUnheard = "keelson.dev/unheard-since-restore"

// Unheard reports whether a Node or a PersistentVolume has AnnotationUnheard.
func Unheard(o Object) bool {
	_, ok := o.GetAnnotations()[AnnotationUnheard]
	return ok
}

// AnnotationVolumesInUse is set on a Node by its agent. It means that status.volumesInUse is
// reported by the agent, even if the list is empty.
const AnnotationVolumesInUse = "keelson.dev/volumes-in-use"

// Joining reports whether a Node is new and its agent has not yet reported its volumes in use. Only
// agents that set AnnotationFencesAfter report them.
func Joining(n *corev1.Node) bool {
	_, fences := n.Annotations[AnnotationFencesAfter]
	_, told := n.Annotations[AnnotationVolumesInUse]
	return fences && !told
}

// SinglePod reports whether at most one pod may use a volume (ReadWriteOncePod). Such a volume has
// no other access mode.
func SinglePod(v *corev1.PersistentVolume) bool {
	return slices.Contains(v.Spec.AccessModes, corev1.ReadWriteOncePod)
}

// SingleNode reports whether at most one node may use a volume: it has neither ReadOnlyMany nor
// ReadWriteMany.
func SingleNode(v *corev1.PersistentVolume) bool {
	return !slices.ContainsFunc(v.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
		return m == corev1.ReadOnlyMany || m == corev1.ReadWriteMany
	})
}

// AnnotationVolumesHeld is set on a Node by its agent: the volumes in use that may be mounted on
// the node, as a JSON list of names. Pods of the node only wait for the other volumes in use. A
// missing or malformed list means all volumes in use.
const AnnotationVolumesHeld = "keelson.dev/volumes-held"

// Holds reports whether a volume may be mounted on a node, from the status and annotations of the
// Node. told is false where the volume is in use but the agent is of an older release that does not
// set AnnotationVolumesHeld; holds is true then.
func Holds(n *corev1.Node, name corev1.UniqueVolumeName) (holds, told bool) {
	held, told := n.Annotations[AnnotationVolumesHeld]
	if !slices.Contains(n.Status.VolumesInUse, name) {
		return false, true
	}
	var names []corev1.UniqueVolumeName
	if !told || json.Unmarshal([]byte(held), &names) != nil {
		return true, told
	}
	return slices.Contains(names, name), true
}

// AnnotationClaimsHeld is set on a Node by its agent: the claims with access mode ReadWriteOncePod
// that its pods use, until their volumes are unmounted. The value is a JSON list of ClaimHeld. A
// malformed value means that the node may hold any claim.
const AnnotationClaimsHeld = "keelson.dev/claims-held"

// ClaimHeld is an entry of AnnotationClaimsHeld: a claim and the pod that uses it.
type ClaimHeld struct {
	Pod    types.UID `json:"pod"`
	Claim  types.UID `json:"claim"`
	Volume string    `json:"volume,omitempty"` // the PersistentVolume's name, if it was recorded
}

// ClaimsHeld returns the entries of AnnotationClaimsHeld of a node. all is true if the annotation
// is malformed: the node may hold any claim. Without the annotation, which older agents do not set,
// it returns no entries.
func ClaimsHeld(n *corev1.Node) (list []ClaimHeld, all bool) {
	told, tells := n.Annotations[AnnotationClaimsHeld]
	if !tells || told == "[]" {
		return nil, false
	}
	if json.Unmarshal([]byte(told), &list) != nil {
		return nil, true
	}
	return list, false
}

// AnnotationFencesAfter is set on a Node by its agent. If the agent has had no contact with the
// control plane for this number of seconds, it stops its pods with attached volumes. "0" means that
// it never does.
const AnnotationFencesAfter = "keelson.dev/fences-after"

// FencesAfter returns the time without contact to the control plane after which a node stops its
// pods with attached volumes. 0 means never, or that AnnotationFencesAfter is missing or malformed.
func FencesAfter(n *corev1.Node) time.Duration {
	return ParseFence(n.Annotations[AnnotationFencesAfter])
}

// ParseFence parses a value of AnnotationFencesAfter. It returns 0 (never) for a malformed value.
func ParseFence(after string) time.Duration {
	seconds, err := strconv.Atoi(after)
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// AnnotationNodeFencesAfter on a VolumeAttachment is the value of AnnotationFencesAfter that its
// Node reported last. It remains after the Node is deleted. Older releases keep the annotation and
// ignore it.
const AnnotationNodeFencesAfter = "keelson.dev/node-fences-after"

// KeepFence returns the attachment with AnnotationNodeFencesAfter set to the value that its Node
// reports. changed is false, and the attachment is returned unmodified, if it has that value
// already or if the Node reports none.
func KeepFence(a *storagev1.VolumeAttachment, n *corev1.Node) (kept *storagev1.VolumeAttachment, changed bool) {
	reported, reports := n.Annotations[AnnotationFencesAfter]
	if have, has := a.Annotations[AnnotationNodeFencesAfter]; !reports || has && have == reported {
		return a, false
	}
	kept = a.DeepCopy()
	metav1.SetMetaDataAnnotation(&kept.ObjectMeta, AnnotationNodeFencesAfter, reported)
	return kept, true
}

// OutOfService reports whether a node has the out-of-service taint, with which an operator declares
// it dead, and is not Ready.
func OutOfService(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return false
		}
	}
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
}

// AttachmentName returns the name of the VolumeAttachment of a CSI volume to a node. The name is
// the same as in Kubernetes, because CSI attachers and operators look it up.
func AttachmentName(handle, driver, node string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(handle+driver+node)))
}

// ISCSIAttacher is the attacher of iSCSI volumes, implemented by the control plane. It attaches
// nothing: the VolumeAttachments only record which node may use a volume.
const ISCSIAttacher = "iscsi.keelson.dev"

// Attachable returns the attacher of a volume and the volume's handle for that attacher. ok is
// false for volumes that are not attached to nodes. Names of iSCSI targets are lowered, because
// they are case-insensitive (RFC 3722).
func Attachable(v *corev1.PersistentVolume) (attacher, handle string, ok bool) {
	switch {
	case v == nil:
	case v.Spec.CSI != nil:
		return v.Spec.CSI.Driver, v.Spec.CSI.VolumeHandle, true
	case v.Spec.ISCSI != nil:
		return ISCSIAttacher, fmt.Sprintf("%s:%d", strings.ToLower(v.Spec.ISCSI.IQN), v.Spec.ISCSI.Lun), true
	}
	return "", "", false
}

// AttachedName returns the name of an attached volume in a Node's status, as in Kubernetes.
func AttachedName(driver, handle string) corev1.UniqueVolumeName {
	if driver == ISCSIAttacher {
		return corev1.UniqueVolumeName("kubernetes.io/iscsi/" + handle)
	}
	return corev1.UniqueVolumeName("kubernetes.io/csi/" + driver + "^" + handle)
}

// OfAttachedName is the inverse of AttachedName. ok is false if the name is not of that form.
func OfAttachedName(name corev1.UniqueVolumeName) (driver, handle string, ok bool) {
	if handle, ok = strings.CutPrefix(string(name), "kubernetes.io/iscsi/"); ok {
		return ISCSIAttacher, handle, true
	}
	rest, ok := strings.CutPrefix(string(name), "kubernetes.io/csi/")
	if !ok {
		return "", "", false
	}
	return strings.Cut(rest, "^") // driver names contain no "^"
}

// AttachRequired reports whether volumes of a driver must be attached to a node before it mounts
// them. As documented, that is the default, also where no CSIDriver object exists.
func AttachRequired(d *storagev1.CSIDriver) bool {
	return d == nil || d.Spec.AttachRequired == nil || *d.Spec.AttachRequired
}
