package scheduler

import (
	"maps"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/component-helpers/resource"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// cluster is the current state of the nodes and of the pods on them (kube-scheduler calls it the
// cache). Snapshots are taken from it. A pod on a node is bound to it or assumed on it. Assumed
// means that the scheduler has chosen the node, but the pod informer has not reported the binding
// yet. Informer handlers and bindings change the cluster; the scheduling loop takes the snapshots.
type cluster struct {
	mu    sync.Mutex
	nodes map[string]*framework.NodeInfo
	pods  map[types.UID]*placedPod

	generation          int64
	dirty               map[string]struct{} // names of the nodes that changed after the last snapshot
	nodesAddedOrRemoved bool                // nodes were added or removed after the last snapshot
	snapshot            *framework.Snapshot

	namespaces        framework.Namespaces
	namespacesChanged bool // namespaces or their labels changed after the last snapshot
	services          *framework.Services

	nominated          map[types.UID]*placedPod // by pod UID: pods without a node that have a nominated node
	nominationsChanged bool                     // nominated changed after the last snapshot

	groups *groupTracker // updated with the assumed pods, for its counts of placed pods per PodGroup
}

// placedPod is a pod that is bound or assumed on a node, or has a nominated node.
type placedPod struct {
	info    *framework.PodInfo
	node    string
	assumed bool
}

func newCluster(v framework.Volumes, owner func(string, *metav1.OwnerReference) labels.Selector) *cluster {
	c := &cluster{
		nodes: make(map[string]*framework.NodeInfo), pods: make(map[types.UID]*placedPod),
		dirty:      make(map[string]struct{}),
		namespaces: make(framework.Namespaces), services: framework.NewServices(),
		nominated: make(map[types.UID]*placedPod), groups: newGroupTracker(),
	}
	c.snapshot = &framework.Snapshot{
		ByName: make(map[string]*framework.NodeInfo), Index: framework.NewIndex(), Volumes: v,
		Workloads: framework.Workloads{Services: c.servicesOf, Owner: owner},
	}
	return c
}

// setNamespace records the labels of a namespace, which the namespace selectors of affinity terms
// match.
func (c *cluster) setNamespace(name string, set labels.Set) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.namespaces[name], c.namespacesChanged = set, true
}

func (c *cluster) removeNamespace(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.namespaces, name)
	c.namespacesChanged = true
}

// setService records the pod selector of a Service, for spreading the pods of the Service. A nil
// selector removes the Service.
func (c *cluster) setService(namespace, name string, selector map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.services.Set(namespace, name, selector)
}

func (c *cluster) servicesOf(pod *v1.Pod) []map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.services.Of(pod)
}

// nodeForChange returns the node with the given name for modification, and marks it as changed, so
// that the next snapshot copies it. An unknown node is added without a node object. The caller
// holds c.mu.
func (c *cluster) nodeForChange(name string) *framework.NodeInfo {
	n := c.nodes[name]
	if n == nil {
		n = &framework.NodeInfo{}
		c.nodes[name] = n
	}
	c.generation++
	n.Generation = c.generation
	c.dirty[name] = struct{}{}
	return n
}

func (c *cluster) setNode(node *v1.Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodeForChange(node.Name)
	if n.Node == nil {
		c.nodesAddedOrRemoved = true
	}
	n.SetNode(node)
}

func (c *cluster) removeNode(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.nodes[name]
	if n == nil {
		return
	}
	c.nodesAddedOrRemoved = true
	if len(n.Pods) == 0 {
		delete(c.nodes, name)
		c.dirty[name] = struct{}{}
		return
	}
	c.nodeForChange(name).Node = nil // keep the node's pods: they count again if a node with this name is added later
}

// addBoundPod records a pod that is bound to a node (spec.nodeName). If the pod was assumed on a
// node, the binding replaces that assumption.
func (c *cluster) addBoundPod(pod *v1.Pod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.pods[pod.UID]; have != nil {
		if have.node == pod.Spec.NodeName && sameForScheduling(have.info.Pod, pod) {
			have.assumed = false
			return
		}
		c.removePlacedPod(pod.UID, have)
	}
	c.addPlacedPod(&placedPod{info: framework.NewPodInfo(pod), node: pod.Spec.NodeName})
}

