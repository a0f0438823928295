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

// objectKey names one object of the view.
type objectKey struct{ kind, namespace, name string }

// held is one object at one revision. Both are immutable.
type held struct {
	revision uint64
	object   wireObject
}

// contents is a set of objects with its indexes.
type contents struct {
	byKind map[string]map[objectKey]held
	pods   map[types.UID]*v1.Pod
	peers  map[string]*heldPeer // by name
}

func newContents() *contents {
	return &contents{byKind: make(map[string]map[objectKey]held), pods: make(map[types.UID]*v1.Pod), peers: make(map[string]*heldPeer)}
}

func (c *contents) get(k objectKey) (held, bool) {
	h, ok := c.byKind[k.kind][k]
	return h, ok
}

func (c *contents) put(k objectKey, h held) {
	c.remove(k)
	if c.byKind[k.kind] == nil {
		c.byKind[k.kind] = make(map[objectKey]held)
	}
	c.byKind[k.kind][k] = h
	if p, ok := h.object.(*v1.Pod); ok {
		c.pods[p.UID] = p
	}
}

func (c *contents) remove(k objectKey) {
	h, ok := c.byKind[k.kind][k]
	if !ok {
		return
	}
	delete(c.byKind[k.kind], k)
	if p, ok := h.object.(*v1.Pod); ok {
		delete(c.pods, p.UID)
	}
}

// view is what the node knows of the cluster. Sets are applied as they come; readers are told when a batch is complete.
type view struct {
	node string // the own one

	mu        sync.RWMutex
	now       *contents
	next      *contents           // a full assignment on its way; nil otherwise
	changed   map[string]struct{} // kinds changed since readers were last told
	named     agent.ObjectChanges // the same, object by object
	revision  uint64
	cluster   agent.Cluster
	known     bool // a full assignment or checkpoint has been loaded
	synced    chan struct{}
	confirmed chan struct{} // closed at the first complete assignment from a control plane
	live      bool
	readers   map[*reader]struct{}
	followers map[*follower]struct{}
	shared    *Shared                      // nil = nothing is shared
	podsGone  func(map[types.UID]struct{}) // told which pods went away; called without the lock
}

func newView(node string) *view {
	return &view{
		node: node, now: newContents(), changed: make(map[string]struct{}), synced: make(chan struct{}), confirmed: make(chan struct{}),
		readers: make(map[*reader]struct{}), followers: make(map[*follower]struct{}), podsGone: func(map[types.UID]struct{}) {},
	}
}

// errNotHeld says that the control plane counts on an object that is not here.
var errNotHeld = errors.New("the control plane counts on an object that this node does not hold")

// apply takes a part of an assignment or an increment.
func (v *view) apply(set *fleetv1.ObjectSet) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	into := v.now
	if set.Full {
		if v.next == nil {
			v.next = newContents()
		}
		into = v.next
	}
	if set.PeersHeld {
		into.peers = v.now.peers // which nobody changes before the assignment is complete
	}
	for _, o := range set.Upserts {
		k := objectKey{o.Kind, o.Namespace, o.Name}
		if len(o.Raw) == 0 {
			h, ok := v.now.get(k)
			if !ok || h.revision != o.Revision {
				return errNotHeld
			}
			into.put(k, h)
			continue
		}
		k, obj, err := v.shared.decode(o)
		if err != nil {
			return err
		}
		if obj == nil {
			continue
		}
		if n, ok := obj.(*v1.Node); ok && n.Name != v.node {
			if err := v.applyNode(into, n, set.Full); err != nil {
				return err
			}
			continue
		}
		into.put(k, held{o.Revision, obj})
		if !set.Full {
			v.changed[o.Kind] = struct{}{}
			v.named.AddKey(agent.ObjectKey{Kind: k.kind, Namespace: k.namespace, Name: k.name})
		}
	}
	for _, p := range set.Peers {
		if err := v.putPeer(into, p); err != nil {
			return err
		}
		if !set.Full {
			v.peerChanged(p.Name)
		}
	}
	for _, r := range set.Deletes {
		if r.Kind == kindPeer || r.Kind == "Node" && r.Name != v.node {
			v.removePeer(into, r.Name, r.Uid)
			continue
		}
		k := objectKey{r.Kind, r.Namespace, r.Name}
		if h, ok := into.get(k); ok && string(h.object.GetUID()) == r.Uid {
			into.remove(k)
			v.changed[r.Kind] = struct{}{}
			v.named.AddKey(agent.ObjectKey{Kind: k.kind, Namespace: k.namespace, Name: k.name})
		}
	}
	return nil
}

