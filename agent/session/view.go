package session

import (
	"context"
	"errors"
	"maps"
	"sync"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// objectKey identifies an API object in the view.
type objectKey struct{ kind, namespace, name string }

// storedObject is an API object and its revision. A stored object is never modified.
type storedObject struct {
	revision uint64
	object   wireObject
}

// objectSet is a set of API objects and peers, as received from the control plane, with its
// indexes.
type objectSet struct {
	byKind map[string]map[objectKey]storedObject
	pods   map[types.UID]*v1.Pod
	peers  map[string]*storedPeer // by name
}

func newObjectSet() *objectSet {
	return &objectSet{byKind: make(map[string]map[objectKey]storedObject), pods: make(map[types.UID]*v1.Pod), peers: make(map[string]*storedPeer)}
}

func (c *objectSet) getObject(k objectKey) (storedObject, bool) {
	h, ok := c.byKind[k.kind][k]
	return h, ok
}

func (c *objectSet) putObject(k objectKey, h storedObject) {
	c.removeObject(k)
	if c.byKind[k.kind] == nil {
		c.byKind[k.kind] = make(map[objectKey]storedObject)
	}
	c.byKind[k.kind][k] = h
	if p, ok := h.object.(*v1.Pod); ok {
		c.pods[p.UID] = p
	}
}

func (c *objectSet) removeObject(k objectKey) {
	h, ok := c.byKind[k.kind][k]
	if !ok {
		return
	}
	delete(c.byKind[k.kind], k)
	if p, ok := h.object.(*v1.Pod); ok {
		delete(c.pods, p.UID)
	}
}

// view is the node's view of the cluster: the objects that the control plane assigned to it.
// Received objects are applied immediately. Readers are notified when a batch of objects is
// complete.
type view struct {
	nodeName string // name of this node

	mu             sync.RWMutex
	current        *objectSet
	incoming       *objectSet          // the full assignment that is being received; nil if none exists
	changedKinds   map[string]struct{} // kinds with changes that readers have not been notified of
	changedObjects agent.ObjectChanges // objects with changes that readers have not been notified of
	revision       uint64
	cluster        agent.Cluster
	loaded         bool // a full assignment or a checkpoint has been loaded
	synced         chan struct{}
	confirmed      chan struct{} // closed when the first full assignment from a control plane is complete
	live           bool
	readers        map[*kindReader]struct{}
	followers      map[*follower]struct{}
	shared         *Shared                      // nil = nothing is shared with other sessions
	podsChanged    func(map[types.UID]struct{}) // called with the UIDs of all assigned pods when pods changed; called without the lock
}

func newView(node string) *view {
	return &view{
		nodeName: node, current: newObjectSet(), changedKinds: make(map[string]struct{}), synced: make(chan struct{}), confirmed: make(chan struct{}),
		readers: make(map[*kindReader]struct{}), followers: make(map[*follower]struct{}), podsChanged: func(map[types.UID]struct{}) {},
	}
}

// errObjectMissing is returned when the control plane refers to an object that this node does not
// have.
var errObjectMissing = errors.New("the control plane refers to an object that this node does not have")

// applyObjects applies set, which is a part of a full assignment or a change. It returns
// errObjectMissing if set refers by revision to an object that the view does not have.
func (v *view) applyObjects(set *fleetv1.ObjectSet) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	into := v.current
	if set.Full {
		if v.incoming == nil {
			v.incoming = newObjectSet()
		}
		into = v.incoming
	}
	if set.PeersHeld {
		into.peers = v.current.peers // not modified before the assignment is complete
	}
	for _, o := range set.Upserts {
		k := objectKey{o.Kind, o.Namespace, o.Name}
		if len(o.Raw) == 0 {
			h, ok := v.current.getObject(k)
			if !ok || h.revision != o.Revision {
				return errObjectMissing
			}
			into.putObject(k, h)
			continue
		}
		k, obj, err := v.shared.decodeShared(o)
		if err != nil {
			return err
		}
		if obj == nil {
			continue
		}
		if n, ok := obj.(*v1.Node); ok && n.Name != v.nodeName {
			if err := v.applyOtherNode(into, n, set.Full); err != nil {
				return err
			}
			continue
		}
		into.putObject(k, storedObject{o.Revision, obj})
		if !set.Full {
			v.changedKinds[o.Kind] = struct{}{}
			v.changedObjects.AddKey(agent.ObjectKey{Kind: k.kind, Namespace: k.namespace, Name: k.name})
		}
	}
	for _, p := range set.Peers {
		if err := v.setPeer(into, p); err != nil {
			return err
		}
		if !set.Full {
			v.markPeerChanged(p.Name)
		}
	}
	for _, r := range set.Deletes {
		if r.Kind == kindPeer || r.Kind == "Node" && r.Name != v.nodeName {
			v.removePeer(into, r.Name, r.Uid)
			continue
		}
		k := objectKey{r.Kind, r.Namespace, r.Name}
		if h, ok := into.getObject(k); ok && string(h.object.GetUID()) == r.Uid {
			into.removeObject(k)
			v.changedKinds[r.Kind] = struct{}{}
			v.changedObjects.AddKey(agent.ObjectKey{Kind: k.kind, Namespace: k.namespace, Name: k.name})
		}
	}
	return nil
}

