package nodegateway

import (
	"cmp"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// objectSource is the state from which an assignment is computed: informer stores, references and
// fan-out logs.
type objectSource interface {
	// lookup returns the present state of an object.
	lookup(k key) (api.Object, bool)
	// references lists the objects that a node must hold because it holds o. The list may change
	// although o does not; o's key is then marked dirty.
	references(o api.Object) []key
	// encoded returns the wire form of o. The result is shared and must not be modified.
	encoded(k kind, o api.Object) (*fleetv1.Object, error)
	// watch and unwatch start and stop marking a referenced object. After watch has returned, every
	// change of the object marks its key dirty.
	watch(k key)
	unwatch(k key)
	// objects and peers read the changes of the objects that every node gets since reader.at, see
	// board.read.
	objects(reader) (now uint64, held bool, err error)
	peers(reader) (now uint64, held bool, err error)
	// wave returns a counter that increases when the session has to read the peers again.
	wave() uint64
}

// assignment tracks the objects that one agent holds and computes the next change to send. The
// result depends only on the source's present state and on the keys that may have changed, not on
// the order of events. It is not safe for concurrent use.
type assignment struct {
	node string
	src  objectSource
	has  resumption          // the objects that the agent held when it connected
	read uint64              // position in the log of objects that every node gets
	met  uint64              // position in the log of peers
	wave uint64              // value of objectSource.wave when peers were last read
	sent bool                // true after the first step
	held map[key]*heldObject // objects held besides those that every node gets
	refs map[key]int         // number of held objects that reference the key

	// echo reports whether this node itself caused the change of a pod's status from one revision
	// to another. Such a change is not sent back to the node.
	echo func(uid types.UID, from, to uint64) bool
}

type heldObject struct {
	uid      types.UID
	revision uint64
	refs     []key
	stopping bool // the agent has been sent the pod with a deletion timestamp
}

// resumption describes the objects that an agent claims to hold when it connects.
type resumption struct {
	revision uint64  // revision of its Services and EndpointSlices; 0 = none held
	peers    *digest // digest of its peers; nil: the agent does not support peers and gets Nodes
}

func newAssignment(node string, src objectSource, has resumption) *assignment {
	return &assignment{
		node: node, src: src, has: has,
		held: make(map[key]*heldObject), refs: make(map[key]int),
		echo: func(types.UID, uint64, uint64) bool { return false },
	}
}

// change is the content of one update to an agent.
type change struct {
	shared  [][]byte // encoded fields of ObjectSet, shared by all sessions; each element is a message of its own
	held    bool     // the agent already holds all peers
	upserts []*fleetv1.Object
	deletes []*fleetv1.Ref
	// stopping lists the terminating pods of which the agent has not been sent the deletion
	// timestamp before.
	stopping []types.UID
}

// step evaluates the given keys, the references that they add or drop, and the new changes of
// objects that every node gets. It returns the resulting change.
func (a *assignment) step(keys []key) (change, error) {
	c, ups, err := a.everyones()
	if err != nil {
		return change{}, err
	}
	gone := make(map[key]types.UID)
	for len(keys) > 0 {
		k := keys[len(keys)-1]
		keys = keys[:len(keys)-1]
		o, ok := a.src.lookup(k)
		h := a.held[k]
		if !ok || !a.wants(k, o) {
			if h != nil {
				gone[k] = h.uid
				delete(a.held, k)
				keys = volumesOf(h.refs, a.swapRefs(h.refs, nil, keys))
			}
			continue
		}
		rev := revisionOf(o)
		if h != nil && h.uid == o.GetUID() && h.revision == rev {
			if refs := a.references(o); k.kind == kindPod && !slices.Equal(refs, h.refs) {
				keys = a.swapRefs(h.refs, refs, keys)
				h.refs = refs
			}
			continue
		}
		if h == nil {
			h = &heldObject{}
			a.held[k] = h
		}
		if h.uid == o.GetUID() && h.revision != 0 && k.kind == kindPod && a.echo(h.uid, h.revision, rev) {
			h.revision = rev
			continue
		}
		fresh := h.uid != o.GetUID()
		h.uid, h.revision = o.GetUID(), rev
		refs := a.references(o)
		keys = volumesOf(refs, volumesOf(h.refs, a.swapRefs(h.refs, refs, keys)))
		h.refs = refs
		if k.kind == kindPod {
			stopping := o.GetDeletionTimestamp() != nil
			if stopping && (fresh || !h.stopping) {
				c.stopping = append(c.stopping, h.uid)
			}
			h.stopping = stopping
		}
		enc, err := a.src.encoded(k.kind, o)
		if err != nil {
			return change{}, err
		}
		ups = append(ups, upsert{k, enc})
	}
	c.upserts = a.ordered(ups)
	for k, uid := range gone {
		if a.held[k] == nil { // not added again by a later key of this step
			c.deletes = append(c.deletes, &fleetv1.Ref{Kind: kinds[k.kind].name, Namespace: k.namespace, Name: k.name, Uid: string(uid)})
		}
	}
	return c, nil
}

// everyones reads the changes of objects that every node gets, from the last position.
func (a *assignment) everyones() (c change, ups []upsert, err error) {
	first := !a.sent
	a.sent = true
	var whole []key // Nodes, for an agent that does not support peers
	take := func(n *notice) {
		k := n.key
		switch {
		case k.kind == kindNode && k.name == a.node: // the node's own Node is held like an object that pods reference
		case n.wire == nil:
			name := kinds[k.kind].name
			if k.kind == kindNode && a.has.peers != nil {
				name = kindPeer
			}
			c.deletes = append(c.deletes, &fleetv1.Ref{Kind: name, Namespace: k.namespace, Name: k.name, Uid: string(n.uid)})
		case k.kind == kindNode && a.has.peers == nil:
			whole = append(whole, k)
		case k.kind != kindNode && first && n.revision != 0 && n.revision <= a.has.revision:
			wire, e := n.thin()
			err = cmp.Or(err, e)
			c.share(wire)
		default:
			c.share(n.wire)
		}
	}
	var failed error
	a.read, _, failed = a.src.objects(reader{a.read, "", nil, take})
	if err = cmp.Or(failed, err); err != nil {
		return c, nil, err
	}
	if wave := a.src.wave(); first || wave != a.wave {
		a.wave = wave
		var holds *digest
		if first {
			holds = a.has.peers
		}
		if a.met, c.held, err = a.src.peers(reader{a.met, a.node, holds, take}); err != nil {
			return c, nil, err
		}
	}
	for _, k := range whole {
		o, ok := a.src.lookup(k)
		if !ok {
			continue // deleted; a later log record carries the deletion
		}
		enc, err := a.src.encoded(k.kind, o)
		if err != nil {
			return c, nil, err
		}
		ups = append(ups, upsert{k, enc})
	}
	return c, ups, nil
}

// share appends a field that is the same for all sessions, in messages of at most partBytes.
func (c *change) share(wire []byte) {
	last := len(c.shared) - 1
	if last < 0 || len(c.shared[last])+len(wire) > partBytes {
		c.shared, last = append(c.shared, nil), last+1
	}
	c.shared[last] = append(c.shared[last], wire...)
}

type upsert struct {
	key key
	obj *fleetv1.Object
}

// ordered sorts by kind, referenced kinds first. It omits objects that were dropped within the same
// step.
func (a *assignment) ordered(ups []upsert) []*fleetv1.Object {
	slices.SortStableFunc(ups, func(x, y upsert) int { return cmp.Compare(x.key.kind, y.key.kind) })
	out := make([]*fleetv1.Object, 0, len(ups))
	for _, u := range ups {
		if kinds[u.key.kind].everyone || a.held[u.key] != nil {
			out = append(out, u.obj)
		}
	}
	return out
}

// references returns the references of o on this node. For a PersistentVolume, that includes its
// VolumeAttachment to this node.
func (a *assignment) references(o api.Object) []key {
	refs := a.src.references(o)
	if v, ok := o.(*v1.PersistentVolume); ok {
		if attacher, handle, ok := api.Attachable(v); ok {
			refs = append(refs, key{kindVolumeAttachment, "", api.AttachmentName(handle, attacher, a.node)})
		}
	}
	return refs
}

// wants reports whether this node must hold the object.
func (a *assignment) wants(k key, o api.Object) bool {
	switch k.kind {
	case kindPod:
		p, ok := o.(*v1.Pod)
		return ok && p.Spec.NodeName == a.node
	case kindNode:
		return k.name == a.node
	case kindPersistentVolume:
		v, ok := o.(*v1.PersistentVolume)
		return ok && a.bound(k, v)
	}
	return a.refs[k] > 0
}

// bound reports whether the volume is bound to a claim that the node holds and that names the
// volume. A claim alone is not enough: its author may name any volume. The volume decides which
// claim it is bound to and which Secrets mount it.
func (a *assignment) bound(k key, v *v1.PersistentVolume) bool {
	by := v.Spec.ClaimRef
	if by == nil {
		return false
	}
	claim := a.held[key{kindClaim, by.Namespace, by.Name}]
	return claim != nil && (by.UID == "" || by.UID == claim.uid) && slices.Contains(claim.refs, k)
}

// volumesOf appends the PersistentVolumes in refs to keys. A claim's change can change whether the
// node must hold them (bound).
func volumesOf(refs, keys []key) []key {
	for _, r := range refs {
		if r.kind == kindPersistentVolume {
			keys = append(keys, r)
		}
	}
	return keys
}

// swapRefs updates the reference counts when an object's references change from before to after. It
// appends to keys the references that became used or unused.
func (a *assignment) swapRefs(before, after, keys []key) []key {
	for _, r := range after {
		if a.refs[r]++; a.refs[r] == 1 {
			a.src.watch(r)
			keys = append(keys, r)
		}
	}
	for _, r := range before {
		if a.refs[r]--; a.refs[r] == 0 {
			delete(a.refs, r)
			a.src.unwatch(r)
			keys = append(keys, r)
		}
	}
	return keys
}

// release stops all watches of the assignment.
func (a *assignment) release() {
	for r := range a.refs {
		a.src.unwatch(r)
	}
	clear(a.refs)
}

// partBytes bounds the size of one ObjectSet, well below gRPC's message limit.
const partBytes = 1 << 20

// parts splits a change into ObjectSets. Deletions are in the last one, so that a replacement
// arrives before the old object is removed. With full, the sets are marked as the complete
// assignment.
func (c change) parts(full bool) []*fleetv1.ObjectSet {
	var (
		sets []*fleetv1.ObjectSet
		cur  = &fleetv1.ObjectSet{Full: full}
		size int
	)
	if c.held {
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
