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

// Annotations on Nodes that are kctl's alone; a node may not change them.
const (
	AnnotationClusterFile  = "keelson.dev/cluster-file"  // which labels and taints it has from a cluster file
	AnnotationUpgradeDrain = "keelson.dev/upgrade-drain" // how far a drain for an upgrade is
)

// AnnotationUnheard is on a Node of a backup that was restored until its agent has said which volumes it uses: it may use others than
// the store knows of. Until then no other node gets a volume that one node may have. It is on PersistentVolumes for one node, too, until nodes
// that are not in the backup have had time to say so, or to end the pods that use them.
const AnnotationUnheard = "keelson.dev/unheard-since-restore"

// Unheard says whether a Node or a PersistentVolume has it.
func Unheard(o Object) bool {
	_, ok := o.GetAnnotations()[AnnotationUnheard]
	return ok
}

// AnnotationVolumesInUse on a Node is told by its agent: that status.volumesInUse is what it uses, which may be nothing.
const AnnotationVolumesInUse = "keelson.dev/volumes-in-use"

// Joining says that a Node has just been made, by an agent that is going to say which volumes it uses, and has not yet.
func Joining(n *corev1.Node) bool {
	_, fences := n.Annotations[AnnotationFencesAfter]
	_, told := n.Annotations[AnnotationVolumesInUse]
	return fences && !told
}

// SinglePod says whether no more than one pod may have a volume. Such a volume has no other access mode.
func SinglePod(v *corev1.PersistentVolume) bool {
	return slices.Contains(v.Spec.AccessModes, corev1.ReadWriteOncePod)
}

// SingleNode says whether no more than one node may have a volume.
func SingleNode(v *corev1.PersistentVolume) bool {
	return !slices.ContainsFunc(v.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
		return m == corev1.ReadOnlyMany || m == corev1.ReadWriteMany
	})
}

// AnnotationVolumesHeld on a Node is told by its agent: which of the volumes in use it may have mounted, as a JSON list of their names; for
// the others its pods wait only. Whatever is no such list means all of them.
const AnnotationVolumesHeld = "keelson.dev/volumes-held"

// Holds says whether a node may have a volume mounted by what it says of itself; told is false where it says that it uses the volume, and
// is of a release that does not say more.
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

// AnnotationClaimsHeld on a Node is told by its agent: which claims with access mode ReadWriteOncePod its pods have until their volumes are
// unmounted, as a JSON list of ClaimHeld. Whatever is no such list means any of them.
const AnnotationClaimsHeld = "keelson.dev/claims-held"

// ClaimHeld is such a claim.
type ClaimHeld struct {
	Pod    types.UID `json:"pod"`
	Claim  types.UID `json:"claim"`
	Volume string    `json:"volume,omitempty"` // the PersistentVolume, where it was noted
}

// ClaimsHeld are those that a node tells; all where it may have any. An agent of a release that tells none has none.
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

// AnnotationFencesAfter on a Node is told by its agent: when it has not heard the control plane for so many seconds, it
// ends its pods with attached volumes by itself; "0" says that it never does.
const AnnotationFencesAfter = "keelson.dev/fences-after"

// FencesAfter is after which silence of the control plane a node ends its pods with attached volumes; 0 = never, or it
// does not say.
func FencesAfter(n *corev1.Node) time.Duration {
	return ParseFence(n.Annotations[AnnotationFencesAfter])
}

// ParseFence reads a value of AnnotationFencesAfter; 0 = never.
func ParseFence(after string) time.Duration {
	seconds, err := strconv.Atoi(after)
	if err != nil || seconds < 0 {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// AnnotationNodeFencesAfter on a VolumeAttachment is the value of AnnotationFencesAfter that its Node
// reported last. It outlives the Node. Releases that do not know the annotation keep and ignore it.
const AnnotationNodeFencesAfter = "keelson.dev/node-fences-after"

// KeepFence returns the attachment with the fence that its Node reports. changed is false where the
// attachment has that fence already, or the Node reports none.
func KeepFence(a *storagev1.VolumeAttachment, n *corev1.Node) (kept *storagev1.VolumeAttachment, changed bool) {
	reported, reports := n.Annotations[AnnotationFencesAfter]
	if have, has := a.Annotations[AnnotationNodeFencesAfter]; !reports || has && have == reported {
		return a, false
	}
	kept = a.DeepCopy()
	metav1.SetMetaDataAnnotation(&kept.ObjectMeta, AnnotationNodeFencesAfter, reported)
	return kept, true
}

// OutOfService says that an operator has declared a node dead, and that it does not say otherwise.
func OutOfService(n *corev1.Node) bool {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
			return false
		}
	}
	return slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == corev1.TaintNodeOutOfService })
}

// AttachmentName is the name of the VolumeAttachment of a CSI volume to a node, as in Kubernetes: drivers' attachers and
// people look for it.
func AttachmentName(handle, driver, node string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(handle+driver+node)))
}

// ISCSIAttacher is the attacher of iSCSI volumes, which is the control plane: nothing is done for them but that nodes agree by
// their attachments who has a volume.
const ISCSIAttacher = "iscsi.keelson.dev"

// Attachable says by which attacher a volume is attached to nodes, and what it is called there; false for volumes that are not.
// Names of iSCSI targets that differ in case alone are of one target (RFC 3722).
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

// AttachedName is how the status of a Node names an attached volume, as in Kubernetes.
func AttachedName(driver, handle string) corev1.UniqueVolumeName {
	if driver == ISCSIAttacher {
		return corev1.UniqueVolumeName("kubernetes.io/iscsi/" + handle)
	}
	return corev1.UniqueVolumeName("kubernetes.io/csi/" + driver + "^" + handle)
}

// OfAttachedName is which volume AttachedName has named.
func OfAttachedName(name corev1.UniqueVolumeName) (driver, handle string, ok bool) {
	if handle, ok = strings.CutPrefix(string(name), "kubernetes.io/iscsi/"); ok {
		return ISCSIAttacher, handle, true
	}
	rest, ok := strings.CutPrefix(string(name), "kubernetes.io/csi/")
	if !ok {
		return "", "", false
	}
	return strings.Cut(rest, "^") // no driver's name has one
}

// AttachRequired says whether volumes of a driver are attached to nodes before these mount them. As documented it is so
// unless the driver's object says otherwise, and where none exists.
func AttachRequired(d *storagev1.CSIDriver) bool {
	return d == nil || d.Spec.AttachRequired == nil || *d.Spec.AttachRequired
}