// confirm says that what complete has just shown came from a control plane.
func (v *view) confirm() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if !v.live {
		v.live = true
		close(v.confirmed)
	}
}

// complete ends a batch: a full assignment replaces what was held, and readers are told.
func (v *view) complete(revision uint64, full bool) {
	v.mu.Lock()
	if full {
		if v.next == nil {
			v.next = newContents()
		}
		differing(v.now, v.next, v.changed, &v.named)
		v.now, v.next = v.next, nil
	}
	v.revision = revision
	if !v.known {
		v.known = true
		close(v.synced)
	}
	changed := v.changed
	v.changed = make(map[string]struct{})
	for r := range v.readers {
		r.tell(changed)
	}
	v.named.Revision = revision
	for f := range v.followers {
		f.tell(v.named)
	}
	v.named = agent.ObjectChanges{}
	_, pods := changed["Pod"]
	live := make(map[types.UID]struct{})
	if pods {
		for uid := range v.now.pods {
			live[uid] = struct{}{}
		}
	}
	v.mu.Unlock()
	if pods {
		v.podsGone(live)
	}
}

// discard forgets a full assignment that did not arrive whole.
func (v *view) discard() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.next = nil
}

// differing adds the kinds, and the objects, of which the two differ.
func differing(a, b *contents, into map[string]struct{}, named *agent.ObjectChanges) {
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
	differingPeers(a.peers, b.peers, func(name string) {
		into[kindPeer] = struct{}{}
		named.AddKey(agent.ObjectKey{Kind: kindPeer, Name: name})
	})
}

func (v *view) setCluster(c agent.Cluster) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cluster = c
}

// reader is one listener of Changes.
type reader struct {
	mu      sync.Mutex
	pending map[string]struct{}
	wake    chan struct{}
}

func (r *reader) tell(kinds map[string]struct{}) {
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

func (r *reader) take() (kinds map[string]struct{}, due bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	kinds = r.pending
	r.pending = make(map[string]struct{})
	return kinds, len(kinds) > 0
}

// Changes implements agent.Objects.
func (s *Session) Changes(ctx context.Context) <-chan map[string]struct{} {
	out := make(chan map[string]struct{})
	r := &reader{pending: make(map[string]struct{}), wake: make(chan struct{}, 1)}
	v := s.view
	v.mu.Lock()
	v.readers[r] = struct{}{}
	v.mu.Unlock()
	all := make(map[string]struct{}, len(kindNames))
	for _, k := range kindNames {
		all[k] = struct{}{}
	}
	r.tell(all)
	go deliver(ctx, r.wake, r.take, out, func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		delete(v.readers, r)
	})
	return out
}

func get[T wireObject](s *Session, kind, namespace, name string) (T, bool) {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	h, ok := s.view.now.get(objectKey{kind, namespace, name})
	if !ok {
		var none T
		return none, false
	}
	t, ok := h.object.(T)
	return t, ok
}

func list[T wireObject](s *Session, kind string) []T {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	out := make([]T, 0, len(s.view.now.byKind[kind]))
	for _, h := range s.view.now.byKind[kind] {
		if t, ok := h.object.(T); ok {
			out = append(out, t)
		}
	}
	return out
}

