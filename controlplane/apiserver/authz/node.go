package authz

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

// Lookup returns an object, from this replica's cache if it is cached. ok is false when the object
// does not exist.
type Lookup func(ctx context.Context, resource, namespace, name string) (api.Object, bool)

// Node authorizes node agents (group system:nodes, user system:node:NAME). An agent may read and
// write the objects of its own node, the pods bound to it and the objects that these pods refer to.
// It has no access to objects of other nodes.
type Node struct {
	lookup Lookup

	mu      sync.RWMutex
	pods    map[types.UID]*corev1.Pod
	byNode  map[string]map[types.UID]*corev1.Pod
	changed chan struct{} // closed and replaced on each change of the pods
}

// catchUp is how long Node waits before it rejects a request: the pod index may not contain a pod
// yet that was just bound.
const catchUp = 50 * time.Millisecond

// NewNode returns a Node with an empty pod index.
func NewNode(lookup Lookup) *Node {
	return &Node{
		lookup: lookup, changed: make(chan struct{}),
		pods: make(map[types.UID]*corev1.Pod), byNode: make(map[string]map[types.UID]*corev1.Pod),
	}
}

// NameOf returns the name of the node of a node agent, given the agent's user. ok is false if the
// user is not a node agent.
func NameOf(u api.User) (string, bool) {
	name, ok := strings.CutPrefix(u.Name, api.NodeUserPrefix)
	return name, ok && name != "" && slices.Contains(u.Groups, api.GroupNodes)
}

// Authorize returns Allow for requests of a node agent that NodeRules allow, or that concern
// objects of the agent's own node. Otherwise it returns NoOpinion.
func (n *Node) Authorize(ctx context.Context, a *Attributes) (Decision, string) {
	node, ok := NameOf(a.User)
	if !ok {
		return NoOpinion, ""
	}
	rules := NodeRules()
	for i := range rules {
		if allowsAttributes(&rules[i], a) {
			return Allow, ""
		}
	}
	if a.Resource == "" {
		return NoOpinion, ""
	}
	return n.authorizeOwn(ctx, node, a)
}

// authorizeOwn decides on requests that are allowed only for objects that belong to the node, such
// as its Lease, pods and the objects that its pods reference.
func (n *Node) authorizeOwn(ctx context.Context, node string, a *Attributes) (Decision, string) {
	switch a.APIGroup + "/" + a.Resource {
	case "/nodes":
		return allowSelf(node, a, "get", "list", "watch", "create", "update", "patch")
	case "storage.k8s.io/csinodes":
		return allowSelf(node, a, "get", "create", "update", "patch", "delete")
	case "coordination.k8s.io/leases":
		if a.Namespace != corev1.NamespaceNodeLease {
			return NoOpinion, fmt.Sprintf("can only access leases in the %q system namespace",
				corev1.NamespaceNodeLease)
		}
		return allowSelf(node, a, "get", "create", "update", "patch", "delete")
	case "/pods":
		return n.ownPod(ctx, node, a)
	case "/secrets", "/configmaps", "/persistentvolumeclaims", "/persistentvolumes", "/serviceaccounts",
		"storage.k8s.io/volumeattachments",
		"resource.k8s.io/resourceclaims":
		return n.authorizeReferenced(ctx, node, a)
	case "resource.k8s.io/resourceslices":
		return n.ownSlice(ctx, node, a)
	}
	return NoOpinion, ""
}

// allowSelf allows the verbs on the object with the same name as the node. A create request has no
// name in its URL; admission checks the name in the object.
func allowSelf(node string, a *Attributes, verbs ...string) (Decision, string) {
	if !slices.Contains(verbs, a.Verb) || a.Subresource != "" && a.Subresource != "status" {
		return NoOpinion, fmt.Sprintf("node %q may not %s %s", node, a.Verb, a.Resource)
	}
	if a.Name != node && (a.Verb != "create" || a.Name != "") {
		return NoOpinion, fmt.Sprintf("node %q may only access its own %s", node, a.Resource)
	}
	return Allow, ""
}

func (n *Node) ownPod(ctx context.Context, node string, a *Attributes) (Decision, string) {
	switch a.Verb {
	case "list", "watch":
		if a.FieldSelector != nil {
			if v, ok := a.FieldSelector.RequiresExactMatch("spec.nodeName"); ok && v == node {
				return Allow, ""
			}
		}
		return NoOpinion, "can only list/watch pods with spec.nodeName field selector"
	case "create":
		if a.Subresource == "" {
			return Allow, "" // a mirror pod; admission checks its node name
		}
		if a.Subresource != "eviction" {
			return NoOpinion, fmt.Sprintf("node %q may not create pods/%s", node, a.Subresource)
		}
	case "get":
		if a.Subresource != "" { // an agent does not need exec, log and similar subresources through the API
			return NoOpinion, fmt.Sprintf("node %q may not get pods/%s", node, a.Subresource)
		}
	case "delete":
		if a.Subresource != "" {
			return NoOpinion, ""
		}
	case "update", "patch":
		if a.Subresource != "status" {
			return NoOpinion, fmt.Sprintf("node %q may update pods/status only", node)
		}
	default:
		return NoOpinion, ""
	}
	found := n.awaitPod(ctx, node, func(p *corev1.Pod) bool {
		return p.Namespace == a.Namespace && p.Name == a.Name
	})
	if !found {
		return NoOpinion, fmt.Sprintf("no relationship found between node '%s' and this object", node)
	}
	return Allow, ""
}