// sameForScheduling reports whether a and b, two versions of a bound pod, are equal in all fields
// that affect the scheduling of other pods. The spec of a bound pod changes only by in-place
// resizing; the allocated resources are in its status.
func sameForScheduling(a, b *v1.Pod) bool {
	return (a.DeletionTimestamp == nil) == (b.DeletionTimestamp == nil) && maps.Equal(a.Labels, b.Labels) &&
		a.Generation == b.Generation && slices.EqualFunc(a.Spec.Containers, b.Spec.Containers,
		func(x, y v1.Container) bool {
			return sameRequests(x.Resources.Requests, y.Resources.Requests)
		}) && (sameAllocatedResources(a, b) || framework.NewPodInfo(a).Requests.Equal(framework.NewPodInfo(b).Requests))
}

// sameAllocatedResources reports whether a and b, two versions of a pod, have equal resources in
// their status and in their container statuses. Most status updates do not change these resources.
func sameAllocatedResources(a, b *v1.Pod) bool {
	sameActual := func(x, y *v1.ResourceRequirements) bool {
		return (x == nil) == (y == nil) && (x == nil || sameRequests(x.Requests, y.Requests))
	}
	same := func(x, y v1.ContainerStatus) bool {
		return x.Name == y.Name && sameRequests(x.AllocatedResources, y.AllocatedResources) &&
			sameActual(x.Resources, y.Resources)
	}
	return sameRequests(a.Status.AllocatedResources, b.Status.AllocatedResources) &&
		sameActual(a.Status.Resources, b.Status.Resources) &&
		podresources.IsPodResizeInfeasible(a) == podresources.IsPodResizeInfeasible(b) &&
		slices.EqualFunc(a.Status.ContainerStatuses, b.Status.ContainerStatuses, same) &&
		slices.EqualFunc(a.Status.InitContainerStatuses, b.Status.InitContainerStatuses, same)
}

func sameRequests(a, b v1.ResourceList) bool {
	if len(a) != len(b) {
		return false
	}
	for k, v := range a {
		if w, ok := b[k]; !ok || v.Cmp(w) != 0 {
			return false
		}
	}
	return true
}

// assumePod counts the pod on the node that was chosen for it, before it is bound, and returns
// true. If the pod is already bound to a node or assumed on one, assumePod does nothing and returns
// false.
func (c *cluster) assumePod(pod *framework.PodInfo, node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pods[pod.Pod.UID] != nil {
		return false
	}
	c.addPlacedPod(&placedPod{info: pod, node: node, assumed: true})
	return true
}

// forgetAssumedPod removes a pod from the node on which it is assumed. It does nothing if the
// informer has already reported the pod as bound.
func (c *cluster) forgetAssumedPod(uid types.UID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.pods[uid]; have != nil && have.assumed {
		c.removePlacedPod(uid, have)
	}
}

// removePod removes a pod from the node on which it is bound or assumed, and clears its nominated
// node. It reports whether the pod had a node or a nominated node.
func (c *cluster) removePod(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	have := c.pods[uid]
	if have != nil {
		c.removePlacedPod(uid, have)
	}
	kept := c.nominated[uid] != nil
	c.clearNomination(uid)
	return have != nil || kept
}

// forgetAssumed removes all assumed pods from their nodes. Run calls it when it returns, because
// this replica then no longer binds pods.
func (c *cluster) forgetAssumed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for uid, have := range c.pods {
		if have.assumed {
			c.removePlacedPod(uid, have)
		}
	}
}

func (c *cluster) isPlaced(uid types.UID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pods[uid] != nil
}

// nominateNode records the pod's nominated node, on which preemption has reserved resources for the
// pod; "" clears it. It reports whether the nominated node has changed. It ignores a pod that is
// bound or assumed on a node.
func (c *cluster) nominateNode(pod *framework.PodInfo, node string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	uid := pod.Pod.UID
	have := c.nominated[uid]
	if node == "" || c.pods[uid] != nil {
		c.clearNomination(uid)
		return have != nil
	}
	c.nominated[uid], c.nominationsChanged = &placedPod{info: pod, node: node}, true
	return have == nil || have.node != node
}