// Pod implements agent.Objects.
func (s *Session) Pod(uid types.UID) (*v1.Pod, bool) {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	p, ok := s.view.now.pods[uid]
	return p, ok
}

// Pods implements agent.Objects.
func (s *Session) Pods() []*v1.Pod { return list[*v1.Pod](s, "Pod") }

// ConfigMap implements agent.Objects.
func (s *Session) ConfigMap(namespace, name string) (*v1.ConfigMap, bool) {
	return get[*v1.ConfigMap](s, "ConfigMap", namespace, name)
}

// Secret implements agent.Objects.
func (s *Session) Secret(namespace, name string) (*v1.Secret, bool) {
	return get[*v1.Secret](s, "Secret", namespace, name)
}

// Claim implements agent.Objects.
func (s *Session) Claim(namespace, name string) (*v1.PersistentVolumeClaim, bool) {
	return get[*v1.PersistentVolumeClaim](s, "PersistentVolumeClaim", namespace, name)
}

// PersistentVolume implements agent.Objects.
func (s *Session) PersistentVolume(name string) (*v1.PersistentVolume, bool) {
	return get[*v1.PersistentVolume](s, "PersistentVolume", "", name)
}

// RuntimeClass implements agent.Objects.
func (s *Session) RuntimeClass(name string) (*nodev1.RuntimeClass, bool) {
	return get[*nodev1.RuntimeClass](s, "RuntimeClass", "", name)
}

// ResourceClaim implements agent.Objects.
func (s *Session) ResourceClaim(namespace, name string) (*resourcev1.ResourceClaim, bool) {
	return get[*resourcev1.ResourceClaim](s, "ResourceClaim", namespace, name)
}

// CSIDriver implements agent.Objects.
func (s *Session) CSIDriver(name string) (*storagev1.CSIDriver, bool) {
	return get[*storagev1.CSIDriver](s, "CSIDriver", "", name)
}

// VolumeAttachment implements agent.Objects.
func (s *Session) VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool) {
	return agent.FindAttachment(list[*storagev1.VolumeAttachment](s, "VolumeAttachment"), s.cfg.NodeName, driver, handle)
}

// Services implements agent.Objects.
func (s *Session) Services() []*v1.Service { return list[*v1.Service](s, "Service") }

// Service implements agent.Objects.
func (s *Session) Service(namespace, name string) (*v1.Service, bool) {
	return get[*v1.Service](s, "Service", namespace, name)
}

// EndpointSlices implements agent.Objects.
func (s *Session) EndpointSlices() []*discoveryv1.EndpointSlice {
	return list[*discoveryv1.EndpointSlice](s, "EndpointSlice")
}

// EndpointSlice implements agent.Objects.
func (s *Session) EndpointSlice(namespace, name string) (*discoveryv1.EndpointSlice, bool) {
	return get[*discoveryv1.EndpointSlice](s, "EndpointSlice", namespace, name)
}

// NetworkPolicies implements agent.Objects.
func (s *Session) NetworkPolicies() []*networkingv1.NetworkPolicy {
	return list[*networkingv1.NetworkPolicy](s, "NetworkPolicy")
}

// AddressGroup implements agent.Objects.
func (s *Session) AddressGroup(name string) (*v1.Endpoints, bool) {
	return get[*v1.Endpoints](s, kindAddressGroup, "", name)
}

// Node implements agent.Objects.
func (s *Session) Node() (*v1.Node, bool) { return get[*v1.Node](s, "Node", "", s.cfg.NodeName) }

// Revision implements agent.Objects.
func (s *Session) Revision() uint64 {
	s.view.mu.RLock()
	defer s.view.mu.RUnlock()
	return s.view.revision
}

// Synced implements agent.Objects.
func (s *Session) Synced() <-chan struct{} { return s.view.synced }

// Confirmed implements agent.Objects.
func (s *Session) Confirmed() <-chan struct{} { return s.view.confirmed }

// Cluster implements agent.Objects. The pod CIDR is that of the node's own object once it has one.
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
