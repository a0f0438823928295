// Package assign computes the objects that each agent must hold, and the changes to send to it.
//
// A View maps informer events to changed keys of the affected feeds. A Feed belongs to the session
// of one node; its assignment compares the informers' current state with the objects that the agent
// holds. A StopGate delays the stop of a terminating pod until no node routes to it.
package assign

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// podsByNode is the name of the informer index of pods by the node to which they are bound.
const podsByNode = "fleet.podsByNode"

// View maps informer events to changed keys of the affected feeds. An event only marks keys; the
// sending goroutine of each session encodes and sends the objects.
//
// No change is lost, because of the order of operations. A feed registers (Subscribe, watchObject)
// before it reads the informer caches. The caches change before the handlers are called. The
// handlers write to the logs before they wake sessions.
type View struct {
	stores    [kindCount]cache.Indexer
	handlers  []cache.ResourceEventHandlerRegistration
	log       *slog.Logger
	encodings *encodings
	gate      *StopGate
	groups    *policyGroups

	objects     *changeLog // log of Services and EndpointSlices
	peers       *changeLog
	batches     batches       // limits the rate of wake-ups for peers
	peerBatches atomic.Uint64 // number of batches of peers that were announced

	// sliceRevision is the revision up to which objects contains all EndpointSlice changes.
	sliceRevision atomic.Uint64

	mu        sync.RWMutex
	feeds     map[string]map[*Feed]struct{} // feeds by node
	feedCount int
	watchers  map[key]map[*Feed]struct{} // feeds that hold an object that refers to the key
}

// NewView returns a view and registers its handlers with the informers, which must not run yet.
// addresses determines which pod addresses policies may select; if it is nil, they may select all.
// The view reports EndpointSlices and the readiness of nodes to gate.
func NewView(informers *client.Informers, addresses *podaddress.Index, gate *StopGate, log *slog.Logger) *View {
	v := &View{
		log: log, encodings: newEncodings(), gate: gate,
		objects: newChangeLog(maxDeletionRecords), peers: newChangeLog(maxDeletionRecords),
		feeds: make(map[string]map[*Feed]struct{}), watchers: make(map[key]map[*Feed]struct{}),
	}
	v.sliceRevision.Store(1)
	v.groups = newPolicyGroups(v, addresses)
	for k := range kindCount {
		if kinds[k].informer == nil {
			continue
		}
		inf := kinds[k].informer(informers)
		if k == kindPod {
			// This cannot fail, because the index name is unique and the informer has not started.
			if err := inf.AddIndexers(cache.Indexers{podsByNode: indexPodByNode}); err != nil {
				panic(fmt.Sprintf("fleet: index pods: %v", err))
			}
		}
		v.stores[k] = inf.GetIndexer()
		registration, err := inf.AddEventHandler(v.eventHandler(k))
		if err != nil {
			panic(fmt.Sprintf("fleet: watch %s: %v", kinds[k].name, err))
		}
		v.handlers = append(v.handlers, registration)
	}
	v.handlers = append(v.handlers, v.groups.watchInformers(informers)...)
	return v
}

func indexPodByNode(o any) ([]string, error) {
	if p, ok := o.(*v1.Pod); ok && p.Spec.NodeName != "" {
		return []string{p.Spec.NodeName}, nil
	}
	return nil, nil
}

// WaitForSync blocks until every handler has received the initial lists, or ctx ends.
func (v *View) WaitForSync(ctx context.Context) error {
	for _, h := range v.handlers {
		select {
		case <-h.HasSyncedChecker().Done():
		case <-ctx.Done():
			return fmt.Errorf("fleet: wait for informers: %w", ctx.Err())
		}
	}
	return nil
}

func (v *View) eventHandler(k kind) cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { v.handleChange(k, nil, eventObject(o)) },
		UpdateFunc: func(old, o any) { v.handleChange(k, eventObject(old), eventObject(o)) },
		DeleteFunc: func(o any) { v.handleChange(k, eventObject(o), nil) },
	}
}

