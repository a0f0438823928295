package nodegateway

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/policy"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// podsByNode is the informer index of pods by the node they are bound to.
const podsByNode = "fleet.podsByNode"

// view maps informer events to changed keys of the affected sessions. An event costs a look-up and
// a mark; each session's goroutine encodes and sends.
//
// No change is lost, because of the order. A session registers (join, watch) before it reads the
// informers' stores. The stores change before the handlers are called. The handlers write to the
// board before they wake sessions.
type view struct {
	stores   [kindCount]cache.Indexer
	handlers []cache.ResourceEventHandlerRegistration
	log      *slog.Logger
	enc      *encodings
	gate     *gate
	board    *board
	peers    *board
	waves    waves
	waved    atomic.Uint64 // number of waves sent

	policies   *policy.Index
	addresses  *podaddress.Index // nil: all reported pod addresses are valid
	namespaces cache.Indexer
	regroup    regroup

	// routed is the revision up to which the board contains all EndpointSlice changes.
	routed atomic.Uint64

	mu       sync.RWMutex
	sessions map[string]*session
	interest map[key]map[*session]struct{}
}

func newView(i *client.Informers, addresses *podaddress.Index, g *gate, log *slog.Logger) *view {
	v := &view{
		log: log, addresses: addresses, enc: newEncodings(), gate: g, board: newBoard(mostGone), peers: newBoard(mostGone),
		sessions: make(map[string]*session),
		interest: make(map[key]map[*session]struct{}),
	}
	v.routed.Store(1)
	v.policies = policy.New(policySource{v})
	for k := range kindCount {
		if kinds[k].informer == nil {
			continue
		}
		inf := kinds[k].informer(i)
		if k == kindPod {
			// The index name is unique and the informer has not started: this cannot fail.
			if err := inf.AddIndexers(cache.Indexers{podsByNode: indexPodByNode}); err != nil {
				panic(fmt.Sprintf("fleet: index pods: %v", err))
			}
		}
		v.stores[k] = inf.GetIndexer()
		reg, err := inf.AddEventHandler(v.handler(k))
		if err != nil {
			panic(fmt.Sprintf("fleet: watch %s: %v", kinds[k].name, err))
		}
		v.handlers = append(v.handlers, reg)
	}
	v.watchNamespaces(i)
	v.watchRanges(i)
	return v
}

func indexPodByNode(o any) ([]string, error) {
	if p, ok := o.(*v1.Pod); ok && p.Spec.NodeName != "" {
		return []string{p.Spec.NodeName}, nil
	}
	return nil, nil
}

// waitForSync blocks until every handler has received the initial lists.
func (v *view) waitForSync(ctx context.Context) error {
	for _, h := range v.handlers {
		select {
		case <-h.HasSyncedChecker().Done():
		case <-ctx.Done():
			return fmt.Errorf("fleet: wait for informers: %w", ctx.Err())
		}
	}
	return nil
}

func (v *view) handler(k kind) cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { v.changed(k, nil, object(o)) },
		UpdateFunc: func(old, o any) { v.changed(k, object(old), object(o)) },
		DeleteFunc: func(o any) { v.changed(k, object(o), nil) },
	}
}

// object returns the API object in a handler's argument, or nil.
func object(o any) api.Object {
	if t, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = t.Obj
	}
	obj, _ := o.(api.Object)
	return obj
}

// changed handles an informer event and marks the object in every affected session. old is nil on
// creation, now on deletion.
func (v *view) changed(k kind, old, now api.Object) {
	any := now
	if any == nil {
		any = old
	}
	if any == nil {
		return
	}
	id := keyOf(k, any)
	switch {
	case k == kindNode:
		was, _ := old.(*v1.Node)
		is, _ := now.(*v1.Node)
		v.addressesChanged(was, is)
		v.nodeChanged(id, old, now)
	case kinds[k].everyone:
		v.post(k, now, any)
		if k == kindEndpointSlice {
			v.route(id, now, revisionOf(any)) // before sessions wake: the slice and its revision must be sent together
		}
		v.tellAll()
	case k == kindPod:
		v.podChanged(old, now)
		v.markPod(id, old)
		v.markPod(id, now)
	case k == kindNetworkPolicy:
		v.policyChanged(id, old, now)
	default:
		v.markInterested(id)
	}
	if now == nil {
		v.enc.forget(old.GetUID())
	}
	switch k {
	case kindService:
		v.dnsChanged(id, now)
	case kindNode:
		n, ok := now.(*v1.Node)
		v.gate.nodeReady(id.name, ok && nodeIsReady(n))
		if s := v.session(id.name); s != nil {
			s.syncNode() // the stored Node may differ from the agent's report
			if was, _ := old.(*v1.Node); ok && nodeIsReady(n) && (was == nil || !nodeIsReady(was)) {
				s.uphold(v.keysOf(id.name)) // the pods may have been marked as not ready in the meantime
			}
		}
	}
}

// route records that the board contains an EndpointSlice change of revision rev, and passes it to
// the gate. now is nil after a deletion.
func (v *view) route(id key, now api.Object, rev uint64) {
	for {
		have := v.routed.Load()
		if have >= rev || v.routed.CompareAndSwap(have, rev) {
			break
		}
	}
	slice, _ := now.(*discoveryv1.EndpointSlice)
	v.gate.slice(id, slice, rev)
}

