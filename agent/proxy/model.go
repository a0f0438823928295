// Package proxy makes Services reachable on a worker: a pure model of what traffic goes where, which follows Services
// and EndpointSlices one Service at a time, and writers that express it in the kernel: nftables (the cost of a
// packet does not grow with the number of Services), iptables and IPVS.
package proxy

import (
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// Frontend is where clients knock.
type Frontend struct {
	IP    netip.Addr // unspecified (0.0.0.0, ::) for a node port
	Proto string     // "tcp", "udp", "sctp"
	Port  int32
}

// NodePort says that any of the node's addresses is meant.
func (f Frontend) NodePort() bool { return f.IP.IsUnspecified() }

// anywhere is the node port of the same number.
func (f Frontend) anywhere() Frontend {
	ip := netip.IPv4Unspecified()
	if f.IP.Is6() {
		ip = netip.IPv6Unspecified()
	}
	return Frontend{ip, f.Proto, f.Port}
}

// Backend is one endpoint's port.
type Backend struct {
	IP    netip.Addr
	Port  int32
	Local bool // on this node
}

// Port is one port of one Service in one address family, as this node serves it. It is not changed once it is made.
type Port struct {
	Name     string // "namespace/service:port", for comments and metrics
	ID       string // stable and short, names the chains
	Proto    string
	V6       bool
	Internal []Frontend // cluster traffic
	External []Frontend // traffic from outside: node port, external and load balancer addresses
	// Guarded are those of External that only clients of Sources may use.
	Guarded []Frontend
	Sources []netip.Prefix // shared by the ports of a Service
	guard   *chain         // of nftables for Sources, shared likewise; nil where all clients may come
	// Cluster are the backends of internal traffic, Outside those of external traffic that may go to any node, Here those
	// on this node, where external traffic is to stay on it (KeepSource).
	Cluster, Outside, Here []Backend
	// Serving are all that may still answer what was sent to them, those that terminate and those of other nodes too.
	Serving []Backend
	// StayInside: internal traffic is to stay on the node (internalTrafficPolicy Local).
	StayInside bool
	// Wide: the Service has so many external frontends that the kernel does not keep the endpoints for each of them.
	Wide bool
	// KeepSource leaves the client's address on external traffic (externalTrafficPolicy Local).
	KeepSource bool
	Affinity   int32 // seconds for which a client stays with a backend; 0 = none
}

func (p *Port) equal(q *Port) bool {
	return p.Name == q.Name && p.ID == q.ID && p.Proto == q.Proto && p.V6 == q.V6 && p.StayInside == q.StayInside && p.Wide == q.Wide &&
		p.KeepSource == q.KeepSource && p.Affinity == q.Affinity &&
		slices.Equal(p.Internal, q.Internal) && slices.Equal(p.External, q.External) && slices.Equal(p.Guarded, q.Guarded) &&
		p.guard.equal(q.guard) && slices.Equal(p.Cluster, q.Cluster) && slices.Equal(p.Outside, q.Outside) &&
		slices.Equal(p.Here, q.Here) && slices.Equal(p.Serving, q.Serving)
}

// local are the backends on this node, which may reach themselves through the Service.
func (p *Port) local() (out []netip.Addr) {
	for _, list := range [][]Backend{p.Cluster, p.Outside, p.Here} {
		for _, b := range list {
			if b.Local {
				out = append(out, b.IP)
			}
		}
	}
	return out
}

// Change is what became of one Port; nil = it was not there, or is not any more.
type Change struct{ Old, New *Port }

// ID names the Port that changed.
func (c Change) ID() string {
	if c.New != nil {
		return c.New.ID
	}
	return c.Old.ID
}

// Place is where a node stands: hints of endpoints name nodes and zones.
type Place struct{ Node, Zone string }

// Model is everything this node's rules say, kept up to date Service by Service: what a change costs does not depend on how
// many Services there are. It is deterministic: however it came to know of some objects, it says the same. One
// goroutine uses it.
type Model struct {
	at     Place
	taken  *Reserved // nil: nothing
	known  map[types.NamespacedName]*known
	parts  map[types.NamespacedName]types.NamespacedName // EndpointSlice → Service
	claims claims
	wanted map[string]*Port // what Services ask for, by ID
	ports  map[string]*Port // what they get
	dirty  map[types.NamespacedName]struct{}
	health map[types.NamespacedName]health
}

// known is what there is of one Service: either may come first.
type known struct {
	service *v1.Service
	parts   map[string]*discoveryv1.EndpointSlice // by name
	ids     []string
}

// NewModel returns the model of a node where there are no Services.
func NewModel(at Place) *Model {
	return &Model{at: at, known: map[types.NamespacedName]*known{}, parts: map[types.NamespacedName]types.NamespacedName{},
		claims: claims{}, wanted: map[string]*Port{}, ports: map[string]*Port{}, dirty: map[types.NamespacedName]struct{}{},
		health: map[types.NamespacedName]health{}}
}

// Compute is the model of what there is, from nothing.
func Compute(services []*v1.Service, parts []*discoveryv1.EndpointSlice, at Place) *Model {
	m := NewModel(at)
	m.Replace(services, parts)
	m.Settle()
	return m
}

// Ports are all that the model says, by ID. Who gets them changes nothing in them.
func (m *Model) Ports() map[string]*Port { return m.ports }

// Move says where the node stands from now on.
func (m *Model) Move(at Place) {
	if m.at == at {
		return
	}
	m.at = at
	for key := range m.known {
		m.dirty[key] = struct{}{}
	}
}

// Reserve sets the addresses and ports at which no Service captures external traffic.
func (m *Model) Reserve(r *Reserved) {
	if m.taken.equal(r) {
		return
	}
	m.taken = r
	for key, k := range m.known {
		if s := k.service; s != nil && (len(s.Spec.ExternalIPs) > 0 || s.Spec.Type == v1.ServiceTypeNodePort || s.Spec.Type == v1.ServiceTypeLoadBalancer ||
			len(s.Status.LoadBalancer.Ingress) > 0) {
			m.dirty[key] = struct{}{}
		}
	}
}

// At is where the node stands.
func (m *Model) At() Place { return m.at }

// Service takes a Service as it is now; nil = it is gone.
func (m *Model) Service(key types.NamespacedName, s *v1.Service) {
	k := m.know(key)
	if k.service == s {
		return
	}
	k.service = s
	m.dirty[key] = struct{}{}
}

func (m *Model) know(key types.NamespacedName) *known {
	k := m.known[key]
	if k == nil {
		k = &known{}
		m.known[key] = k
		m.dirty[key] = struct{}{}
	}
	return k
}

// Slice takes an EndpointSlice as it is now; nil = it is gone.
func (m *Model) Slice(key types.NamespacedName, s *discoveryv1.EndpointSlice) {
	was, had := m.parts[key]
	var is types.NamespacedName
	if s != nil {
		is = types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}
	}
	if had && was != is {
		delete(m.known[was].parts, key.Name)
		delete(m.parts, key)
		m.dirty[was] = struct{}{}
	}
	if s == nil || is.Name == "" {
		return
	}
	k := m.know(is)
	if k.parts[key.Name] == s {
		return
	}
	if k.parts == nil {
		k.parts = make(map[string]*discoveryv1.EndpointSlice, 1)
	}
	k.parts[key.Name] = s
	m.parts[key] = is
	m.dirty[is] = struct{}{}
}

