package server

import (
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/mvcc"
)

// A store that was restored, or recovered from one replica, may be older than what nodes have done by it: a volume that it has on
// one node may be mounted on another. So no node is told any more that it has one, each is marked as not heard, and drivers are
// asked again to attach: who has what is found out anew, and until all nodes are heard nobody gets a volume that one may have. Nor does
// it count any more that somebody has declared a node dead: it may have come back since, with volumes.

// unheard says what becomes of the Nodes and VolumeAttachments of such a state.
func unheard(v *mvcc.View) ([]raftstore.Op, error) {
	nodes, err := amendEach(v, &v1.Node{}, func(n *v1.Node) {
		n.Status.VolumesAttached = nil
		if n.Annotations == nil {
			n.Annotations = map[string]string{}
		}
		n.Annotations[api.AnnotationUnheard] = ""
		delete(n.Annotations, api.AnnotationVolumesHeld)
		n.Spec.Taints = slices.DeleteFunc(n.Spec.Taints, func(t v1.Taint) bool { return t.Key == v1.TaintNodeOutOfService })
	})
	attachments, bad := amendEach(v, &storagev1.VolumeAttachment{}, func(a *storagev1.VolumeAttachment) {
		a.Status.Attached, a.Status.AttachmentMetadata = false, nil
	})
	if err := errors.Join(err, bad); err != nil {
		return nil, fmt.Errorf("forgetting who has which volume: %w", err)
	}
	return append(nodes, attachments...), nil
}

// amendEach changes all objects of a type but those that cannot be read: nobody goes by them, and a store that has some (the alarm
// "unreadable" tells of them) is restored and recovered like any other.
func amendEach[T api.Object](v *mvcc.View, of T, change func(T)) (ops []raftstore.Op, err error) {
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
			if err != nil || !ok {
				continue
			}
			change(typed)
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
