package admission

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
)

// nodeRestriction holds agents to their own node in what they write: the names
// in the objects that the authorizer could not see.
func nodeRestriction(c Config) func(ctx context.Context, r *api.Request, obj, old api.Object) error {
	return func(ctx context.Context, r *api.Request, obj, old api.Object) error {
		node, ok := c.NodeOf(r.User)
		if !ok {
			return nil
		}
		switch r.Kind.GVK.Group + "/" + r.Kind.Resource {
		case "/pods":
			return restrictPod(r, node, obj, old)
		case "/nodes":
			return restrictNode(r, node, obj, old)
		case "/serviceaccounts":
			if r.Subresource == "token" {
				return restrictToken(ctx, c.Cluster, r, node)
			}
		case "coordination.k8s.io/leases", "storage.k8s.io/csinodes":
			if obj != nil && obj.GetName() != node {
				return forbid(r, obj, fmt.Errorf("can only access %s with the same name as the requesting node", r.Kind.Resource))
			}
		}
		return nil
	}
}

func restrictPod(r *api.Request, node string, obj, old api.Object) error {
	switch {
	case obj == nil: // delete
		if pod := old.(*corev1.Pod); pod.Spec.NodeName != node {
			return forbid(r, old, fmt.Errorf("node %q can only delete pods with spec.nodeName set to itself", node))
		}
	case old == nil:
		return mirrorOf(r, node, obj.(*corev1.Pod))
	case r.Subresource == "status":
		pod, before := obj.(*corev1.Pod), old.(*corev1.Pod)
		if before.Spec.NodeName != node {
			return forbid(r, obj, fmt.Errorf("node %q can only update pod status for pods with spec.nodeName set to itself", node))
		}
		if !maps.Equal(pod.Labels, before.Labels) {
			return forbid(r, obj, fmt.Errorf("node %q cannot update labels through pod status", node))
		}
	}
	return nil
}

// mirrorOf admits the shadow of a static pod of this node and no other pod.
func mirrorOf(r *api.Request, node string, pod *corev1.Pod) error {
	if !podref.IsMirror(pod) {
		return forbid(r, pod, fmt.Errorf("pod does not have %q annotation, node %q can only create mirror pods", corev1.MirrorPodAnnotationKey, node))
	}
	if pod.Spec.NodeName != node {
		return forbid(r, pod, fmt.Errorf("node %q can only create pods with spec.nodeName set to itself", node))
	}
	return nil
}

// ownLabels are those of kubernetes.io and k8s.io that an agent may set on its node.
var ownLabels = []string{
	corev1.LabelHostname, corev1.LabelTopologyZone, corev1.LabelTopologyRegion,
	corev1.LabelFailureDomainBetaZone, corev1.LabelFailureDomainBetaRegion,
	corev1.LabelInstanceType, corev1.LabelInstanceTypeStable,
	corev1.LabelOSStable, corev1.LabelArchStable, "beta.kubernetes.io/os", "beta.kubernetes.io/arch", corev1.LabelWindowsBuild,
}

func restrictNode(r *api.Request, node string, obj, old api.Object) error {
	if obj == nil {
		return forbid(r, old, fmt.Errorf("node %q is not allowed to delete nodes", node))
	}
	if obj.GetName() != node {
		return forbid(r, obj, fmt.Errorf("node %q is not allowed to modify node %q", node, obj.GetName()))
	}
	n := obj.(*corev1.Node)
	var had map[string]string
	if before, ok := old.(*corev1.Node); ok {
		had = before.Labels
		if r.Subresource == "" && !equality.Semantic.DeepEqual(n.Spec.Taints, before.Spec.Taints) {
			return forbid(r, obj, fmt.Errorf("node %q is not allowed to modify taints", node))
		}
		if !equality.Semantic.DeepEqual(n.OwnerReferences, before.OwnerReferences) {
			return forbid(r, obj, fmt.Errorf("node %q is not allowed to modify ownerReferences", node))
		}
	}
	var bad []string
	for key := range changedLabels(n.Labels, had) {
		if !mayLabel(key) {
			bad = append(bad, key)
		}
	}
	if len(bad) > 0 {
		slices.Sort(bad)
		return forbid(r, obj, fmt.Errorf("is not allowed to modify labels: %s", strings.Join(bad, ", ")))
	}
	return nil
}

func changedLabels(now, before map[string]string) map[string]bool {
	out := map[string]bool{}
	for k, v := range now {
		if b, ok := before[k]; !ok || b != v {
			out[k] = true
		}
	}
	for k := range before {
		if _, ok := now[k]; !ok {
			out[k] = true
		}
	}
	return out
}

func mayLabel(key string) bool {
	domain, _, ok := strings.Cut(key, "/")
	if !ok {
		return true
	}
	under := func(d string) bool { return domain == d || strings.HasSuffix(domain, "."+d) }
	switch {
	case under("kubelet.kubernetes.io"), under("node.kubernetes.io"):
		return true
	case under("node-restriction.kubernetes.io"):
		return false
	case under("kubernetes.io"), under("k8s.io"):
		return slices.Contains(ownLabels, key)
	}
	return true
}
