package nodegateway

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
)

// syncNode updates the Node object with the facts that the agent reported. It is called when the
// agent joins, when the facts change, and when another client changes the Node. It writes
// differences only, so an idle node causes no writes.
func (x *session) syncNode() {
	x.put("node", 0, func(ctx context.Context) error {
		x.mu.Lock()
		facts := x.facts
		x.mu.Unlock()
		node, err := x.writeNode(ctx, facts)
		if err != nil {
			return err
		}
		return x.writeCSINode(ctx, node, facts)
	})
}

// writeNode creates or updates the Node from facts and returns the stored Node.
func (x *session) writeNode(ctx context.Context, facts *v1.Node) (*v1.Node, error) {
	node, ok := x.srv.view.nodeObject(x.node)
	for range 5 {
		if !ok {
			var err error
			if node, err = x.getOrCreateNode(ctx, facts); err != nil {
				return nil, x.failed(err, "register node")
			}
		}
		if patch := labelPatch(node, facts); patch != nil {
			var err error
			if node, err = client.Patch[*v1.Node](ctx, x.api, "", x.node, "", types.MergePatchType, patch); err != nil {
				return nil, x.failed(err, "label node")
			}
		}
		want := mergeNodeStatus(&node.Status, &facts.Status, tellsVolumes(facts), metav1.Now())
		if equality.Semantic.DeepEqual(&node.Status, want) {
			return x.toldUses(ctx, node, tellsVolumes(facts))
		}
		next := node.DeepCopy()
		next.Status = *want
		stored, err := client.UpdateStatus(ctx, x.api, next)
		if err == nil {
			return x.toldUses(ctx, stored, tellsVolumes(facts))
		}
		if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return nil, x.failed(err, "write status of node")
		}
		ok = false // the cached Node is outdated
	}
	return nil, fmt.Errorf("fleet: node %s: too many conflicts on its status", x.node)
}

// toldUses removes the annotation api.AnnotationUnheard, which a restore from backup sets, once the
// agent has reported the volumes in use (tells).
func (x *session) toldUses(ctx context.Context, stored *v1.Node, tells bool) (*v1.Node, error) {
	if !tells || !api.Unheard(stored) {
		return stored, nil
	}
	node, err := client.Patch[*v1.Node](ctx, x.api, "", x.node, "", types.MergePatchType,
		fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, api.AnnotationUnheard))
	if err != nil {
		return nil, x.failed(err, "take the mark of a restore off node")
	}
	return node, nil
}

func (x *session) getOrCreateNode(ctx context.Context, facts *v1.Node) (*v1.Node, error) {
	node, err := client.Get[*v1.Node](ctx, x.api, "", x.node)
	if !apierrors.IsNotFound(err) {
		return node, err
	}
	// A deleted Node is not created again: the commit of its deletion also revoked this session's
	// certificate.
	if r, ok, err := x.srv.freshRevocation(ctx, x.node); err != nil {
		return nil, err
	} else if ok && r.Covers(x.cert) {
		x.end(errRevoked(x.node))
		return nil, errRevoked(x.node)
	}
	n := &v1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: x.node, Labels: facts.Labels, Annotations: facts.Annotations},
		Spec:       v1.NodeSpec{Taints: facts.Spec.Taints, ProviderID: facts.Spec.ProviderID},
		Status:     *mergeNodeStatus(&v1.NodeStatus{}, &facts.Status, tellsVolumes(facts), metav1.Now()),
	}
	node, err = client.Create(ctx, x.api, n)
	if apierrors.IsAlreadyExists(err) {
		return client.Get[*v1.Node](ctx, x.api, "", x.node)
	}
	if err == nil {
		x.srv.ownLease(ctx, node)
	}
	return node, err
}

// owned reports whether a label or annotation describes the machine and is therefore kept in sync.
// Others are set at registration only and belong to the administrator afterwards.
func owned(name string) bool {
	domain, _, ok := strings.Cut(name, "/")
	return ok && (domain == "csi.volume.kubernetes.io" || domain == "kubernetes.io" || domain == "beta.kubernetes.io" || domain == "keelson.dev" || strings.HasSuffix(domain, ".keelson.dev"))
}

// draDrivers is the Node annotation in which an agent lists its DRA drivers. Agents of earlier
// releases do not set it.
const draDrivers = "keelson.dev/dra-drivers"

// tellsVolumes reports whether the agent has reported its volumes in use. An annotation states it,
// because the wire form does not distinguish an empty list from a missing one.
func tellsVolumes(facts *v1.Node) bool {
	_, tells := facts.Annotations[api.AnnotationVolumesInUse]
	return tells
}

