package session

import (
	"errors"
	"sync"

	v1 "k8s.io/api/core/v1"
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
	return &objectSet{byKind: make(map[string]map[objectKey]storedObject), pods: make(map[types.UID]*v1.Pod),
		peers: make(map[string]*storedPeer)}
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

// view is the node's view of the cluster: its copy of the objects that the control plane assigned
// to it. Received objects are applied immediately. Readers are notified when a batch of objects is
// complete.
type view struct {
	nodeName string // name of this node

	mu        sync.RWMutex
	current   *objectSet
	incoming  *objectSet // full assignment that is being received; nil between full assignments
	changes   changeNotifier
	revision  uint64
	cluster   agent.Cluster
	loaded    bool // a full assignment or a checkpoint has been loaded
	synced    chan struct{}
	confirmed chan struct{} // closed when the first full assignment from a control plane is complete
	live      bool
	shared    *Shared // nil = nothing is shared with other sessions
	// called with the UIDs of all assigned pods when pods changed; called without the lock
	podsChanged func(map[types.UID]struct{})
}

func newView(node string) *view {
	return &view{
		nodeName: node, current: newObjectSet(), changes: newChangeNotifier(), synced: make(chan struct{}),
		confirmed:   make(chan struct{}),
		podsChanged: func(map[types.UID]struct{}) {},
	}
}

// errObjectMissing is returned when the control plane refers to an object that this node does not
// have.
var errObjectMissing = errors.New("the control plane refers to an object that this node does not have")

// applyObjects applies set, which is a part of a full assignment or of a change, to the view. It
// returns errObjectMissing if set refers by revision to an object that the view does not have.
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
			v.changes.recordChange(agent.ObjectKey{Kind: k.kind, Namespace: k.namespace, Name: k.name})
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
			v.changes.recordChange(agent.ObjectKey{Kind: k.kind, Namespace: k.namespace, Name: k.name})
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

// completeBatch completes a batch of received objects and notifies readers. The view is then
// complete up to the revision. full means that the batch is a full assignment, which replaces all
// current objects.
func (v *view) completeBatch(revision uint64, full bool) {
	v.mu.Lock()
	if full {
		if v.incoming == nil {
			v.incoming = newObjectSet()
		}
		visitDifferences(v.current, v.incoming, v.changes.recordChange)
		v.current, v.incoming = v.incoming, nil
	}
	v.revision = revision
	if !v.loaded {
		v.loaded = true
		close(v.synced)
	}
	changed := v.changes.publishBatch(revision)
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

// visitDifferences calls visit with the key of each object and peer that differs between the object
// sets a and b.
func visitDifferences(a, b *objectSet, visit func(agent.ObjectKey)) {
	for _, kind := range kindNames {
		tell := func(k objectKey) {
			visit(agent.ObjectKey{Kind: k.kind, Namespace: k.namespace, Name: k.name})
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
		visit(agent.ObjectKey{Kind: kindPeer, Name: name})
	})
}

func (v *view) setCluster(c agent.Cluster) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.cluster = c
}