// post writes an object of a kind that every node gets to the board; now is nil after a deletion.
func (v *view) post(k kind, now, any api.Object) {
	n := goneNotice(k, any)
	if now != nil {
		var err error
		if n, err = noticeOf(k, now); err != nil {
			v.log.Error("no node is told of an object", "err", err)
			return
		}
	}
	v.board.put(n)
}

// nodeChanged marks the node's own Node in its session. If the peer information for other nodes
// changed, it records that and requests a wave.
func (v *view) nodeChanged(id key, before, after api.Object) {
	old, _ := before.(*v1.Node)
	now, _ := after.(*v1.Node)
	if old == nil || now == nil || !sameSlim(old, now) {
		if s := v.session(id.name); s != nil {
			s.mark(id)
		}
	}
	var was, is *fleetv1.Peer
	if old != nil {
		was = peerOf(old)
	}
	if now != nil {
		is = peerOf(now)
	}
	switch {
	case is == nil && was == nil, is != nil && was != nil && samePeer(was, is):
		return
	case is == nil:
		v.peers.put(goneNotice(kindNode, before))
	default:
		n, err := noticeOfPeer(now, is)
		if err != nil {
			v.log.Error("no node is told of a peer", "err", err)
			return
		}
		v.peers.put(n)
	}
	v.waves.ask(v.wave)
}

func (v *view) markPod(id key, o api.Object) {
	p, ok := o.(*v1.Pod)
	if !ok || p == nil || p.Spec.NodeName == "" {
		return
	}
	v.mu.RLock()
	s := v.sessions[p.Spec.NodeName]
	v.mu.RUnlock()
	if s != nil {
		s.mark(id)
	}
}

// join registers s as the session of its node and returns the session that it replaces, or nil. ok
// is false if a newer session is registered.
func (v *view) join(s *session) (older *session, ok bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	older = v.sessions[s.node]
	if older != nil && older.epoch > s.epoch {
		return nil, false
	}
	v.sessions[s.node] = s
	return older, true
}

// leave removes s and reports whether it was the node's registered session.
func (v *view) leave(s *session) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.sessions[s.node] != s {
		return false
	}
	delete(v.sessions, s.node)
	return true
}

func (v *view) session(node string) *session {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.sessions[node]
}

// keysOf returns the keys of a node's own Node and of its pods.
func (v *view) keysOf(node string) []key {
	keys := []key{{kind: kindNode, name: node}}
	pods, _ := v.stores[kindPod].ByIndex(podsByNode, node) // the index exists since newView
	for _, o := range pods {
		if obj, ok := o.(api.Object); ok {
			keys = append(keys, keyOf(kindPod, obj))
		}
	}
	return keys
}

// tellAll wakes every session, so that it reads the board, and returns the number of sessions.
func (v *view) tellAll() int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for _, s := range v.sessions {
		s.poke()
	}
	return len(v.sessions)
}

// wave wakes every session, so that it reads the peers, and returns the number of sessions.
func (v *view) wave() int {
	v.waved.Add(1)
	return v.tellAll()
}

// everySession returns all sessions on this replica.
func (v *view) everySession() []*session {
	v.mu.Lock()
	defer v.mu.Unlock()
	return slices.Collect(maps.Values(v.sessions))
}

// markInterested marks an object in the sessions with an object that refers to it, and returns the
// number of these sessions.
func (v *view) markInterested(id key) int {
	v.mu.RLock()
	defer v.mu.RUnlock()
	for s := range v.interest[id] {
		s.mark(id)
	}
	return len(v.interest[id])
}

func (v *view) lookup(k key) (api.Object, bool) {
	switch k.kind {
	case kindAddressGroup:
		g, ok := v.policies.Group(k.name)
		return g, ok
	case kindNetworkPolicy:
		p, ok := v.policies.Sent(k.namespace, k.name)
		return p, ok
	}
	o, ok, err := v.stores[k.kind].GetByKey(k.storeKey())
	if err != nil || !ok {
		return nil, false
	}
	obj, ok := o.(api.Object)
	return obj, ok
}

func (v *view) pod(namespace, name string) (*v1.Pod, bool) {
	o, _ := v.lookup(key{kindPod, namespace, name})
	p, ok := o.(*v1.Pod)
	return p, ok
}

func (v *view) nodeObject(name string) (*v1.Node, bool) {
	o, _ := v.lookup(key{kind: kindNode, name: name})
	n, ok := o.(*v1.Node)
	return n, ok
}

// source implements objectSource for one session.
type source struct {
	*view
	s *session
}

func (x source) encoded(k kind, o api.Object) (*fleetv1.Object, error) { return x.enc.get(k, o) }

func (x source) objects(r reader) (now uint64, held bool, err error) { return x.view.board.read(r) }

func (x source) peers(r reader) (now uint64, held bool, err error) { return x.view.peers.read(r) }

func (x source) wave() uint64 { return x.waved.Load() }

func (x source) references(o api.Object) []key {
	return append(references(o), x.policyReferences(o)...)
}

func (x source) watch(k key) {
	x.mu.Lock()
	defer x.mu.Unlock()
	m := x.interest[k]
	if m == nil {
		m = make(map[*session]struct{})
		x.interest[k] = m
	}
	m[x.s] = struct{}{}
}

func (x source) unwatch(k key) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.interest[k], x.s)
	if len(x.interest[k]) == 0 {
		delete(x.interest, k)
	}
}