// labelPatch returns a merge patch for the labels and annotations that the agent owns, or nil if
// none differs.
func labelPatch(stored, facts *v1.Node) []byte {
	topology := topologyKeys(facts)
	differing := func(have, want map[string]string) map[string]any {
		out := make(map[string]any)
		for k, v := range want {
			if (owned(k) || topology[k]) && have[k] != v {
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
	for _, name := range []string{draDrivers, balancer.Announces, wireguardKey, podaddress.NetworkAnnotation, api.AnnotationFencesAfter, api.AnnotationVolumesHeld, api.AnnotationClaimsHeld} {
		_, stands := stored.Annotations[name]
		if _, tells := facts.Annotations[name]; !stands || tells {
			continue
		}
		// Without tellsVolumes, the agent has not determined its volumes yet. The stored annotation
		// stays, as status.volumesInUse does.
		if name != api.AnnotationVolumesHeld && name != api.AnnotationClaimsHeld || tellsVolumes(facts) {
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
		return nil // maps of strings always marshal
	}
	return patch
}

// mergeNodeStatus returns the status of a node with a session. It consists of the facts, a true
// Ready condition unless the facts contain one, and the parts that others write. With tells, the
// volumes in use are those of the facts, even if empty. An unchanged condition keeps its times.
func mergeNodeStatus(stored, facts *v1.NodeStatus, tells bool, now metav1.Time) *v1.NodeStatus {
	out := *facts
	out.Phase = stored.Phase
	out.VolumesAttached = stored.VolumesAttached
	out.Capacity, out.Allocatable = keepExtended(stored, facts)
	if !tells {
		out.VolumesInUse = stored.VolumesInUse
	}
	if out.RuntimeHandlers == nil { // a starting agent has not asked its runtime yet
		out.RuntimeHandlers, out.Features = stored.RuntimeHandlers, stored.Features
	}
	reported := facts.Conditions
	if findNodeCondition(reported, v1.NodeReady) == nil {
		reported = append(append([]v1.NodeCondition(nil), reported...), v1.NodeCondition{
			Type: v1.NodeReady, Status: v1.ConditionTrue,
			Reason: "KubeletReady", Message: "the agent has a session with the control plane",
		})
	}
	out.Conditions = make([]v1.NodeCondition, 0, len(reported)+len(stored.Conditions))
	for _, c := range reported {
		old := findNodeCondition(stored.Conditions, c.Type)
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
		if findNodeCondition(reported, c.Type) == nil && !takenBack(c, facts) {
			out.Conditions = append(out.Conditions, c)
		}
	}
	return &out
}

// takenBack reports whether a stored condition must be removed because the agent no longer reports
// it. That applies to NetworkUnavailable set by the agent's own network. Another network product
// would not clear it, and the node would never get pods.
func takenBack(c v1.NodeCondition, facts *v1.NodeStatus) bool {
	speaks := findNodeCondition(facts.Conditions, v1.NodeReady) != nil
	return c.Type == v1.NodeNetworkUnavailable && c.Reason == "NetworkPartFailed" && speaks
}

// keepExtended returns the reported resources plus the extended resources that another client wrote
// into the stored capacity. As documented by Kubernetes, such a client writes capacity only;
// allocatable follows it.
func keepExtended(stored, facts *v1.NodeStatus) (capacity, allocatable v1.ResourceList) {
	capacity, allocatable = facts.Capacity, facts.Allocatable
	for name, q := range extended(stored.Capacity) {
		if _, own := facts.Capacity[name]; own {
			continue
		}
		if len(capacity) == len(facts.Capacity) { // clone: the facts are shared
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

// lostNodeStatus returns the status of a node without a session, or nil if Ready is already
// Unknown. Its conditions get heartbeat, the time of the node's last message, unless the stored
// time is later. Heartbeats are not stored while a node is Ready, and replicas forget them after an
// hour.
func lostNodeStatus(stored *v1.NodeStatus, heartbeat time.Time, now metav1.Time) *v1.NodeStatus {
	ready := findNodeCondition(stored.Conditions, v1.NodeReady)
	if ready != nil && ready.Status == v1.ConditionUnknown {
		return nil
	}
	out := stored.DeepCopy()
	if ready == nil {
		out.Conditions = append(out.Conditions, v1.NodeCondition{Type: v1.NodeReady})
	}
	for i := range out.Conditions {
		c := &out.Conditions[i]
		switch c.Type {
		case v1.NodeReady, v1.NodeMemoryPressure, v1.NodeDiskPressure, v1.NodePIDPressure:
			if c.Status != v1.ConditionUnknown {
				c.Status, c.LastTransitionTime = v1.ConditionUnknown, now
			}
			if c.LastHeartbeatTime.Time.Before(heartbeat) {
				c.LastHeartbeatTime = metav1.NewTime(heartbeat)
			}
			c.Reason, c.Message = "NodeStatusUnknown", "the agent's session with the control plane was lost"
		}
	}
	return out
}

func findNodeCondition(list []v1.NodeCondition, t v1.NodeConditionType) *v1.NodeCondition {
	for i := range list {
		if list[i].Type == t {
			return &list[i]
		}
	}
	return nil
}

func nodeIsReady(n *v1.Node) bool {
	c := findNodeCondition(n.Status.Conditions, v1.NodeReady)
	return c != nil && c.Status == v1.ConditionTrue
}
