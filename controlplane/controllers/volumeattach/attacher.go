package volumeattach

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/storage/volume"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

const (
	// finalizer keeps a VolumeAttachment that the control plane serves. It is added before the
	// first ControllerPublishVolume call and removed when the driver has unpublished the volume.
	finalizer = "keelson.dev/attached"
	// foreign is the prefix of the finalizers that an external attacher (a CSI sidecar) adds.
	foreign = "external-attacher/"
	// publishedAnnotation holds the parameters of the ControllerPublishVolume call.
	// ControllerUnpublishVolume uses the same parameters, even if the volume or the node has
	// changed or been deleted since.
	publishedAnnotation = "keelson.dev/published"
	// mostNodes is the maximum number of nodes that are tried for one call of a driver's Controller
	// service.
	mostNodes = 8
)

// publishRecord is the content of publishedAnnotation. Fields may be added; unknown fields are
// ignored.
type publishRecord struct {
	Handle string                  `json:"handle"`
	NodeID string                  `json:"nodeID"`
	Secret *corev1.SecretReference `json:"secret,omitempty"`
}

// attachmentTask is the next action of the control plane for a VolumeAttachment that it serves.
type attachmentTask int

const (
	noTask       attachmentTask = iota
	recordIntent                // store the parameters of the publish call in the attachment
	publishTask
	unpublishTask
	attacherClash // an external attacher of the driver is active too
)

// attachmentDuty returns the next action for a VolumeAttachment. served reports whether the control
// plane is the attacher of the attachment's driver.
func attachmentDuty(a *storagev1.VolumeAttachment, served bool) attachmentTask {
	held := slices.Contains(a.Finalizers, finalizer)
	others := slices.ContainsFunc(a.Finalizers, func(f string) bool { return strings.HasPrefix(f, foreign) })
	switch {
	case a.DeletionTimestamp != nil && held:
		return unpublishTask // even if the driver now has another attacher: the control plane published the volume
	case a.DeletionTimestamp != nil || !served:
		return noTask
	case others && !held:
		return attacherClash
	case a.Status.Attached:
		return noTask
	case !held:
		return recordIntent
	}
	return publishTask
}

// serveAttachment performs the next action for the VolumeAttachment of this name if the control
// plane is its attacher. again is the delay until the next attempt if nothing changes; 0 means
// never.
func (r *reconciler) serveAttachment(ctx context.Context, name string) (again time.Duration, err error) {
	a, ok := r.attachments.Get("", name)
	switch {
	case ok && a.Spec.Attacher == api.ISCSIAttacher:
		return 0, r.markAttached(ctx, a)
	case !ok || r.calls == nil:
		return 0, nil
	}
	d, _ := engine.Cached[*storagev1.CSIDriver](r.informers.drivers, "", a.Spec.Attacher)
	switch attachmentDuty(a, engine.IsServedByAgent(d)) {
	case recordIntent:
		return 0, r.recordPublishIntent(ctx, a)
	case publishTask:
		for _, k := range r.informers.ofAttachment(a) {
			if r.volumeState(k.Namespace, k.Name).possibleHolder(a.Spec.NodeName, &Step{}) != "" {
				// recordEvents reports the reason to the pods
				return reportRetryDelay, nil
			}
		}
		return 0, r.publishVolume(ctx, a)
	case unpublishTask:
		n, _ := engine.Cached[*corev1.Node](r.informers.nodes, "", a.Spec.NodeName)
		if h := r.silences.assessNode(a.Spec.NodeName, n, r.term.Now()); n != nil && api.IsUnconfirmed(n) && !h.Fenced {
			return reportRetryDelay, nil // the node has not reported yet whether it uses the volume
		}
		return 0, r.unpublishVolume(ctx, a)
	case attacherClash:
		r.term.Events.Event(a, corev1.EventTypeWarning, "FailedAttachVolume",
			fmt.Sprintf("CSI driver %s has its own attacher, and annotation %s of its CSIDriver declares "+
				"the cluster as the attacher: remove the annotation", a.Spec.Attacher, engine.ServedByAnnotation))
	}
	return 0, nil
}

// markAttached sets status.attached of an attachment of an iSCSI volume. No driver needs to be
// called for such a volume.
func (r *reconciler) markAttached(ctx context.Context, a *storagev1.VolumeAttachment) error {
	if a.Status.Attached || a.DeletionTimestamp != nil {
		return nil
	}
	next := a.DeepCopy()
	next.Status = storagev1.VolumeAttachmentStatus{Attached: true}
	return r.recordAttachment(client.UpdateStatus(ctx, r.term.Client, next))
}