// markConfirmed records that the last completed batch came from a control plane, not from a
// checkpoint. It closes the channel of Session.Confirmed.
func (v *view) markConfirmed() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.live {
		v.live = true
		close(v.confirmed)
	}
}

// completeBatch completes a batch of received objects at the revision, and notifies readers. With
// full, the batch is a full assignment, which replaces all current objects.
func (v *view) completeBatch(revision uint64, full bool) {
	v.mu.Lock()
	if full {
		if v.incoming == nil {
			v.incoming = newObjectSet()
		}
		addDifferences(v.current, v.incoming, v.changedKinds, &v.changedObjects)
		v.current, v.incoming = v.incoming, nil
	}
	v.revision = revision
	if !v.loaded {
		v.loaded = true
		close(v.synced)
	}
	changed := v.changedKinds
	v.changedKinds = make(map[string]struct{})
	for r := range v.readers {
		r.addKinds(changed)
	}
	v.changedObjects.Revision = revision
	for f := range v.followers {
		f.addChanges(v.changedObjects)
	}
	v.changedObjects = agent.ObjectChanges{}
	_, pods := changed["Pod"]
	live := make(map[types.UID]struct{})
	if pods {
		for uid := range v.current.pods {
			live[uid] = struct{}{}
		}
	}
	v.mu.Unlock()
	if pods {
		v.podsChanged(live)
	}
}

// discardIncoming drops a full assignment that has been received only in part.
func (v *view) discardIncoming() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.incoming = nil
}

// addDifferences compares the object sets a and b. It adds the kinds of differing objects to into,
// and their keys to named.
func addDifferences(a, b *objectSet, into map[string]struct{}, named *agent.ObjectChanges) {
	for _, kind := range kindNames {
		tell := func(k objectKey) {
			into[kind] = struct{}{}
			named.AddKey(agent.ObjectKey{Kind: k.kind, Namespace: k.namespace, Name: k.name})
		}
		for k, x := range a.byKind[kind] {
			if y, ok := b.byKind[kind][k]; !ok || x.revision != y.revision || x.object.GetUID() != y.object.GetUID() {
				tell(k)
			}
		}
		for k := range b.byKind[kind] {
			if _, ok := a.byKind[kind][k]; !ok {
				tell(k)
			}
		}
	}
	visitPeerDifferences(a.peers, b.peers, func(name string) {
		into[kindPeer] = struct{}{}
		named.AddKey(agent.ObjectKey{Kind: kindPeer, Name: name})
	})
}

func (v *view) setCluster(c agent.Cluster) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cluster = c
}

// kindReader is one caller of Session.Changes, with the changed kinds that it has not received.
type kindReader struct {
	mu      sync.Mutex
	pending map[string]struct{}
	wake    chan struct{}
}

func (r *kindReader) addKinds(kinds map[string]struct{}) {
	if len(kinds) == 0 {
		return
	}
	r.mu.Lock()
	maps.Copy(r.pending, kinds)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *kindReader) takeKinds() (kinds map[string]struct{}, due bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kinds = r.pending
	r.pending = make(map[string]struct{})
	return kinds, len(kinds) > 0
}

// Changes returns a channel that delivers the kinds of changed objects until ctx ends. Undelivered
// values are merged, and the first value names every kind. It implements agent.Objects.
func (s *Session) Changes(ctx context.Context) <-chan map[string]struct{} {
	out := make(chan map[string]struct{})
	r := &kindReader{pending: make(map[string]struct{}), wake: make(chan struct{}, 1)}
	v := s.view
	v.mu.Lock()
	v.readers[r] = struct{}{}
	v.mu.Unlock()
	all := make(map[string]struct{}, len(kindNames))
	for _, k := range kindNames {
		all[k] = struct{}{}
	}
	r.addKinds(all)
	go deliverPending(ctx, r.wake, r.takeKinds, out, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.readers, r)
	})
	return out
}

func viewObject[T wireObject](s *Session, kind, namespace, name string) (T, bool) {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	h, ok := s.view.current.getObject(objectKey{kind, namespace, name})
	if !ok {
		var none T
		return none, false
	}
	t, ok := h.object.(T)
	return t, ok
}

func viewObjects[T wireObject](s *Session, kind string) []T {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	out := make([]T, 0, len(s.view.current.byKind[kind]))
	for _, h := range s.view.current.byKind[kind] {
		if t, ok := h.object.(T); ok {
			out = append(out, t)
		}
	}
	return out
}

// Pod returns the pod with this UID that is assigned to this node, or false. It implements
// agent.Objects.
func (s *Session) Pod(uid types.UID) (*v1.Pod, bool) {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	p, ok := s.view.current.pods[uid]
	return p, ok
}

// Pods returns the pods that are assigned to this node. It implements agent.Objects.
func (s *Session) Pods() []*v1.Pod { return viewObjects[*v1.Pod](s, "Pod") }

