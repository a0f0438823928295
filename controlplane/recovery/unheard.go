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
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// A store that was restored, or recovered from one replica, may be older than what nodes have done by it: a volume that it has on
// one node may be mounted on another. So no node is told any more that it has one, each is marked as not heard, and drivers are
// asked again to attach: who has what is found out anew, and until all nodes are heard nobody gets a volume that one may have. Nor does
// it count any more that somebody has declared a node dead: it may have come back since, with volumes. Nodes may have joined since that are
// not in it: volumes for one node have the mark until those, too, have had time to say what they have, and volumes for one pod, which may be of no
// node at all, until it is known that no pod has them that is not in the store.

// unheard says what becomes of the Nodes, VolumeAttachments and PersistentVolumes of such a state.
func unheard(v *mvcc.View) ([]raftstore.Op, error) {
	nodes, err := amendEach(v, &v1.Node{}, func(n *v1.Node) bool { unheardNode(n); return true })
	attachments, bad := amendEach(v, &storagev1.VolumeAttachment{}, func(a *storagev1.VolumeAttachment) bool {
		a.Status.Attached, a.Status.AttachmentMetadata = false, nil
		return true
	})
	volumes, worse := amendEach(v, &v1.PersistentVolume{}, func(v *v1.PersistentVolume) bool {
		if _, _, ok := api.Attachable(v); !api.SinglePod(v) && (!ok || !api.SingleNode(v)) {
			return false
		}
		metav1.SetMetaDataAnnotation(&v.ObjectMeta, api.AnnotationUnheard, "")
		return true
	})
	if err := errors.Join(err, bad, worse); err != nil {
		return nil, fmt.Errorf("forgetting who has which volume: %w", err)
	}
	return slices.Concat(nodes, attachments, volumes), nil
}

func unheardNode(n *v1.Node) {
	n.Status.VolumesAttached = nil
	metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationUnheard, "")
	delete(n.Annotations, api.AnnotationVolumesHeld)
	delete(n.Annotations, api.AnnotationClaimsHeld)
	n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == v1.TaintNodeOutOfService })
}

// amendEach changes all objects of a type for which change says so, but those that cannot be read: nobody goes by them, and a store that has
// some (the alarm "unreadable" tells of them) is restored and recovered like any other.
func amendEach[T api.Object](v *mvcc.View, of T, change func(T) bool) (ops []raftstore.Op, err error) {
	form := registry.FormOf(kinds.All().ByType(of).Storage)
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
