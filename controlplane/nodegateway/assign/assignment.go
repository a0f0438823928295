package assign

import (
	"cmp"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// objectSource is the state from which an assignment is computed: the informer caches, the
// references between objects, and the fan-out logs.
type objectSource interface {
	// lookUpObject returns the current state of an object.
	lookUpObject(k key) (api.Object, bool)
	// listReferences returns the objects that a node needs if it holds o. The list may change
	// although o does not; the key of o is then marked as dirty.
	listReferences(o api.Object) []key
	// encodeObject returns the encoded o as it is sent to agents. The result is shared and must not
	// be modified.
	encodeObject(k kind, o api.Object) (*fleetv1.Object, error)
	// watchObject starts, and unwatchObject stops, marking the key of a referenced object as dirty.
	// After watchObject has returned, every change of the object marks its key.
	watchObject(k key)
	unwatchObject(k key)
	// readObjects and readPeers read the changes, after the request's position, of the objects that
	// every node gets. See changeLog.readSince.
	readObjects(readRequest) (now uint64, held bool, err error)
	readPeers(readRequest) (now uint64, held bool, err error)
	// batchCount returns a counter that increases when the session must read the peers again.
	batchCount() uint64
}

// assignment tracks the objects that one agent holds and computes the next change to send to it.
// The result depends only on the source's current state and on the keys that may have changed, not
// on the order of events. An assignment is not safe for concurrent use.
type assignment struct {
	node           string
	source         objectSource
	resumed        Resumption          // the objects that the agent held when it connected
	objectPosition uint64              // position in the log of objects that every node gets
	peerPosition   uint64              // position in the log of peers
	lastBatch      uint64              // value of batchCount when peers were read last
	started        bool                // computeChange was called
	held           map[key]*heldObject // objects that the agent holds, except those that every node gets
	refs           map[key]int         // number of held objects that reference the key

	// isOwnWrite reports whether this node itself caused the change of a pod's status from one
	// revision to another. Such a change is not sent back to the node.
	isOwnWrite func(uid types.UID, oldRevision, newRevision uint64) bool
}

type heldObject struct {
	uid      types.UID
	revision uint64
	refs     []key
	stopping bool // the pod was sent with a deletion timestamp
}

// Resumption describes the objects that an agent reports to hold when it connects.
type Resumption struct {
	revision uint64  // revision of its Services and EndpointSlices; 0 if it has none
	peers    *digest // digest of its peers; nil if the agent does not support peers, and gets Nodes instead
}

// NewResumption returns the Resumption for the first message of a session. revision is the revision
// of the agent's Services and EndpointSlices, or 0 if it has none. peersDigest is the digest of its
// peers.
func NewResumption(revision uint64, peersDigest []byte) Resumption {
	return Resumption{revision, parseDigest(peersDigest)}
}

func newAssignment(node string, source objectSource, resumed Resumption) *assignment {
	return &assignment{
		node: node, source: source, resumed: resumed,
		held: make(map[key]*heldObject), refs: make(map[key]int),
		isOwnWrite: func(types.UID, uint64, uint64) bool { return false },
	}
}

// change is the content of one update to an agent.
type change struct {
	shared    [][]byte // encoded fields of ObjectSet, shared by all sessions; each element is sent as one message
	peersHeld bool     // the agent already holds all peers
	upserts   []*fleetv1.Object
	deletes   []*fleetv1.Ref
	// stopping contains the terminating pods that are sent with their deletion timestamp for the
	// first time.
	stopping []types.UID
}

// computeChange returns the change to send. It evaluates the objects with the given keys, the
// references that they add or drop, and the new changes of objects that every node gets.
func (a *assignment) computeChange(keys []key) (change, error) {
	c, ups, err := a.readSharedChanges()
	if err != nil {
		return change{}, err
	}
	dropped := make(map[key]types.UID)
	for len(keys) > 0 {
		k := keys[len(keys)-1]
		keys = keys[:len(keys)-1]
		o, ok := a.source.lookUpObject(k)
		h := a.held[k]
		if !ok || !a.mustHold(k, o) {
			if h != nil {
				dropped[k] = h.uid
				delete(a.held, k)
				keys = appendVolumes(h.refs, a.updateReferences(h.refs, nil, keys))
			}
			continue
		}
		rev := wire.RevisionOf(o)
		if h != nil && h.uid == o.GetUID() && h.revision == rev {
			if refs := a.listReferences(o); k.kind == kindPod && !slices.Equal(refs, h.refs) {
				keys = a.updateReferences(h.refs, refs, keys)
				h.refs = refs
			}
			continue
		}
		if h == nil {
			h = &heldObject{}
			a.held[k] = h
		}
		if h.uid == o.GetUID() && h.revision != 0 && k.kind == kindPod && a.isOwnWrite(h.uid, h.revision, rev) {
			h.revision = rev
			continue
		}
		fresh := h.uid != o.GetUID()
		h.uid, h.revision = o.GetUID(), rev
		refs := a.listReferences(o)
		keys = appendVolumes(refs, appendVolumes(h.refs, a.updateReferences(h.refs, refs, keys)))
		h.refs = refs
		if k.kind == kindPod {
			stopping := o.GetDeletionTimestamp() != nil
			if stopping && (fresh || !h.stopping) {
				c.stopping = append(c.stopping, h.uid)
			}
			h.stopping = stopping
		}
		enc, err := a.source.encodeObject(k.kind, o)
		if err != nil {
			return change{}, err
		}
		ups = append(ups, upsert{k, enc})
	}
	c.upserts = a.sortUpserts(ups)
	for k, uid := range dropped {
		if a.held[k] == nil { // a later key of this call has not added the object again
			c.deletes = append(c.deletes,
				&fleetv1.Ref{Kind: kinds[k.kind].name, Namespace: k.namespace, Name: k.name, Uid: string(uid)})
		}
	}
	return c, nil
}

// readSharedChanges reads the new changes of the objects that every node gets, after the last read
// position.
func (a *assignment) readSharedChanges() (c change, ups []upsert, err error) {
	first := !a.started
	a.started = true
	var nodes []key // Nodes instead of peers, for an agent that does not support peers
	visit := func(entry *logEntry) {
		k := entry.key
		switch {
		case k.kind == kindNode && k.name == a.node: // the node's own Node is sent like an object that pods reference
		case entry.encoded == nil:
			name := kinds[k.kind].name
			if k.kind == kindNode && a.resumed.peers != nil {
				name = kindPeer
			}
			c.deletes = append(c.deletes,
				&fleetv1.Ref{Kind: name, Namespace: k.namespace, Name: k.name, Uid: string(entry.uid)})
		case k.kind == kindNode && a.resumed.peers == nil:
			nodes = append(nodes, k)
		case k.kind != kindNode && first && entry.revision != 0 && entry.revision <= a.resumed.revision:
			encoded, e := entry.encodeWithoutContent()
			err = cmp.Or(err, e)
			c.appendShared(encoded)
		default:
			c.appendShared(entry.encoded)
		}
	}
	var failed error
	a.objectPosition, _, failed = a.source.readObjects(readRequest{a.objectPosition, "", nil, visit})
	if err = cmp.Or(failed, err); err != nil {
		return c, nil, err
	}
	if batch := a.source.batchCount(); first || batch != a.lastBatch {
		a.lastBatch = batch
		var heldPeers *digest
		if first {
			heldPeers = a.resumed.peers
		}
		request := readRequest{a.peerPosition, a.node, heldPeers, visit}
		if a.peerPosition, c.peersHeld, err = a.source.readPeers(request); err != nil {
			return c, nil, err
		}
	}
	for _, k := range nodes {
		o, ok := a.source.lookUpObject(k)
		if !ok {
			continue // the object is deleted; a later log record contains the deletion
		}
		enc, err := a.source.encodeObject(k.kind, o)
		if err != nil {
			return c, nil, err
		}
		ups = append(ups, upsert{k, enc})
	}
	return c, ups, nil
}

// appendShared appends an encoded field that is the same for all sessions. Fields are combined into
// messages of at most partBytes.
func (c *change) appendShared(field []byte) {
	last := len(c.shared) - 1
	if last < 0 || len(c.shared[last])+len(field) > partBytes {
		c.shared, last = append(c.shared, nil), last+1
	}
	c.shared[last] = append(c.shared[last], field...)
}

type upsert struct {
	key key
	obj *fleetv1.Object
}

// sortUpserts returns the objects sorted by kind, so that objects come before the objects that
// refer to them. It omits objects that were dropped during the same call of computeChange.
func (a *assignment) sortUpserts(ups []upsert) []*fleetv1.Object {
	slices.SortStableFunc(ups, func(x, y upsert) int { return cmp.Compare(x.key.kind, y.key.kind) })
	out := make([]*fleetv1.Object, 0, len(ups))
	for _, u := range ups {
		if kinds[u.key.kind].onAllNodes || a.held[u.key] != nil {
			out = append(out, u.obj)
		}
	}
	return out
}

// listReferences returns the objects to which o refers on this node. For a PersistentVolume, they
// include its VolumeAttachment to this node.
func (a *assignment) listReferences(o api.Object) []key {
	refs := a.source.listReferences(o)
	if v, ok := o.(*v1.PersistentVolume); ok {
		if attacher, handle, ok := api.VolumeAttacher(v); ok {
			refs = append(refs, key{kindVolumeAttachment, "", api.AttachmentName(handle, attacher, a.node)})
		}
	}
	return refs
}

// mustHold reports whether the agent must hold the object o with the key k.
func (a *assignment) mustHold(k key, o api.Object) bool {
	switch k.kind {
	case kindPod:
		p, ok := o.(*v1.Pod)
		return ok && p.Spec.NodeName == a.node
	case kindNode:
		return k.name == a.node
	case kindPersistentVolume:
		v, ok := o.(*v1.PersistentVolume)
		return ok && a.isBoundToHeldClaim(k, v)
	}
	return a.refs[k] > 0
}

// isBoundToHeldClaim reports whether the volume is bound to a claim that was sent to the node, and
// the claim names the volume. A claim alone is not enough, because its author may name any volume.
// The volume determines which claim it is bound to and which Secrets are used to mount it.
func (a *assignment) isBoundToHeldClaim(k key, v *v1.PersistentVolume) bool {
	by := v.Spec.ClaimRef
	if by == nil {
		return false
	}
	claim := a.held[key{kindClaim, by.Namespace, by.Name}]
	return claim != nil && (by.UID == "" || by.UID == claim.uid) && slices.Contains(claim.refs, k)
}

// appendVolumes appends the PersistentVolumes in refs to keys. A change of a claim can change
// whether the node must hold them (isBoundToHeldClaim).
func appendVolumes(refs, keys []key) []key {
	for _, r := range refs {
		if r.kind == kindPersistentVolume {
			keys = append(keys, r)
		}
	}
	return keys
}

// updateReferences updates the reference counts when an object's references change from before to
// after. It appends to keys the references whose count has become positive or 0.
func (a *assignment) updateReferences(before, after, keys []key) []key {
	for _, r := range after {
		if a.refs[r]++; a.refs[r] == 1 {
			a.source.watchObject(r)
			keys = append(keys, r)
		}
	}
	for _, r := range before {
		if a.refs[r]--; a.refs[r] == 0 {
			delete(a.refs, r)
			a.source.unwatchObject(r)
			keys = append(keys, r)
		}
	}
	return keys
}

// unwatchAll stops all watches of the assignment.
func (a *assignment) unwatchAll() {
	for r := range a.refs {
		a.source.unwatchObject(r)
	}
	clear(a.refs)
}

// partBytes is the maximum size of one ObjectSet. It is well below gRPC's message limit.
const partBytes = 1 << 20

// splitIntoSets splits a change into ObjectSets. The last set contains the deletions, so that a
// replacement arrives before the old object is removed. If full, the sets are marked as the
// complete assignment.
func (c change) splitIntoSets(full bool) []*fleetv1.ObjectSet {
	var (
		sets []*fleetv1.ObjectSet
		cur  = &fleetv1.ObjectSet{Full: full}
		size int
	)
	if c.peersHeld {
		sets = append(sets, &fleetv1.ObjectSet{Full: full, PeersHeld: true})
	}
	for _, raw := range c.shared {
		set := &fleetv1.ObjectSet{Full: full}
		set.ProtoReflect().SetUnknown(raw) // the fields are already encoded and are sent unchanged
		sets = append(sets, set)
	}
	for _, o := range c.upserts {
		if size > 0 && size+len(o.Raw) > partBytes {
			sets = append(sets, cur)
			cur, size = &fleetv1.ObjectSet{Full: full}, 0
		}
		cur.Upserts = append(cur.Upserts, o)
		size += len(o.Raw) + 64
	}
	cur.Deletes = c.deletes
	if len(cur.Upserts)+len(cur.Deletes) > 0 {
		sets = append(sets, cur)
	}
	return sets
}
