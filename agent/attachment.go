package agent

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
)

// AttachedVolumes tells which of a node's volumes were attached to it.
type AttachedVolumes interface {
	// InUse lists those that are mounted or may be, or wait to be attached, as the node's status names them; and of these, in held, the ones
	// that do not only wait. The lists outlive the agent.
	InUse() (names, held []v1.UniqueVolumeName, err error)
	// Alone lists which claims pods have for themselves. It outlives the agent, too.
	Alone() ([]ClaimHeld, error)
	// Attached lists the pods that use such volumes.
	Attached() ([]types.UID, error)
	// UsesChanged has a value when what the others say may have changed.
	UsesChanged() <-chan struct{}
}

// ClaimHeld is a claim with access mode ReadWriteOncePod that a pod of the node has, or had, until its volumes are unmounted.
type ClaimHeld struct {
	Pod    types.UID `json:"pod"`
	Claim  types.UID `json:"claim"`
	Volume string    `json:"volume,omitempty"` // the PersistentVolume; "" where an agent of before did not note it
}

// ClaimsHeldAnnotation lists such claims in the facts of a node, in JSON; or it is AllHeld.
const ClaimsHeldAnnotation = "keelson.dev/claims-held"

// AllHeld is in the place of a list that would be too long: anything may be held.
const AllHeld = "all"

// TellsClaim says that the control plane knows, by the node's own object, that a pod has a claim for itself.
func TellsClaim(n *v1.Node, h ClaimHeld) bool {
	told := n.Annotations[ClaimsHeldAnnotation]
	var list []ClaimHeld
	return told == AllHeld || json.Unmarshal([]byte(told), &list) == nil && slices.Contains(list, h)
}

// AttachmentName is the name of the VolumeAttachment of a driver's volume to a node, as in Kubernetes.
func AttachmentName(handle, driver, node string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(handle+driver+node)))
}

// AttachmentTo finds what attaches a driver's volume to a node. Its name says so, as in Kubernetes: the PersistentVolume in it is the one
// by which a pod of the node first had the volume, and another one may show the same.
func AttachmentTo(all []*storagev1.VolumeAttachment, node, driver, handle string) (*storagev1.VolumeAttachment, bool) {
	name := AttachmentName(handle, driver, node)
	i := slices.IndexFunc(all, func(a *storagev1.VolumeAttachment) bool {
		return a.Name == name && a.Spec.NodeName == node && a.Spec.Attacher == driver
	})
	if i < 0 {
		return nil, false
	}
	return all[i], true
}

// ParseAttachedName returns the driver and the handle of a volume by the name that a Node's status has for it.
func ParseAttachedName(name v1.UniqueVolumeName) (driver, handle string, ok bool) {
	if handle, ok = strings.CutPrefix(string(name), "kubernetes.io/iscsi/"); ok {
		return "iscsi.keelson.dev", handle, true
	}
	rest, ok := strings.CutPrefix(string(name), "kubernetes.io/csi/")
	if !ok {
		return "", "", false
	}
	return strings.Cut(rest, "^") // no driver's name has a caret
}