func (c *cluster) clearNomination(uid types.UID) {
	if c.nominated[uid] != nil {
		delete(c.nominated, uid)
		c.nominationsChanged = true
	}
}

// nominatedNode returns the name of the pod's nominated node, on which preemption has reserved
// resources for the pod. It returns "" if the pod has none.
func (c *cluster) nominatedNode(uid types.UID) string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if have := c.nominated[uid]; have != nil {
		return have.node
	}
	return ""
}

func (c *cluster) addPlacedPod(p *placedPod) {
	c.clearNomination(p.info.Pod.UID)
	c.pods[p.info.Pod.UID] = p
	c.groups.setAssumed(p.info.Pod, p.assumed)
	c.nodeForChange(p.node).AddPod(p.info)
}

func (c *cluster) removePlacedPod(uid types.UID, p *placedPod) {
	delete(c.pods, uid)
	c.groups.setAssumed(p.info.Pod, false)
	n := c.nodeForChange(p.node)
	n.RemovePod(uid)
	if n.Node == nil && len(n.Pods) == 0 {
		delete(c.nodes, p.node)
	}
}

// takeSnapshot returns a snapshot of the nodes and pods for one scheduling attempt. It updates the
// previous snapshot: only changed nodes are copied. The result is valid until the next call; its
// nodes are immutable. Only one goroutine, the scheduling loop, may call takeSnapshot and use the
// result.
func (c *cluster) takeSnapshot() *framework.Snapshot {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.snapshot
	if c.namespacesChanged {
		s.Index.SetNamespaces(maps.Clone(c.namespaces))
		c.namespacesChanged = false
	}
	if len(c.dirty) == 0 && !c.nodesAddedOrRemoved && !c.nominationsChanged {
		return s
	}
	next := *s
	if c.nominationsChanged {
		next.Nominated = make(map[string][]*framework.PodInfo)
		for _, p := range c.nominated {
			next.Nominated[p.node] = append(next.Nominated[p.node], p.info)
		}
		c.nominationsChanged = false
	}
	if c.nodesAddedOrRemoved {
		c.rebuildNodes(&next)
	} else {
		c.replaceDirty(&next)
	}
	clear(c.dirty)
	c.nodesAddedOrRemoved = false
	c.snapshot = &next
	return c.snapshot
}

// rebuildNodes rebuilds the node list of the snapshot s from the nodes of the cluster. It is
// necessary after nodes were added or removed. The caller holds c.mu.
func (c *cluster) rebuildNodes(s *framework.Snapshot) {
	before := s.ByName
	s.ByName = make(map[string]*framework.NodeInfo, len(c.nodes))
	s.Nodes = make([]*framework.NodeInfo, 0, len(c.nodes))
	for name, n := range c.nodes {
		if n.Node == nil {
			continue
		}
		have := before[name]
		if have == nil || have.Generation != n.Generation {
			now := n.Clone()
			s.Index.Replace(have, now)
			have = now
		}
		s.ByName[name] = have
		s.Nodes = append(s.Nodes, have)
	}
	for name, n := range before {
		if s.ByName[name] == nil {
			s.Index.Replace(n, nil)
		}
	}
	slices.SortFunc(s.Nodes, func(a, b *framework.NodeInfo) int { return strings.Compare(a.Node.Name, b.Node.Name) })
}

// replaceDirty replaces the nodes of the snapshot s that have changed in the cluster by copies of
// their current state. The caller holds c.mu.
func (c *cluster) replaceDirty(s *framework.Snapshot) {
	for name := range c.dirty {
		n := c.nodes[name]
		if n == nil || n.Node == nil {
			continue
		}
		i, ok := slices.BinarySearchFunc(s.Nodes, name, func(a *framework.NodeInfo, name string) int {
			return strings.Compare(a.Node.Name, name)
		})
		if ok {
			cp := n.Clone()
			s.Index.Replace(s.Nodes[i], cp)
			s.Nodes[i] = cp
			s.ByName[name] = cp
		}
	}
}
