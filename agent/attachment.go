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

// AttachedVolumes reports which attachable volumes and which exclusive claims the pods of this node
// use.
type AttachedVolumes interface {
	// VolumesInUse returns the names, as in Node.status.volumesInUse, of the volumes that may be
	// mounted or are waiting for their attachment. held is the subset that may be mounted. Both
	// lists are stored on disk and survive a restart of the agent.
	VolumesInUse() (names, held []v1.UniqueVolumeName, err error)
	// ExclusiveClaims lists the ReadWriteOncePod claims that pods of this node hold. The list is
	// stored on disk and survives a restart of the agent.
	ExclusiveClaims() ([]HeldClaim, error)
	// PodsWithAttachedVolumes lists the pods that use attachable volumes.
	PodsWithAttachedVolumes() ([]types.UID, error)
	// UsesChanged returns a channel that is signaled when the result of another method may have
	// changed.
	UsesChanged() <-chan struct{}
}

// HeldClaim is a ReadWriteOncePod claim that a pod of the node holds. The pod holds the claim until
// its volumes are unmounted.
type HeldClaim struct {
	Pod    types.UID `json:"pod"`
	Claim  types.UID `json:"claim"`
	Volume string    `json:"volume,omitempty"` // name of the PersistentVolume; "" if an earlier agent did not record it
}

// ClaimsHeldAnnotation is an annotation of the Node. It lists the node's HeldClaims in JSON, or has
// the value AllClaimsHeld.
const ClaimsHeldAnnotation = "keelson.dev/claims-held"

// AllClaimsHeld is the value of ClaimsHeldAnnotation if the list of claims is too long. The node
// may then hold any claim.
const AllClaimsHeld = "all"

// NodeReportsClaim reports whether the node may hold the claim: its ClaimsHeldAnnotation lists the
// claim or has the value AllClaimsHeld.
func NodeReportsClaim(node *v1.Node, claim HeldClaim) bool {
	reported := node.Annotations[ClaimsHeldAnnotation]
	var list []HeldClaim
	return reported == AllClaimsHeld || json.Unmarshal([]byte(reported), &list) == nil && slices.Contains(list, claim)
}

// AttachmentName returns the name of the VolumeAttachment of a driver's volume to a node, as in
// Kubernetes.
func AttachmentName(handle, driver, node string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(handle+driver+node)))
}

// FindAttachment returns the VolumeAttachment that attaches a driver's volume to a node, or false
// if attachments does not contain it. handle is the volume handle. Like Kubernetes, it compares the
// name, the node and the driver, but not the source: the source names the PersistentVolume that was
// attached first, and another PersistentVolume may have the same handle.
func FindAttachment(attachments []*storagev1.VolumeAttachment, node, driver, handle string) (
	*storagev1.VolumeAttachment, bool,
) {
	name := AttachmentName(handle, driver, node)
	i := slices.IndexFunc(attachments, func(a *storagev1.VolumeAttachment) bool {
		return a.Name == name && a.Spec.NodeName == node && a.Spec.Attacher == driver
	})
	if i < 0 {
		return nil, false
	}
	return attachments[i], true
}

// ParseAttachedName returns the attacher and the handle of a volume from its name in a Node's
// status. ok is false if the name is not that of a CSI or iSCSI volume.
func ParseAttachedName(name v1.UniqueVolumeName) (driver, handle string, ok bool) {
	if handle, ok = strings.CutPrefix(string(name), "kubernetes.io/iscsi/"); ok {
		return "iscsi.keelson.dev", handle, true
	}
	rest, ok := strings.CutPrefix(string(name), "kubernetes.io/csi/")
	if !ok {
		return "", "", false
	}
	return strings.Cut(rest, "^") // driver names contain no caret
}