// Replace takes all that there is; what it does not name is gone.
func (m *Model) Replace(services []*v1.Service, parts []*discoveryv1.EndpointSlice) {
	is := make(map[types.NamespacedName]struct{}, len(services))
	for _, s := range services {
		key := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
		is[key] = struct{}{}
		m.Service(key, s)
	}
	for key, k := range m.known {
		if _, ok := is[key]; !ok && k.service != nil {
			m.Service(key, nil)
		}
	}
	clear(is)
	for _, s := range parts {
		key := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
		is[key] = struct{}{}
		m.Slice(key, s)
	}
	for key := range m.parts {
		if _, ok := is[key]; !ok {
			m.Slice(key, nil)
		}
	}
}

// Settle works out what changed since it was called last, in the order of IDs.
func (m *Model) Settle() []Change {
	touched := map[string]struct{}{}
	for key := range m.dirty {
		m.settle(key, touched)
	}
	clear(m.dirty)
	var out []Change
	for _, id := range slices.Sorted(maps.Keys(touched)) {
		old, now := m.ports[id], m.claims.granted(m.wanted[id])
		if old == nil && now == nil || old != nil && now != nil && old.equal(now) {
			continue
		}
		if now == nil {
			delete(m.ports, id)
		} else {
			m.ports[id] = now
		}
		out = append(out, Change{old, now})
	}
	return out
}

// The labels by which kube-proxy leaves a Service to another program.
const labelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// servedByOther reports whether the labels of a Service or an EndpointSlice leave it to a program other than the agent.
func servedByOther(labels map[string]string) bool {
	_, named := labels[labelServiceProxyName]
	_, headless := labels[v1.IsHeadlessService]
	return named || headless
}

// settle derives one Service anew, and names the ports that this may concern: those of others too, where two want the
// same address.
func (m *Model) settle(key types.NamespacedName, touched map[string]struct{}) {
	k := m.known[key]
	if k == nil {
		return
	}
	var ports []*Port
	delete(m.health, key)
	if k.service != nil && !agent.ServesDNS(k.service) && !servedByOther(k.service.Labels) { // the address of the DNS Service is the node's own, where the agent answers
		ports = portsOf(k.service, k.parts, m.at, m.taken)
		if h, ok := healthOf(k.service, k.parts, m.at.Node); ok {
			m.health[key] = h
		}
	}
	ids, kept := make([]string, len(ports)), make(map[string]bool, len(ports))
	for i, p := range ports {
		ids[i], kept[p.ID] = p.ID, true
		touched[p.ID] = struct{}{}
		m.claims.move(m.wanted[p.ID], p, touched)
		m.wanted[p.ID] = p
	}
	for _, id := range k.ids {
		if !kept[id] {
			touched[id] = struct{}{}
			m.claims.move(m.wanted[id], nil, touched)
			delete(m.wanted, id)
		}
	}
	k.ids = ids
	if k.service == nil && len(k.parts) == 0 {
		delete(m.known, key)
	}
}