// recordPublishIntent adds the finalizer to an attachment and stores the parameters of its
// ControllerPublishVolume call there. This happens before the driver is called.
func (r *reconciler) recordPublishIntent(ctx context.Context, a *storagev1.VolumeAttachment) error {
	v, ok := engine.Cached[*corev1.PersistentVolume](r.informers.volumes, "", volumeOf(a))
	if !ok || v.Spec.CSI == nil || v.Spec.CSI.Driver != a.Spec.Attacher {
		return r.recordFailure(ctx, a,
			fmt.Errorf("persistentvolume %q does not exist, or does not belong to CSI driver %s", volumeOf(a),
				a.Spec.Attacher))
	}
	has, _ := engine.Cached[*storagev1.CSINode](r.informers.csiNodes, "", a.Spec.NodeName)
	d := engine.FindNodeDriver(has, a.Spec.Attacher)
	if d == nil {
		return r.recordFailure(ctx, a,
			fmt.Errorf("node %s has no CSI driver %s: a driver registers by a socket in its kubelet folder's "+
				"plugins_registry", a.Spec.NodeName, a.Spec.Attacher))
	}
	note, err := json.Marshal(publishRecord{Handle: v.Spec.CSI.VolumeHandle, NodeID: d.NodeID,
		Secret: v.Spec.CSI.ControllerPublishSecretRef})
	if err != nil {
		return err
	}
	next := a.DeepCopy()
	metav1.SetMetaDataAnnotation(&next.ObjectMeta, publishedAnnotation, string(note))
	next.Finalizers = append(next.Finalizers, finalizer)
	return r.recordAttachment(client.Update(ctx, r.term.Client, next))
}

// recordAttachment records an attachment that was just written in the controller's view and queues
// the keys that depend on it. If err is not nil, it returns err and does nothing else.
func (r *reconciler) recordAttachment(a *storagev1.VolumeAttachment, err error) error {
	if err != nil {
		return err
	}
	r.attachments.RecordWrite(a)
	r.term.Enqueue(engine.Key{Kind: attachmentKey, Name: a.Name})
	for _, k := range r.informers.ofAttachment(a) {
		r.term.Enqueue(k)
	}
	return nil
}

// recordedPublish returns the parameters of the ControllerPublishVolume call that attachment a
// stores, and the data of the Secret that these parameters name.
func (r *reconciler) recordedPublish(ctx context.Context, a *storagev1.VolumeAttachment) (
	publishRecord, map[string]string, error,
) {
	var p publishRecord
	if err := json.Unmarshal([]byte(a.Annotations[publishedAnnotation]), &p); err != nil {
		return p, nil, fmt.Errorf("annotation %s of VolumeAttachment %s: %w", publishedAnnotation, a.Name, err)
	}
	out, err := engine.ReadDriverSecret(ctx, r.term.Client, p.Secret)
	if err != nil {
		return p, nil, fmt.Errorf("controllerPublishSecretRef of the volume: %v", err)
	}
	return p, out, nil
}

// publishVolume calls ControllerPublishVolume and marks the attachment as attached.
func (r *reconciler) publishVolume(ctx context.Context, a *storagev1.VolumeAttachment) error {
	v, ok := engine.Cached[*corev1.PersistentVolume](r.informers.volumes, "", volumeOf(a))
	if !ok || v.Spec.CSI == nil {
		return nil // the attachment will be deleted too
	}
	p, secrets, err := r.recordedPublish(ctx, a)
	if err != nil {
		return r.recordFailure(ctx, a, err)
	}
	var res *csi.ControllerPublishVolumeResponse
	err = r.callController(a, func(driver csi.ControllerClient) error {
		can, err := controllerCapabilities(ctx, driver)
		if err != nil {
			return err
		}
		if !hasCapability(can, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME) {
			res = &csi.ControllerPublishVolumeResponse{} // the driver has no publish step
			return nil
		}
		readonly := v.Spec.CSI.ReadOnly && hasCapability(can, csi.ControllerServiceCapability_RPC_PUBLISH_READONLY)
		res, err = driver.ControllerPublishVolume(ctx,
			&csi.ControllerPublishVolumeRequest{VolumeId: p.Handle, NodeId: p.NodeID, Readonly: readonly,
				Secrets: secrets, VolumeContext: v.Spec.CSI.VolumeAttributes,
				VolumeCapability: volumeCapability(v, can)})
		return err
	})
	if err != nil {
		return r.recordFailure(ctx, a, err)
	}
	next := a.DeepCopy()
	next.Status = storagev1.VolumeAttachmentStatus{Attached: true, AttachmentMetadata: res.GetPublishContext()}
	return r.recordAttachment(client.UpdateStatus(ctx, r.term.Client, next))
}

// unpublishVolume calls ControllerUnpublishVolume and removes the finalizer of the attachment.
func (r *reconciler) unpublishVolume(ctx context.Context, a *storagev1.VolumeAttachment) error {
	p, secrets, err := r.recordedPublish(ctx, a)
	if err != nil {
		return r.recordFailure(ctx, a, err)
	}
	err = r.callController(a, func(driver csi.ControllerClient) error {
		can, err := controllerCapabilities(ctx, driver)
		if err != nil || !hasCapability(can, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME) {
			return err
		}
		_, err = driver.ControllerUnpublishVolume(ctx,
			&csi.ControllerUnpublishVolumeRequest{VolumeId: p.Handle, NodeId: p.NodeID, Secrets: secrets})
		if status.Code(err) == codes.NotFound { // the volume or the node no longer exists
			return nil
		}
		return err
	})
	if err != nil {
		return r.recordFailure(ctx, a, err)
	}
	next := a.DeepCopy()
	next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == finalizer })
	return r.recordAttachment(client.Update(ctx, r.term.Client, next))
}