// eventObject returns the API object in an informer handler's argument, or nil.
func eventObject(o any) api.Object {
	if t, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = t.Obj
	}
	obj, _ := o.(api.Object)
	return obj
}

// handleChange handles an informer event: it marks the object in every affected feed. old is nil on
// creation, current on deletion.
func (v *View) handleChange(k kind, old, current api.Object) {
	present := current // on a deletion, the last state of the object
	if present == nil {
		present = old
	}
	if present == nil {
		return
	}
	id := keyOf(k, present)
	switch {
	case k == kindNode:
		oldNode, _ := old.(*v1.Node)
		node, _ := current.(*v1.Node)
		v.groups.updateForNode(oldNode, node)
		v.handleNodeChange(id, oldNode, node)
	case kinds[k].onAllNodes:
		v.publishObject(k, current, present)
		if k == kindEndpointSlice {
			// before sessions are woken, so that the slice and its revision are sent together
			v.recordSliceRevision(id, current, wire.RevisionOf(present))
		}
		v.wakeAll()
	case k == kindPod:
		v.groups.updateForPod(old, current)
		v.markPod(id, old)
		v.markPod(id, current)
	case k == kindNetworkPolicy:
		oldPolicy, _ := old.(*networkingv1.NetworkPolicy)
		policy, _ := current.(*networkingv1.NetworkPolicy)
		v.groups.updatePolicy(id, oldPolicy, policy)
	default:
		v.markWatchers(id)
	}
	if current == nil {
		v.encodings.forgetObject(old.GetUID())
	}
	switch k {
	case kindService:
		v.groups.updateDNSAddresses(id, current)
	case kindNode:
		node, ok := current.(*v1.Node)
		v.gate.setNodeReady(id.name, ok && api.IsNodeReady(node))
		oldNode, _ := old.(*v1.Node)
		becameReady := ok && api.IsNodeReady(node) && (oldNode == nil || !api.IsNodeReady(oldNode))
		for _, f := range v.feedsOf(id.name) {
			f.subscriber.HandleNodeChange(becameReady)
		}
	}
}

// recordSliceRevision records that the log contains the change of an EndpointSlice at a revision,
// and passes the slice to the StopGate. current is nil after a deletion.
func (v *View) recordSliceRevision(id key, current api.Object, revision uint64) {
	for {
		have := v.sliceRevision.Load()
		if have >= revision || v.sliceRevision.CompareAndSwap(have, revision) {
			break
		}
	}
	slice, _ := current.(*discoveryv1.EndpointSlice)
	v.gate.updateSlice(id, slice, revision)
}

// publishObject writes an object of a kind that every node gets to the log. current is nil after a
// deletion; present is then the object's last state.
func (v *View) publishObject(k kind, current, present api.Object) {
	entry := deletionEntry(k, present)
	if current != nil {
		var err error
		if entry, err = encodeEntry(k, current); err != nil {
			v.log.Error("an object cannot be encoded and is sent to no node", "err", err)
			return
		}
	}
	v.objects.recordChange(entry)
}

// handleNodeChange marks the node's own Node in its feed. If the information about the node that
// other nodes get has changed, it writes that to the log of peers and requests a batch.
func (v *View) handleNodeChange(id key, old, current *v1.Node) {
	if old == nil || current == nil || !equalSlimNodes(old, current) {
		for _, f := range v.feedsOf(id.name) {
			f.markDirty(id)
		}
	}
	var oldPeer, peer *fleetv1.Peer
	if old != nil {
		oldPeer = buildPeer(old)
	}
	if current != nil {
		peer = buildPeer(current)
	}
	switch {
	case peer == nil && oldPeer == nil, peer != nil && oldPeer != nil && equalPeers(oldPeer, peer):
		return
	case peer == nil:
		v.peers.recordChange(deletionEntry(kindNode, old))
	default:
		entry, err := encodePeerEntry(current, peer)
		if err != nil {
			v.log.Error("a peer cannot be encoded and is sent to no node", "err", err)
			return
		}
		v.peers.recordChange(entry)
	}
	v.batches.requestBatch(v.wakeForPeers)
}

