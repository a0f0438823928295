package session

import (
	"bytes"
	"slices"
	"sync"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Shared is for processes that are many nodes: what all of these are sent alike is decoded once and held once. Otherwise
// each session of such a process would hold the whole cluster's nodes and Services for itself. The zero value is ready to
// use; it forgets nothing, and is not for the agent of a machine.
type Shared struct {
	mu    sync.Mutex
	held  map[objectKey]sharedObject
	peers map[string]sharedPeer // by name
}

type sharedPeer struct {
	sent *fleetv1.Peer
	held *heldPeer
}

type sharedObject struct {
	key objectKey // whose strings all sessions have in common
	held
}

// sharable are the kinds of which every node is sent the same.
func sharable(kind string) bool {
	return kind == "Service" || kind == "EndpointSlice"
}

// decode is decode, with the key of the object. It may be called on nil.
func (s *Shared) decode(o *fleetv1.Object) (objectKey, wireObject, error) {
	k := objectKey{o.Kind, o.Namespace, o.Name}
	if s == nil || !sharable(o.Kind) || o.Revision == 0 {
		obj, err := decode(o)
		return k, obj, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	have, ok := s.held[k]
	if ok && have.revision == o.Revision {
		return have.key, have.object, nil
	}
	obj, err := decode(o)
	if err != nil {
		return k, nil, err
	}
	if ok {
		k = have.key
	}
	if s.held == nil {
		s.held = make(map[objectKey]sharedObject)
	}
	s.held[k] = sharedObject{k, held{o.Revision, obj}}
	return k, obj, nil
}

// peer is newHeldPeer. It may be called on nil.
func (s *Shared) peer(p *fleetv1.Peer) (*heldPeer, error) {
	if s == nil {
		return newHeldPeer(p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if have := s.peers[p.Name]; have.held != nil && samePeer(have.sent, p) {
		return have.held, nil
	}
	h, err := newHeldPeer(p)
	if err != nil {
		return nil, err
	}
	if s.peers == nil {
		s.peers = make(map[string]sharedPeer)
	}
	s.peers[h.Name] = sharedPeer{p, h}
	return h, nil
}

// samePeer says whether the two say the same, and nothing that only a later version knows.
func samePeer(a, b *fleetv1.Peer) bool {
	return a.Name == b.Name && a.Uid == b.Uid && slices.Equal(a.PodCidrs, b.PodCidrs) && slices.Equal(a.Addresses, b.Addresses) &&
		bytes.Equal(a.WireguardKey, b.WireguardKey) &&
		len(a.ProtoReflect().GetUnknown()) == 0 && len(b.ProtoReflect().GetUnknown()) == 0
}
