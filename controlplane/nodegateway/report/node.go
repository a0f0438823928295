package report

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/retry"
)

// SyncNode queues a write that updates the Node, its status and its CSINode to what the agent
// reported (SetFacts). It is called when the agent joins, when it reports a change, and when
// another client changes the Node. Only differences are written, so an idle node causes no writes.
func (r *Reporter) SyncNode() {
	r.QueueWrite("node", 0, func(ctx context.Context) error {
		r.mu.Lock()
		facts := r.facts
		r.mu.Unlock()
		node, err := r.writeNode(ctx, facts)
		if err != nil {
			return err
		}
		return r.writeCSINode(ctx, node, facts)
	})
}

// writeNode creates or updates the Node from facts, the Node that the agent reported. It returns
// the stored Node.
func (r *Reporter) writeNode(ctx context.Context, facts *v1.Node) (*v1.Node, error) {
	node, ok := r.cfg.Objects.Node(r.node)
	var stored *v1.Node
	err := retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		if !ok {
			if node, err = r.getOrCreateNode(ctx, facts); err != nil {
				return false, r.wrapFailure(err, "register node")
			}
		}
		if patch := labelPatch(node, facts); patch != nil {
			if node, err = client.Patch[*v1.Node](ctx, r.api, "", r.node, "", types.MergePatchType, patch); err != nil {
				return false, r.wrapFailure(err, "label node")
			}
		}
		want := mergeNodeStatus(&node.Status, &facts.Status, reportsVolumes(facts), metav1.Now())
		if equality.Semantic.DeepEqual(&node.Status, want) {
			stored = node
			return false, nil
		}
		next := node.DeepCopy()
		next.Status = *want
		stored, err = client.UpdateStatus(ctx, r.api, next)
		switch {
		case err == nil:
			return false, nil
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			ok = false // the cached Node is outdated
			return true, fmt.Errorf("fleet: node %s: too many conflicts on its status", r.node)
		}
		return false, r.wrapFailure(err, "write status of node")
	})
	if err != nil {
		return nil, err
	}
	return r.clearRestoreMark(ctx, stored, reportsVolumes(facts))
}

// clearRestoreMark removes the annotation api.AnnotationUnconfirmed, which a restore from a backup
// sets, if the agent has reported the volumes in use (volumesReported). It returns the stored Node.
func (r *Reporter) clearRestoreMark(ctx context.Context, stored *v1.Node, volumesReported bool) (*v1.Node, error) {
	if !volumesReported || !api.IsUnconfirmed(stored) {
		return stored, nil
	}
	node, err := client.Patch[*v1.Node](ctx, r.api, "", r.node, "", types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, api.AnnotationUnconfirmed))
	if err != nil {
		return nil, r.wrapFailure(err, "remove the restore mark from node")
	}
	return node, nil
}

func (r *Reporter) getOrCreateNode(ctx context.Context, facts *v1.Node) (*v1.Node, error) {
	node, err := client.Get[*v1.Node](ctx, r.api, "", r.node)
	if !apierrors.IsNotFound(err) {
		return node, err
	}
	// A deleted Node is not created again: the commit that deleted it has also revoked this
	// session's certificate.
	revoked, err := r.cfg.IsRevoked(ctx, r.node, r.cert)
	if err != nil {
		return nil, err
	}
	if revoked {
		r.session.End(wire.RevokedError(r.node))
		return nil, wire.RevokedError(r.node)
	}
	n := &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: r.node, Labels: facts.Labels, Annotations: facts.Annotations},
		Spec:       v1.NodeSpec{Taints: facts.Spec.Taints, ProviderID: facts.Spec.ProviderID},
		Status:     *mergeNodeStatus(&v1.NodeStatus{}, &facts.Status, reportsVolumes(facts), metav1.Now()),
	}
	node, err = client.Create(ctx, r.api, n)
	if apierrors.IsAlreadyExists(err) {
		return client.Get[*v1.Node](ctx, r.api, "", r.node)
	}
	if err == nil {
		r.cfg.OwnLease(ctx, node)
	}
	return node, err
}

// isMachineLabel reports whether a label or annotation describes the machine and is therefore
// updated by the agent. The others are only set at registration. Afterwards the administrator may
// change them.
func isMachineLabel(name string) bool {
	domain, _, ok := strings.Cut(name, "/")
	return ok && (domain == "csi.volume.kubernetes.io" || domain == "kubernetes.io" || domain == "beta.kubernetes.io" ||
		domain == "keelson.dev" || strings.HasSuffix(domain, ".keelson.dev"))
}

// draDrivers is the Node annotation with which an agent reports its DRA drivers. Agents of earlier
// releases do not set it.
const draDrivers = "keelson.dev/dra-drivers"

// reportsVolumes reports whether the agent has reported its volumes in use. An annotation tells
// this, because an empty list and a missing list have the same encoding.
func reportsVolumes(facts *v1.Node) bool {
	_, reported := facts.Annotations[api.AnnotationVolumesInUse]
	return reported
}