// markPod marks a pod in the feeds of its node.
func (v *View) markPod(id key, o api.Object) {
	pod, ok := o.(*v1.Pod)
	if !ok || pod == nil || pod.Spec.NodeName == "" {
		return
	}
	for _, f := range v.feedsOf(pod.Spec.NodeName) {
		f.markDirty(id)
	}
}

// feedsOf returns the feeds of a node. There is one feed, and that of a previous session until it
// is removed.
func (v *View) feedsOf(node string) []*Feed {
	v.mu.RLock()
	defer v.mu.RUnlock()
	var feeds []*Feed
	for f := range v.feeds[node] {
		feeds = append(feeds, f)
	}
	return feeds
}

// nodeKeys returns the keys of a node's own Node and of its pods.
func (v *View) nodeKeys(node string) []key {
	keys := []key{{kind: kindNode, name: node}}
	pods, _ := v.stores[kindPod].ByIndex(podsByNode, node) // never fails, because NewView has created the index
	for _, o := range pods {
		if obj, ok := o.(api.Object); ok {
			keys = append(keys, keyOf(kindPod, obj))
		}
	}
	return keys
}

// wakeAll wakes every session, which then reads the logs. It returns the number of sessions.
func (v *View) wakeAll() int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for _, feeds := range v.feeds {
		for f := range feeds {
			f.subscriber.WakeSender()
		}
	}
	return v.feedCount
}

// wakeForPeers wakes every session, which then also reads the log of peers. It returns the number
// of sessions.
func (v *View) wakeForPeers() int {
	v.peerBatches.Add(1)
	return v.wakeAll()
}

// markWatchers marks the object with a key in the feeds that hold an object that refers to it. It
// returns the number of these feeds.
func (v *View) markWatchers(id key) int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for f := range v.watchers[id] {
		f.markDirty(id)
	}
	return len(v.watchers[id])
}

func (v *View) lookUpObject(k key) (api.Object, bool) {
	switch k.kind {
	case kindAddressGroup:
		g, ok := v.groups.index.Group(k.name)
		return g, ok
	case kindNetworkPolicy:
		p, ok := v.groups.index.SentPolicy(k.namespace, k.name)
		return p, ok
	}
	o, ok, err := v.stores[k.kind].GetByKey(k.storeKey())
	if err != nil || !ok {
		return nil, false
	}
	obj, ok := o.(api.Object)
	return obj, ok
}

// Pod returns a pod from the informer cache.
func (v *View) Pod(namespace, name string) (*v1.Pod, bool) {
	o, _ := v.lookUpObject(key{kindPod, namespace, name})
	pod, ok := o.(*v1.Pod)
	return pod, ok
}

// PodsOfNode returns the pods that are bound to a node, from the informer cache.
func (v *View) PodsOfNode(node string) []*v1.Pod {
	list, _ := v.stores[kindPod].ByIndex(podsByNode, node) // never fails, because NewView has created the index
	pods := make([]*v1.Pod, 0, len(list))
	for _, o := range list {
		if pod, ok := o.(*v1.Pod); ok {
			pods = append(pods, pod)
		}
	}
	return pods
}

// Node returns a Node from the informer cache.
func (v *View) Node(name string) (*v1.Node, bool) {
	o, _ := v.lookUpObject(key{kind: kindNode, name: name})
	node, ok := o.(*v1.Node)
	return node, ok
}

// PeerCount returns the number of nodes with pods that other nodes can reach.
func (v *View) PeerCount() int { return v.peers.nodeCount() }
