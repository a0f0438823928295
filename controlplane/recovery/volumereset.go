package recovery

import (
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// A restored or recovered store may not contain the latest actions of nodes: a volume that is
// attached to one node in the store may be mounted on another. All attached volumes are therefore
// removed from the status of Nodes, all Nodes are marked with api.AnnotationUnconfirmed, and
// drivers are called again to attach volumes. Until all nodes have reported their volumes, no pod
// gets a volume that another node may have mounted.
//
// If an operator has declared a node as out of service, this taint is removed, because the node may
// have come back since, with volumes. Nodes that are missing in the store may have joined. Volumes
// with access from a single node are therefore marked too, until such nodes have had time to
// report. Volumes with access from a single pod are marked until it is certain that no pod outside
// the store uses them.

// volumeResetOps returns the operations that mark all volumes in v, a restored or recovered state,
// as not attached. Nodes may use volumes that v does not list as attached. The operations therefore
// also add api.AnnotationUnconfirmed to all Nodes, and to PersistentVolumes that only one node or
// one pod may use. Until the nodes have reported the volumes that they use, no other node gets such
// a PersistentVolume.
func volumeResetOps(v *mvcc.View) ([]raftstore.Op, error) {
	nodes, err := rewriteOps(v, &v1.Node{}, func(n *v1.Node) bool { resetNodeVolumes(n); return true })
	attachments, attachErr := rewriteOps(v, &storagev1.VolumeAttachment{}, func(a *storagev1.VolumeAttachment) bool {
		a.Status.Attached, a.Status.AttachmentMetadata = false, nil
		return true
	})
	volumes, volumeErr := rewriteOps(v, &v1.PersistentVolume{}, func(v *v1.PersistentVolume) bool {
		if _, _, ok := api.VolumeAttacher(v); !api.IsSinglePod(v) && (!ok || !api.IsSingleNode(v)) {
			return false
		}
		metav1.SetMetaDataAnnotation(&v.ObjectMeta, api.AnnotationUnconfirmed, "")
		return true
	})
	if err := errors.Join(err, attachErr, volumeErr); err != nil {
		return nil, fmt.Errorf("resetting the attached volumes: %w", err)
	}
	return slices.Concat(nodes, attachments, volumes), nil
}

func resetNodeVolumes(n *v1.Node) {
	n.Status.VolumesAttached = nil
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationUnconfirmed, "")
	delete(n.Annotations, api.AnnotationVolumesHeld)
	delete(n.Annotations, api.AnnotationClaimsHeld)
	n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == v1.TaintNodeOutOfService })
}

// rewriteOps calls change for all objects in v with the type of example. It returns operations that
// rewrite the objects for which change returns true. It skips objects that cannot be decoded,
// because no component uses them. A store with such objects (see the alarm "unreadable") can
// therefore be restored and recovered like any other store.
func rewriteOps[T api.Object](v *mvcc.View, example T, change func(T) bool) (ops []raftstore.Op, err error) {
	form := storedform.NewForm(kinds.All().ByType(example).Storage)
	for o := (raftstore.ListOptions{Limit: 1000}); ; {
		page, err := v.List(form.Key("", ""), o)
		if err != nil {
			return nil, err
		}
		for _, it := range page.Items {
			o.After = it.Key
			obj, err := form.Decode(it)
			typed, ok := obj.(T)
			if err != nil || !ok || !change(typed) {
				continue
			}
			value, err := form.Rewrite(typed)
			if err != nil {
				return nil, fmt.Errorf("writing %s: %w", it.Key, err)
			}
			ops = append(ops, raftstore.Put(it.Key, value))
		}
		if !page.More {
			return ops, nil
		}
	}
}
