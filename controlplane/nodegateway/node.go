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

// syncNode brings the Node object in line with what the node says of itself: on joining, when the facts change,
// and when somebody else changed the object (a session elsewhere that thought the node
// lost, for one). It writes only what differs, so that an idle node writes nothing.
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

// writeNode returns the node as it is stored now.
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
		ok = false // what the informer shows is past
	}
	return nil, fmt.Errorf("fleet: node %s: too many conflicts on its status", x.node)
}

// toldUses takes the mark of a restored backup off a Node, once it says which volumes its agent uses.
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
	// A Node that was deleted is not written anew: it took this certificate's right with it, in the same commit.
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

// owned says which labels and annotations describe the machine and are kept right; the others are given
// at registration and belong to the administrator afterwards.
func owned(name string) bool {
	domain, _, ok := strings.Cut(name, "/")
	return ok && (domain == "csi.volume.kubernetes.io" || domain == "kubernetes.io" || domain == "beta.kubernetes.io" || domain == "keelson.dev" || strings.HasSuffix(domain, ".keelson.dev"))
}

// draDrivers is the annotation in which an agent names the DRA drivers that it can ask; agents of before leave it out.
const draDrivers = "keelson.dev/dra-drivers"

// tellsVolumes says that an agent tells of the volumes that it uses: an empty list is as good as none on the wire.
func tellsVolumes(facts *v1.Node) bool {
	_, tells := facts.Annotations[api.AnnotationVolumesInUse]
	return tells
}

// labelPatch is a merge patch of the metadata that the node owns; nil when all is right.
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
		// An agent that says nothing of volumes now has yet to read what it uses: what stands is as true as status.volumesInUse.
		if name != api.AnnotationVolumesHeld && name != api.AnnotationClaimsHeld || tellsVolumes(facts) {
			a[name] = nil // of a newer agent, or of other flags: this one does not know
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

// mergeNodeStatus is the status of a node with a session: the facts, Ready unless they say otherwise, and
// what others wrote; with tells the volumes in use are those that the facts name, also none. Conditions that say the same keep their times.
func mergeNodeStatus(stored, facts *v1.NodeStatus, tells bool, now metav1.Time) *v1.NodeStatus {
	out := *facts
	out.Phase = stored.Phase
	out.VolumesAttached = stored.VolumesAttached
	out.Capacity, out.Allocatable = keepExtended(stored, facts)
	if !tells {
		out.VolumesInUse = stored.VolumesInUse
	}
	if out.RuntimeHandlers == nil { // an agent that starts has not asked its runtime yet
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

// takenBack says whether a condition is one by which the agent said that its own network fails. Of the network of another product the
// agent says nothing, and such a product may say nothing either: the node would take no pods for ever.
func takenBack(c v1.NodeCondition, facts *v1.NodeStatus) bool {
	speaks := findNodeCondition(facts.Conditions, v1.NodeReady) != nil
	return c.Type == v1.NodeNetworkUnavailable && c.Reason == "NetworkPartFailed" && speaks
}

// keepExtended returns what the node says of its resources, and the extended resources that somebody else wrote into the
// stored capacity. As documented, capacity is what is written and taken away; allocatable follows it.
func keepExtended(stored, facts *v1.NodeStatus) (capacity, allocatable v1.ResourceList) {
	capacity, allocatable = facts.Capacity, facts.Allocatable
	for name, q := range extended(stored.Capacity) {
		if _, own := facts.Capacity[name]; own {
			continue
		}
		if len(capacity) == len(facts.Capacity) { // the facts are shared
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

// lostNodeStatus returns the status of a node without a session, or nil when the stored status says so already. Its
// conditions have heartbeat, the time of the node's last message, unless that is older than the stored one. Heartbeats are
// not stored while a node is Ready, and replicas forget them after an hour.
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