// labelPatch returns a merge patch that sets the labels and annotations which the agent owns to
// their values in facts. It returns nil if there is no difference.
func labelPatch(stored, facts *v1.Node) []byte {
	topology := topologyKeys(facts)
	differing := func(have, want map[string]string) map[string]any {
		out := make(map[string]any)
		for k, v := range want {
			if (isMachineLabel(k) || topology[k]) && have[k] != v {
				out[k] = v
			}
		}
		return out
	}
	meta := make(map[string]any)
	if l := differing(stored.Labels, facts.Labels); len(l) > 0 {
		meta["labels"] = l
	}
	a := differing(stored.Annotations, facts.Annotations)
	for _, name := range []string{draDrivers, balancer.Announces, wire.WireGuardKey, podaddress.NetworkAnnotation,
		api.AnnotationFencesAfter, api.AnnotationVolumesHeld, api.AnnotationClaimsHeld} {
		_, exists := stored.Annotations[name]
		if _, reported := facts.Annotations[name]; !exists || reported {
			continue
		}
		// If reportsVolumes is false, the agent has not determined its volumes yet. The stored
		// annotation is then kept, like status.volumesInUse.
		if name != api.AnnotationVolumesHeld && name != api.AnnotationClaimsHeld || reportsVolumes(facts) {
			a[name] = nil // set by a newer agent or with other flags; this agent does not support it
		}
	}
	if len(a) > 0 {
		meta["annotations"] = a
	}
	if len(meta) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": meta})
	if err != nil {
		return nil // never fails for maps of strings
	}
	return patch
}

// mergeNodeStatus returns the status to store for a node with a session. It consists of the
// reported status facts, a true Ready condition unless facts contains one, and the parts that other
// clients write. If volumesReported, the volumes in use are those in facts, even if there are none.
// An unchanged condition keeps its times.
func mergeNodeStatus(stored, facts *v1.NodeStatus, volumesReported bool, now metav1.Time) *v1.NodeStatus {
	out := *facts
	out.Phase = stored.Phase
	out.VolumesAttached = stored.VolumesAttached
	out.Capacity, out.Allocatable = mergeExtendedResources(stored, facts)
	if !volumesReported {
		out.VolumesInUse = stored.VolumesInUse
	}
	if out.RuntimeHandlers == nil { // a starting agent has not queried its container runtime yet
		out.RuntimeHandlers, out.Features = stored.RuntimeHandlers, stored.Features
	}
	reported := facts.Conditions
	if api.FindNodeCondition(reported, v1.NodeReady) == nil {
		reported = append(append([]v1.NodeCondition(nil), reported...), v1.NodeCondition{
			Type: v1.NodeReady, Status: v1.ConditionTrue,
			Reason: "KubeletReady", Message: "the agent has a session with the control plane",
		})
	}
	out.Conditions = make([]v1.NodeCondition, 0, len(reported)+len(stored.Conditions))
	for _, c := range reported {
		old := api.FindNodeCondition(stored.Conditions, c.Type)
		switch {
		case old != nil && old.Status == c.Status && old.Reason == c.Reason && old.Message == c.Message:
			c = *old
		case old != nil && old.Status == c.Status:
			c.LastTransitionTime, c.LastHeartbeatTime = old.LastTransitionTime, now
		default:
			c.LastTransitionTime, c.LastHeartbeatTime = now, now
		}
		out.Conditions = append(out.Conditions, c)
	}
	for _, c := range stored.Conditions {
		if api.FindNodeCondition(reported, c.Type) == nil && !isWithdrawn(c, facts) {
			out.Conditions = append(out.Conditions, c)
		}
	}
	return &out
}

// isWithdrawn reports whether the stored condition c must be removed because the agent no longer
// reports it. This applies only to NetworkUnavailable of the agent's own pod network. Another
// network plugin would not remove it, and the node would never get pods.
func isWithdrawn(c v1.NodeCondition, facts *v1.NodeStatus) bool {
	hasReady := api.FindNodeCondition(facts.Conditions, v1.NodeReady) != nil
	return c.Type == v1.NodeNetworkUnavailable && c.Reason == "NetworkPartFailed" && hasReady
}

// mergeExtendedResources returns the reported resources, and the extended resources that another
// client has written to the stored capacity. According to the documentation of Kubernetes, such a
// client writes only the capacity; allocatable is set to the same value.
func mergeExtendedResources(stored, facts *v1.NodeStatus) (capacity, allocatable v1.ResourceList) {
	capacity, allocatable = facts.Capacity, facts.Allocatable
	for name, q := range wire.ExtendedResources(stored.Capacity) {
		if _, own := facts.Capacity[name]; own {
			continue
		}
		if len(capacity) == len(facts.Capacity) { // cloned, because facts is shared
			capacity, allocatable = maps.Clone(facts.Capacity), maps.Clone(facts.Allocatable)
			if capacity == nil {
				capacity = v1.ResourceList{}
			}
			if allocatable == nil {
				allocatable = v1.ResourceList{}
			}
		}
		capacity[name], allocatable[name] = q, q
	}
	return capacity, allocatable
}
