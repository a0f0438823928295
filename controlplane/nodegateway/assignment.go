package nodegateway

import (
	"cmp"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// objectSource is what an assignment is computed from.
type objectSource interface {
	// lookup returns the present state of an object.
	lookup(k key) (api.Object, bool)
	// references lists what a node must hold besides an object because it holds that. It may become another list while the
	// object stays as it is; then its key is marked.
	references(o api.Object) []key
	// encoded returns its wire form, shared.
	encoded(k kind, o api.Object) (*fleetv1.Object, error)
	// watch and unwatch say that changes of a referenced object matter from now on, or no more. After watch
	// returned, every change marks the key dirty.
	watch(k key)
	unwatch(k key)
	// objects and peers tell what has changed of what every node is told (board.read).
	objects(reader) (now uint64, held bool, err error)
	peers(reader) (now uint64, held bool, err error)
	// wave is another number when it is time to look for peers.
	wave() uint64
}

// assignment knows what one agent holds and computes what it must be told next. It is a pure
// function of the source's present state and the set of keys that may have changed: it
// never cares which events led there. One goroutine uses it.
type assignment struct {
	node string
	src  objectSource
	has  resumption          // what the agent held when it came
	read uint64              // of the objects that every node is told
	met  uint64              // of peers
	wave uint64              // when it looked for them
	sent bool                // something, or that there is nothing
	held map[key]*heldObject // of what it holds besides
	refs map[key]int         // how many held objects reference the key

	// echo tells, per pod, of a status that this node wrote itself: the step from one revision to the
	// next need not be sent back to where it came from.
	echo func(uid types.UID, from, to uint64) bool
}

type heldObject struct {
	uid      types.UID
	revision uint64
	refs     []key
	stopping bool // a pod whose deletion the agent knows of
}

// resumption is what an agent says that it holds.
type resumption struct {
	revision uint64  // of Services and EndpointSlices; 0 = none of them
	peers    *digest // of other nodes; nil: it does not know peers, and is told of Nodes
}

func newAssignment(node string, src objectSource, has resumption) *assignment {
	return &assignment{
		node: node, src: src, has: has,
		held: make(map[key]*heldObject), refs: make(map[key]int),
		echo: func(types.UID, uint64, uint64) bool { return false },
	}
}

// change is what one flush sends.
type change struct {
	shared  [][]byte // fields of ObjectSets, encoded once for all sessions; each for a message of its own
	held    bool     // the agent holds all peers
	upserts []*fleetv1.Object
	deletes []*fleetv1.Ref
	// stopping are the pods of which the agent learns by this change that they terminate.
	stopping []types.UID
}

// step looks at the keys, at all that they newly lead to, and at what has changed for everyone.
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
		if a.held[k] == nil { // not taken up again by a later key of this step
			c.deletes = append(c.deletes, &fleetv1.Ref{Kind: kinds[k.kind].name, Namespace: k.namespace, Name: k.name, Uid: string(uid)})
		}
	}
	return c, nil
}

// everyones reads on where it stopped the last time.
func (a *assignment) everyones() (c change, ups []upsert, err error) {
	first := !a.sent
	a.sent = true
	var whole []key // of Nodes, for an agent that does not know peers
	take := func(n *notice) {
		k := n.key
		switch {
		case k.kind == kindNode && k.name == a.node: // held like what pods reference
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
			continue // a later post says so
		}
		enc, err := a.src.encoded(k.kind, o)
		if err != nil {
			return c, nil, err
		}
		ups = append(ups, upsert{k, enc})
	}
	return c, ups, nil
}

// share adds what all sessions are sent alike.
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

// ordered sorts by kind, referenced kinds first, and drops what was withdrawn within the same step.
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

// references are those of an object on this node: a volume leads to what attaches it here as well.
func (a *assignment) references(o api.Object) []key {
	refs := a.src.references(o)
	if v, ok := o.(*v1.PersistentVolume); ok {
		if attacher, handle, ok := api.Attachable(v); ok {
			refs = append(refs, key{kindVolumeAttachment, "", api.AttachmentName(handle, attacher, a.node)})
		}
	}
	return refs
}

// wants says whether this node must hold the object.
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

// bound says whether a volume is that of a claim which the node holds. Anybody who makes claims may name any volume; which
// claim gets it, and the Secrets by which it is mounted, the volume says.
func (a *assignment) bound(k key, v *v1.PersistentVolume) bool {
	by := v.Spec.ClaimRef
	if by == nil {
		return false
	}
	claim := a.held[key{kindClaim, by.Namespace, by.Name}]
	return claim != nil && (by.UID == "" || by.UID == claim.uid) && slices.Contains(claim.refs, k)
}

// volumesOf appends the volumes among the references of a claim: whether the node must hold one depends on the claim (bound).
func volumesOf(refs, keys []key) []key {
	for _, r := range refs {
		if r.kind == kindPersistentVolume {
			keys = append(keys, r)
		}
	}
	return keys
}

// swapRefs counts the references of a changed object and appends to keys those to look at again.
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

// release gives up every watch.
func (a *assignment) release() {
	for r := range a.refs {
		a.src.unwatch(r)
	}
	clear(a.refs)
}

// partBytes bounds one ObjectSet, well below gRPC's message limit.
const partBytes = 1 << 20

// parts cuts a change into ObjectSets; deletes travel with the last one, so that nothing is
// withdrawn before what replaces it is there.
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
		set.ProtoReflect().SetUnknown(raw) // fields that are encoded already are sent as they are
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
