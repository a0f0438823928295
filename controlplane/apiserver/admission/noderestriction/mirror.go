package noderestriction

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// CheckMirrorPods returns a plugin that rejects mirror pods with references to other objects. A
// node could otherwise read any object: it creates its mirror pods and may read what its pods
// reference. The only allowed owner is the pod's node.
func CheckMirrorPods(c admission.Cluster) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if !a.IsCoreResource("pods") || !a.CreatesObject() && a.Facet != "ephemeralcontainers" {
			return nil
		}
		pod, ok := a.Whole.(*corev1.Pod)
		if !ok || !podref.IsMirror(pod) {
			return nil
		}
		for ref := range podref.References(pod) {
			return admission.NewForbidden(a, pod, fmt.Errorf(
				"a mirror pod must not refer to other objects: %s refers to %s; remove it, or create an "+
					"ordinary pod instead",
				ref.Field(), ref.Resource))
		}
		for i := range pod.OwnerReferences {
			if !ownedByNode(ctx, c, pod, &pod.OwnerReferences[i]) {
				return admission.NewForbidden(a, pod, fmt.Errorf(
					"a mirror pod may be owned only by its node: metadata.ownerReferences[%d] names %s %q; remove it, "+
						"or name node %q with its uid",
					i, pod.OwnerReferences[i].Kind, pod.OwnerReferences[i].Name, pod.Spec.NodeName))
			}
		}
		return nil
	}
}

// ownedByNode reports whether the reference is a controller reference to the pod's node, with the
// node's current UID.
func ownedByNode(ctx context.Context, c admission.Cluster, pod *corev1.Pod, ref *metav1.OwnerReference) bool {
	if ref.APIVersion != "v1" || ref.Kind != "Node" || ref.Name != pod.Spec.NodeName {
		return false
	}
	if ref.Controller == nil || !*ref.Controller || ref.BlockOwnerDeletion != nil && *ref.BlockOwnerDeletion {
		return false
	}
	node, ok := c.Get(ctx, "nodes", "", ref.Name)
	return ok && node.GetUID() == ref.UID
}
