package session

import (
	"bytes"
	"slices"
	"sync"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Shared caches decoded objects for a process that simulates many nodes. Objects that all nodes
// receive are decoded and stored once, not once per session. The zero value is ready to use. Shared
// never drops objects, so the agent of a real machine must not use it.
type Shared struct {
	mu      sync.Mutex
	objects map[objectKey]sharedObject
	peers   map[string]sharedPeer // key: node name
}

type sharedPeer struct {
	sent   *fleetv1.Peer
	stored *storedPeer
}

type sharedObject struct {
	key objectKey // its strings are shared by all sessions
	storedObject
}

// isSharable reports whether all nodes receive the same objects of the kind. Shared stores such
// objects once.
func isSharable(kind string) bool {
	return kind == "Service" || kind == "EndpointSlice"
}

// decodeShared decodes an object and returns it with its key. An object of a sharable kind that is
// already stored at the same revision is not decoded again. It may be called on a nil Shared.
func (s *Shared) decodeShared(o *fleetv1.Object) (objectKey, wireObject, error) {
	k := objectKey{o.Kind, o.Namespace, o.Name}
	if s == nil || !isSharable(o.Kind) || o.Revision == 0 {
		obj, err := decodeObject(o)
		return k, obj, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	have, ok := s.objects[k]
	if ok && have.revision == o.Revision {
		return have.key, have.object, nil
	}
	obj, err := decodeObject(o)
	if err != nil {
		return k, nil, err
	}
	if ok {
		k = have.key
	}
	if s.objects == nil {
		s.objects = make(map[objectKey]sharedObject)
	}
	s.objects[k] = sharedObject{k, storedObject{o.Revision, obj}}
	return k, obj, nil
}

// storedPeerFor converts the message p to a peer. If an equal peer is already stored, it returns
// the stored peer. It may be called on a nil Shared.
func (s *Shared) storedPeerFor(p *fleetv1.Peer) (*storedPeer, error) {
	if s == nil {
		return newStoredPeer(p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.peers[p.Name]; have.stored != nil && equalPeers(have.sent, p) {
		return have.stored, nil
	}
	h, err := newStoredPeer(p)
	if err != nil {
		return nil, err
	}
	if s.peers == nil {
		s.peers = make(map[string]sharedPeer)
	}
	s.peers[h.Name] = sharedPeer{p, h}
	return h, nil
}

// equalPeers reports whether two peer messages are equal. It returns false if a message has fields
// that this version does not know.
func equalPeers(a, b *fleetv1.Peer) bool {
	return a.Name == b.Name && a.Uid == b.Uid && slices.Equal(a.PodCidrs, b.PodCidrs) &&
		slices.Equal(a.Addresses, b.Addresses) &&
		bytes.Equal(a.WireguardKey, b.WireguardKey) &&
		len(a.ProtoReflect().GetUnknown()) == 0 && len(b.ProtoReflect().GetUnknown()) == 0
}