// ownSlice allows a node to read and write the ResourceSlices of its own devices. DRA drivers use
// the node's credentials for this.
func (n *Node) ownSlice(ctx context.Context, node string, a *Attributes) (Decision, string) {
	if a.Subresource != "" {
		return NoOpinion, fmt.Sprintf("node %q may not %s resourceslices/%s", node, a.Verb, a.Subresource)
	}
	switch a.Verb {
	case "create":
		return Allow, "" // admission checks the node name
	case "list", "watch", "deletecollection":
		if a.FieldSelector != nil {
			if v, ok := a.FieldSelector.RequiresExactMatch(resourcev1.ResourceSliceSelectorNodeName); ok && v == node {
				return Allow, ""
			}
		}
		return NoOpinion, "can only list/watch/deletecollection resourceslices with nodeName field selector"
	case "get", "update", "patch", "delete":
		o, found := n.lookup(ctx, a.Resource, "", a.Name)
		if s, is := o.(*resourcev1.ResourceSlice); found && is && s.Spec.NodeName != nil && *s.Spec.NodeName == node {
			return Allow, ""
		}
	}
	return NoOpinion, fmt.Sprintf("no relationship found between node '%s' and this object", node)
}

// authorizeReferenced decides on requests for objects that pods or volumes of the node reference.
func (n *Node) authorizeReferenced(ctx context.Context, node string, a *Attributes) (Decision, string) {
	minting := a.Resource == "serviceaccounts" && a.Subresource == "token" && a.Verb == "create"
	reading := a.Subresource == "" && (a.Verb == "get" || (a.Verb == "list" || a.Verb == "watch") && a.Name != "")
	if !minting && !reading {
		return NoOpinion, "can only read resources of this type"
	}
	var ok bool
	switch a.Resource {
	case "volumeattachments":
		o, found := n.lookup(ctx, a.Resource, "", a.Name)
		va, is := o.(*storagev1.VolumeAttachment)
		ok = found && is && va.Spec.NodeName == node
	case "persistentvolumes":
		o, found := n.lookup(ctx, a.Resource, "", a.Name)
		pv, is := o.(*corev1.PersistentVolume)
		if found && is && pv.Spec.ClaimRef != nil {
			claim := pv.Spec.ClaimRef
			ok = n.awaitPod(ctx, node, func(p *corev1.Pod) bool {
				return p.Namespace == claim.Namespace && refersTo(p, "persistentvolumeclaims", claim.Name)
			})
		}
	default:
		ok = n.awaitPod(ctx, node, func(p *corev1.Pod) bool {
			return p.Namespace == a.Namespace && refersTo(p, a.Resource, a.Name)
		})
	}
	if !ok {
		return NoOpinion, fmt.Sprintf("no relationship found between node '%s' and this object", node)
	}
	return Allow, ""
}

// awaitPod reports whether a pod of the node satisfies match. It waits up to catchUp for a matching
// pod to appear in the index.
func (n *Node) awaitPod(ctx context.Context, node string, match func(*corev1.Pod) bool) bool {
	var late <-chan time.Time
	for {
		n.mu.RLock()
		found := false
		for _, p := range n.byNode[node] {
			if match(p) {
				found = true
				break
			}
		}
		changed := n.changed
		n.mu.RUnlock()
		if found {
			return true
		}
		if late == nil {
			t := time.NewTimer(catchUp)
			defer t.Stop()
			late = t.C
		}
		select {
		case <-changed:
		case <-late:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// PodsOf returns the pods that are bound to the node. They are shared and must not be modified.
func (n *Node) PodsOf(node string) []*corev1.Pod {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return slices.Collect(maps.Values(n.byNode[node]))
}

func (n *Node) Replace(objects []api.Object) {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.pods)
	clear(n.byNode)
	for _, o := range objects {
		n.storePod(o.(*corev1.Pod))
	}
	n.signalChange()
}

func (n *Node) Set(o api.Object) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.storePod(o.(*corev1.Pod))
	n.signalChange()
}

func (n *Node) Remove(o api.Object) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dropPod(o.GetUID())
	n.signalChange()
}

func (n *Node) signalChange() {
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *Node) storePod(pod *corev1.Pod) {
	n.dropPod(pod.UID)
	if pod.Spec.NodeName == "" {
		return
	}
	n.pods[pod.UID] = pod
	on := n.byNode[pod.Spec.NodeName]
	if on == nil {
		on = make(map[types.UID]*corev1.Pod)
		n.byNode[pod.Spec.NodeName] = on
	}
	on[pod.UID] = pod
}

func (n *Node) dropPod(uid types.UID) {
	p := n.pods[uid]
	if p == nil {
		return
	}
	delete(n.pods, uid)
	on := n.byNode[p.Spec.NodeName]
	delete(on, uid)
	if len(on) == 0 {
		delete(n.byNode, p.Spec.NodeName)
	}
}

// NodeRules returns the rules that apply to every agent, independent of its node: reading
// cluster-wide objects, and creating reviews, events and certificate requests.
func NodeRules() []rbacv1.PolicyRule { return nodeRules }

var nodeRules = []rbacv1.PolicyRule{
	newRule("create", "authentication.k8s.io", "tokenreviews"),
	newRule("create", "authorization.k8s.io", "subjectaccessreviews localsubjectaccessreviews"),
	newRule("get list watch", "", "services endpoints"),
	newRule("get list watch", "discovery.k8s.io", "endpointslices"),
	newRule("create patch update", "", "events"),
	newRule("create patch update", "events.k8s.io", "events"),
	newRule("create get list watch", "certificates.k8s.io", "certificatesigningrequests"),
	newRule("get list watch", "storage.k8s.io", "csidrivers"),
	newRule("get list watch", "node.k8s.io", "runtimeclasses"),
	pathRule("get", "/healthz", "/livez", "/readyz", "/version", "/version/", "/api", "/api/*", "/apis", "/apis/*",
		"/openapi", "/openapi/*"),
}
