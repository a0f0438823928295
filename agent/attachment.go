package agent

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
)

// AttachedVolumes tells which of a node's volumes were attached to it.
type AttachedVolumes interface {
	// InUse lists those that are mounted or may be, as the node's status names them. The list outlives the agent.
	InUse() ([]v1.UniqueVolumeName, error)
	// Attached lists the pods that use such volumes.
	Attached() ([]types.UID, error)
	// UsesChanged has a value when what the others say may have changed.
	UsesChanged() <-chan struct{}
}

// AttachmentTo finds what attaches a PersistentVolume to a node by a driver, as the driver's attacher names both.
func AttachmentTo(all []*storagev1.VolumeAttachment, node, driver, volume string) (*storagev1.VolumeAttachment, bool) {
	i := slices.IndexFunc(all, func(a *storagev1.VolumeAttachment) bool {
		source := a.Spec.Source.PersistentVolumeName
		return a.Spec.NodeName == node && a.Spec.Attacher == driver && source != nil && *source == volume
	})
	if i < 0 {
		return nil, false
	}
	return all[i], true
}