// recordFailure writes an error to the attachment's status and returns the error.
func (r *reconciler) recordFailure(ctx context.Context, a *storagev1.VolumeAttachment, err error) error {
	words := engine.DriverErrorText(err)
	next := a.DeepCopy()
	said := &storagev1.VolumeError{Time: metav1.NewTime(r.term.Now()), Message: words}
	was := &next.Status.AttachError
	if a.DeletionTimestamp != nil {
		was = &next.Status.DetachError
	}
	if *was == nil || (*was).Message != words {
		*was = said
		next, wrong := client.UpdateStatus(ctx, r.term.Client, next)
		if wrong != nil {
			return errors.Join(err, wrong)
		}
		r.attachments.RecordWrite(next)
		for _, k := range r.informers.ofAttachment(a) {
			r.term.Enqueue(k)
		}
	}
	return fmt.Errorf("volume %s on node %s: %w", volumeOf(a), a.Spec.NodeName, err)
}

// callController calls the Controller service of the attachment's driver through the agent of a
// node. It tries the next node only if a node has no such driver; any other error is returned.
func (r *reconciler) callController(a *storagev1.VolumeAttachment, call func(csi.ControllerClient) error) error {
	nodes := r.controllerNodes(a)
	if len(nodes) == 0 {
		return fmt.Errorf("no node of the cluster is ready and has CSI driver %s (kubectl get csinodes -o yaml lists "+
			"the registered drivers)", a.Spec.Attacher)
	}
	var err error
	for _, node := range nodes[:min(len(nodes), mostNodes)] {
		err = call(engine.DriverController(r.calls, node, a.Spec.Attacher))
		if err == nil {
			return nil
		}
		err = fmt.Errorf("node %s: %w", node, err)
		var missing *api.DriverMissing
		if !errors.As(err, &missing) {
			break // the next attempt starts again with the first node
		}
	}
	return err
}

// controllerNodes returns the ready nodes that have the attachment's driver. The node of the
// attachment comes first, then nodes that reach the volume, then other nodes.
func (r *reconciler) controllerNodes(a *storagev1.VolumeAttachment) []string {
	v, _ := engine.Cached[*corev1.PersistentVolume](r.informers.volumes, "", volumeOf(a))
	rank := func(n *corev1.Node) int {
		switch {
		case n.Name == a.Spec.NodeName:
			return 0
		case v != nil && volume.CheckNodeAffinity(v, n.Labels) == nil:
			return 1
		}
		return 2
	}
	var found []*corev1.Node
	for _, n := range engine.CachedAll[*corev1.Node](r.informers.nodes) {
		has, _ := engine.Cached[*storagev1.CSINode](r.informers.csiNodes, "", n.Name)
		if api.IsNodeReady(n) && engine.FindNodeDriver(has, a.Spec.Attacher) != nil {
			found = append(found, n)
		}
	}
	slices.SortFunc(found, func(a, b *corev1.Node) int {
		return cmp.Or(rank(a)-rank(b), strings.Compare(a.Name, b.Name))
	})
	out := make([]string, len(found))
	for i, n := range found {
		out[i] = n.Name
	}
	return out
}

// controllerCapabilities returns the capabilities of a driver's Controller service. They are empty
// for a driver without this service.
func controllerCapabilities(ctx context.Context, driver csi.ControllerClient) (
	*csi.ControllerGetCapabilitiesResponse, error,
) {
	can, err := driver.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if status.Code(err) == codes.Unimplemented {
		return &csi.ControllerGetCapabilitiesResponse{}, nil
	}
	return can, err
}

func hasCapability(c *csi.ControllerGetCapabilitiesResponse, t csi.ControllerServiceCapability_RPC_Type) bool {
	return slices.ContainsFunc(c.GetCapabilities(), func(x *csi.ControllerServiceCapability) bool {
		return x.GetRpc().GetType() == t
	})
}

// volumeCapability returns the CSI capability for the access modes and volume mode of a volume.
func volumeCapability(v *corev1.PersistentVolume, can *csi.ControllerGetCapabilitiesResponse) *csi.VolumeCapability {
	mode := csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER
	has := func(m corev1.PersistentVolumeAccessMode) bool { return slices.Contains(v.Spec.AccessModes, m) }
	tells := hasCapability(can, csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER)
	switch {
	case has(corev1.ReadWriteMany):
		mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	case has(corev1.ReadOnlyMany) && has(corev1.ReadWriteOnce):
		mode = csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER
	case has(corev1.ReadOnlyMany):
		mode = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	case has(corev1.ReadWriteOncePod) && tells:
		mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	case tells:
		mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	}
	out := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if v.Spec.VolumeMode != nil && *v.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		out.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		out.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.Spec.CSI.FSType,
			MountFlags: v.Spec.MountOptions}}
	}
	return out
}
