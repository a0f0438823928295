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
	// mounted or are waiting for their attachment. held is the subset that may be mounted. The
	// lists outlive the agent.
	VolumesInUse() (names, held []v1.UniqueVolumeName, err error)
	// ExclusiveClaims lists the ReadWriteOncePod claims that pods of this node hold. The list
	// outlives the agent.
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

// NodeReportsClaim reports whether the annotations of the Node n list the claim h, or state that
// the node may hold any claim.
func NodeReportsClaim(n *v1.Node, h HeldClaim) bool {
	told := n.Annotations[ClaimsHeldAnnotation]
	var list []HeldClaim
	return told == AllClaimsHeld || json.Unmarshal([]byte(told), &list) == nil && slices.Contains(list, h)
}

// AttachmentName returns the name of the VolumeAttachment of a driver's volume to a node, as in
// Kubernetes.
func AttachmentName(handle, driver, node string) string {
	return fmt.Sprintf("csi-%x", sha256.Sum256([]byte(handle+driver+node)))
}

// FindAttachment returns the VolumeAttachment in all of a driver's volume to a node, or false. Like
// Kubernetes, it finds the VolumeAttachment by its name only. The source is not compared: it names
// the PersistentVolume that was attached first, and another PersistentVolume may have the same
// handle.
func FindAttachment(all []*storagev1.VolumeAttachment, node, driver, handle string) (*storagev1.VolumeAttachment, bool) {
	name := AttachmentName(handle, driver, node)
	i := slices.IndexFunc(all, func(a *storagev1.VolumeAttachment) bool {
		return a.Name == name && a.Spec.NodeName == node && a.Spec.Attacher == driver
	})
	if i < 0 {
		return nil, false
	}
	return all[i], true
}

// ParseAttachedName returns the driver and the handle of a volume from its name in a Node's status.
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
