package volumeprovision

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	snap "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/volume"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// origin is the snapshot or volume from which the driver fills the new volume of a claim. Both
// handles are "" if the new volume is empty.
type origin struct {
	snapshot, volume string
	from             *corev1.VolumeNodeAffinity // nodes that can reach the source; nil means every node
}

// isReachableFrom reports whether node n can reach the snapshot or volume o.
func (o origin) isReachableFrom(n *corev1.Node) bool {
	v := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{NodeAffinity: o.from}}
	return volume.CheckNodeAffinity(v, n.Labels) == nil
}

// isPopulatedExternally reports whether a volume populator must fill the volume of claim c: the
// claim's data source is neither a VolumeSnapshot nor a PersistentVolumeClaim.
func isPopulatedExternally(c *corev1.PersistentVolumeClaim) bool {
	from, ref := c.Spec.DataSource, c.Spec.DataSourceRef
	if from == nil {
		return ref != nil
	}
	group := ptr.Deref(from.APIGroup, "")
	return !(group == snap.GroupName && from.Kind == "VolumeSnapshot" ||
		group == "" && from.Kind == "PersistentVolumeClaim")
}

// findOrigin returns the snapshot or volume that claim c names as its data source. It returns an
// error if that source cannot be used with the claim and its class.
func (p *provisioner) findOrigin(ctx context.Context, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) (
	origin, error,
) {
	switch from := c.Spec.DataSource; {
	case from == nil:
		return origin{}, nil
	case from.Kind == "VolumeSnapshot":
		return p.ofSnapshot(ctx, c, class, from.Name)
	default:
		return p.ofClaim(ctx, c, class, from.Name)
	}
}

func (p *provisioner) ofSnapshot(
	ctx context.Context, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, name string,
) (o origin, err error) {
	snapshots, contents := engine.FindSnapshotKind(p.term.Client, "VolumeSnapshot"),
		engine.FindSnapshotKind(p.term.Client, "VolumeSnapshotContent")
	if snapshots == nil || contents == nil {
		return o, errors.New("the cluster does not serve VolumeSnapshots: run 'kctl snapshot install'")
	}
	s, err := engine.GetTyped[snap.VolumeSnapshot](ctx, p.term.Client, snapshots, c.Namespace, name)
	switch {
	case err != nil:
		return o, fmt.Errorf("VolumeSnapshot %s cannot be read: %w", name, err)
	case s.Typed.DeletionTimestamp != nil:
		return o, fmt.Errorf("VolumeSnapshot %s is being deleted", name)
	case !engine.IsSnapshotReady(s.Typed):
		return o, fmt.Errorf("VolumeSnapshot %s is not ready to use", name)
	}
	content, err := engine.GetTyped[snap.VolumeSnapshotContent](ctx, p.term.Client, contents, "",
		*s.Typed.Status.BoundVolumeSnapshotContentName)
	if err != nil {
		return o, fmt.Errorf("the content of VolumeSnapshot %s cannot be read: %w", name, err)
	}
	t := content.Typed
	switch {
	case t.Spec.VolumeSnapshotRef.UID != s.Typed.UID || t.Status == nil || t.Status.SnapshotHandle == nil:
		return o, fmt.Errorf("VolumeSnapshotContent %s does not belong to VolumeSnapshot %s", t.Name, name)
	case t.Spec.Driver != class.Provisioner:
		return o,
			fmt.Errorf("VolumeSnapshot %s belongs to CSI driver %s, and StorageClass %s to %s: use a class of that "+
				"driver", name, t.Spec.Driver, class.Name, class.Provisioner)
	case t.Spec.SourceVolumeMode != nil && *t.Spec.SourceVolumeMode != modeOf(c) &&
		t.Annotations["snapshot.storage.kubernetes.io/allow-volume-mode-change"] != "true":
		return o, fmt.Errorf("VolumeSnapshot %s was taken of a volume with mode %s, and the claim requests %s", name,
			*t.Spec.SourceVolumeMode, modeOf(c))
	}
	if err := checkSize(c, "VolumeSnapshot "+name, s.Typed.Status.RestoreSize); err != nil {
		return o, err
	}
	o.snapshot = *t.Status.SnapshotHandle
	o.from, err = engine.ReachableNodeAffinity(content.Object)
	return o, err
}

func (p *provisioner) ofClaim(
	ctx context.Context, c *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, name string,
) (o origin, err error) {
	from, err := client.Get[*corev1.PersistentVolumeClaim](ctx, p.term.Client, c.Namespace, name)
	switch {
	case err != nil:
		return o, fmt.Errorf("PersistentVolumeClaim %s cannot be read: %w", name, err)
	case from.DeletionTimestamp != nil:
		return o, fmt.Errorf("PersistentVolumeClaim %s is being deleted", name)
	case from.Status.Phase != corev1.ClaimBound:
		return o, fmt.Errorf("PersistentVolumeClaim %s, the source of the clone, is not bound to a volume yet", name)
	case modeOf(from) != modeOf(c):
		return o, fmt.Errorf("PersistentVolumeClaim %s has volume mode %s, and the claim requests %s", name,
			modeOf(from), modeOf(c))
	}
	v, err := client.Get[*corev1.PersistentVolume](ctx, p.term.Client, "", from.Spec.VolumeName)
	switch {
	case err != nil:
		return o, fmt.Errorf("PersistentVolume %s of claim %s cannot be read: %w", from.Spec.VolumeName, name, err)
	case v.Spec.CSI == nil || v.Spec.CSI.Driver != class.Provisioner:
		return o,
			fmt.Errorf("the volume of claim %s does not belong to CSI driver %s: use a StorageClass of this driver",
				name, class.Provisioner)
	}
	size := v.Spec.Capacity[corev1.ResourceStorage]
	return origin{volume: v.Spec.CSI.VolumeHandle, from: v.Spec.NodeAffinity},
		checkSize(c, "PersistentVolumeClaim "+name, &size)
}

// checkSize returns an error if claim c requests less than size, the size of its data source.
// sourceName is the name of the data source in the error.
func checkSize(c *corev1.PersistentVolumeClaim, sourceName string, size *resource.Quantity) error {
	if want := c.Spec.Resources.Requests[corev1.ResourceStorage]; size != nil && want.Cmp(*size) < 0 {
		return fmt.Errorf("the claim requests %s, and %s has %s: request at least this size", want.String(),
			sourceName, size.String())
	}
	return nil
}

func modeOf(c *corev1.PersistentVolumeClaim) corev1.PersistentVolumeMode {
	if c.Spec.VolumeMode != nil {
		return *c.Spec.VolumeMode
	}
	return corev1.PersistentVolumeFilesystem
}

// recordReachableNodes writes the nodes that can reach data source o to an annotation of claim c,
// from which the scheduler reads them. done reports that no write was necessary.
func (p *provisioner) recordReachableNodes(
	ctx context.Context, c *corev1.PersistentVolumeClaim, o origin,
) (done bool, err error) {
	if o.from == nil {
		return true, nil
	}
	text, err := json.Marshal(o.from)
	if err != nil || c.Annotations[engine.ReachedFromAnnotation] == string(text) {
		return true, err
	}
	next := c.DeepCopy()
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, engine.ReachedFromAnnotation, string(text))
	return false, p.updateClaim(ctx, next)
}