// ConfigMap returns a ConfigMap from the view, or false if the view does not have it.
func (s *Session) ConfigMap(namespace, name string) (*v1.ConfigMap, bool) {
	return viewObject[*v1.ConfigMap](s, "ConfigMap", namespace, name)
}

// Secret returns a Secret from the view, or false if the view does not have it.
func (s *Session) Secret(namespace, name string) (*v1.Secret, bool) {
	return viewObject[*v1.Secret](s, "Secret", namespace, name)
}

// Claim returns a PersistentVolumeClaim from the view, or false if the view does not have it.
func (s *Session) Claim(namespace, name string) (*v1.PersistentVolumeClaim, bool) {
	return viewObject[*v1.PersistentVolumeClaim](s, "PersistentVolumeClaim", namespace, name)
}

// PersistentVolume returns a PersistentVolume from the view, or false if the view does not have it.
func (s *Session) PersistentVolume(name string) (*v1.PersistentVolume, bool) {
	return viewObject[*v1.PersistentVolume](s, "PersistentVolume", "", name)
}

// RuntimeClass returns a RuntimeClass from the view, or false if the view does not have it.
func (s *Session) RuntimeClass(name string) (*nodev1.RuntimeClass, bool) {
	return viewObject[*nodev1.RuntimeClass](s, "RuntimeClass", "", name)
}

// ResourceClaim returns a ResourceClaim from the view, or false if the view does not have it.
func (s *Session) ResourceClaim(namespace, name string) (*resourcev1.ResourceClaim, bool) {
	return viewObject[*resourcev1.ResourceClaim](s, "ResourceClaim", namespace, name)
}

// CSIDriver returns a CSIDriver from the view, or false if the view does not have it.
func (s *Session) CSIDriver(name string) (*storagev1.CSIDriver, bool) {
	return viewObject[*storagev1.CSIDriver](s, "CSIDriver", "", name)
}

// VolumeAttachment returns the VolumeAttachment of the driver's volume with this handle to this
// node, or false. It implements agent.Objects.
func (s *Session) VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool) {
	return agent.FindAttachment(viewObjects[*storagev1.VolumeAttachment](s, "VolumeAttachment"), s.cfg.NodeName, driver, handle)
}

// Services returns all Services in the view. It implements agent.Objects.
func (s *Session) Services() []*v1.Service { return viewObjects[*v1.Service](s, "Service") }

// Service returns a Service from the view, or false if the view does not have it.
func (s *Session) Service(namespace, name string) (*v1.Service, bool) {
	return viewObject[*v1.Service](s, "Service", namespace, name)
}

// EndpointSlices returns all EndpointSlices in the view. It implements agent.Objects.
func (s *Session) EndpointSlices() []*discoveryv1.EndpointSlice {
	return viewObjects[*discoveryv1.EndpointSlice](s, "EndpointSlice")
}

// EndpointSlice returns an EndpointSlice from the view, or false if the view does not have it.
func (s *Session) EndpointSlice(namespace, name string) (*discoveryv1.EndpointSlice, bool) {
	return viewObject[*discoveryv1.EndpointSlice](s, "EndpointSlice", namespace, name)
}

// NetworkPolicies returns the policies that select a pod of this node. Callers must not modify
// them. It implements agent.Objects.
func (s *Session) NetworkPolicies() []*networkingv1.NetworkPolicy {
	return viewObjects[*networkingv1.NetworkPolicy](s, "NetworkPolicy")
}

// AddressGroup returns the addresses and named ports of the pods that match a peer of a
// NetworkPolicy, or false. It implements agent.Objects.
func (s *Session) AddressGroup(name string) (*v1.Endpoints, bool) {
	return viewObject[*v1.Endpoints](s, kindAddressGroup, "", name)
}

// Node returns this node's own Node object, or false if the control plane has not sent it yet.
func (s *Session) Node() (*v1.Node, bool) { return viewObject[*v1.Node](s, "Node", "", s.cfg.NodeName) }

// Revision returns the revision up to which the view is complete. It implements agent.Objects.
func (s *Session) Revision() uint64 {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	return s.view.revision
}

// Synced returns a channel that is closed once a full assignment or a checkpoint has been loaded.
// It implements agent.Objects.
func (s *Session) Synced() <-chan struct{} { return s.view.synced }

// Confirmed returns a channel that is closed once a control plane, and not only the checkpoint, has
// confirmed the view to this process. It implements agent.Objects.
func (s *Session) Confirmed() <-chan struct{} { return s.view.confirmed }

// Cluster returns the cluster settings of the session's Welcome message. If this node's Node object
// has pod CIDRs, they replace those of the message. It implements agent.Objects.
func (s *Session) Cluster() agent.Cluster {
	own, ok := s.Node()
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	c := s.view.cluster
	if ok && own.Spec.PodCIDR != "" {
		c.PodCIDR, c.PodCIDRs = own.Spec.PodCIDR, own.Spec.PodCIDRs
	}
	return c
}
