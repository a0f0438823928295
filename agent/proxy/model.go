// Package proxy programs the Service rules of a node. A pure model computes the rules; it follows
// Services and EndpointSlices, one Service at a time. Writers program them in the kernel with
// nftables (a packet's cost does not grow with the number of Services), iptables or IPVS.
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

// Frontend is an address and a port at which a Service receives traffic.
type Frontend struct {
	IP    netip.Addr // unspecified (0.0.0.0, ::) for a node port
	Proto string     // "tcp", "udp", "sctp"
	Port  int32
}

// NodePort reports whether the frontend stands for all addresses of the node.
func (f Frontend) NodePort() bool { return f.IP.IsUnspecified() }

// anywhere returns the node port frontend with the same protocol and port.
func (f Frontend) anywhere() Frontend {
	ip := netip.IPv4Unspecified()
	if f.IP.Is6() {
		ip = netip.IPv6Unspecified()
	}
	return Frontend{ip, f.Proto, f.Port}
}

// Backend is the address and port of one endpoint.
type Backend struct {
	IP    netip.Addr
	Port  int32
	Local bool // on this node
}

// Port is one port of a Service in one address family, as this node serves it. It is immutable.
type Port struct {
	Name     string // "namespace/service:port", for comments and metrics
	ID       string // short and stable; used in chain names
	Proto    string
	V6       bool
	Internal []Frontend // cluster IP
	External []Frontend // traffic from outside: node port, external and load balancer addresses
	// Guarded are the External frontends that only clients in Sources may use.
	Guarded []Frontend
	Sources []netip.Prefix // shared by all ports of a Service
	guard   *chain         // nftables chain for Sources, shared by all ports of a Service; nil if all clients are allowed
	// Cluster are the backends of internal traffic. Outside are the backends of external traffic
	// that may go to any node. Here are the backends on this node, for external traffic that must
	// stay on it (KeepSource).
	Cluster, Outside, Here []Backend
	// Serving are all endpoints that may still answer, including terminating endpoints and those of
	// other nodes.
	Serving []Backend
	// StayInside reports that internal traffic must stay on the node (internalTrafficPolicy Local).
	StayInside bool
	// Wide reports that the Service has many external frontends. The kernel then does not store the
	// endpoints per frontend.
	Wide bool
	// KeepSource reports that external traffic keeps the client's address (externalTrafficPolicy
	// Local).
	KeepSource bool
	Affinity   int32 // seconds for which a client keeps its backend; 0 = no affinity
}

func (p *Port) equal(q *Port) bool {
	return p.Name == q.Name && p.ID == q.ID && p.Proto == q.Proto && p.V6 == q.V6 && p.StayInside == q.StayInside && p.Wide == q.Wide &&
		p.KeepSource == q.KeepSource && p.Affinity == q.Affinity &&
		slices.Equal(p.Internal, q.Internal) && slices.Equal(p.External, q.External) && slices.Equal(p.Guarded, q.Guarded) &&
		p.guard.equal(q.guard) && slices.Equal(p.Cluster, q.Cluster) && slices.Equal(p.Outside, q.Outside) &&
		slices.Equal(p.Here, q.Here) && slices.Equal(p.Serving, q.Serving)
}

// local returns the addresses of the backends on this node, which may reach themselves through the
// Service.
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

// Change is the change of one Port. Old is nil if the Port is new; New is nil if it was removed.
type Change struct{ Old, New *Port }

// ID returns the ID of the changed Port.
func (c Change) ID() string {
	if c.New != nil {
		return c.New.ID
	}
	return c.Old.ID
}

// Place is a node and its zone, which the hints of endpoints name.
type Place struct{ Node, Zone string }

// Model computes the rules of this node and updates them Service by Service: the cost of a change
// does not depend on the number of Services. It is deterministic: its result does not depend on the
// order in which objects arrive. It is not safe for concurrent use.
type Model struct {
	at     Place
	taken  *Reserved // nil: nothing is reserved
	known  map[types.NamespacedName]*known
	parts  map[types.NamespacedName]types.NamespacedName // EndpointSlice → Service
	claims claims
	wanted map[string]*Port // requested by Services, by ID
	ports  map[string]*Port // granted, by ID
	dirty  map[types.NamespacedName]struct{}
	health map[types.NamespacedName]health
}

// known are a Service and its EndpointSlices. Either may arrive first.
type known struct {
	service *v1.Service
	parts   map[string]*discoveryv1.EndpointSlice // by name
	ids     []string
}

// NewModel returns a model without Services.
func NewModel(at Place) *Model {
	return &Model{at: at, known: map[types.NamespacedName]*known{}, parts: map[types.NamespacedName]types.NamespacedName{},
		claims: claims{}, wanted: map[string]*Port{}, ports: map[string]*Port{}, dirty: map[types.NamespacedName]struct{}{},
		health: map[types.NamespacedName]health{}}
}

// Compute returns the model of the given objects.
func Compute(services []*v1.Service, parts []*discoveryv1.EndpointSlice, at Place) *Model {
	m := NewModel(at)
	m.Replace(services, parts)
	m.Settle()
	return m
}

// Ports returns all Ports by ID. Callers must not modify them.
func (m *Model) Ports() map[string]*Port { return m.ports }

// Move sets the node's location.
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

// Place returns the node's location.
func (m *Model) At() Place { return m.at }

// Service sets the current state of a Service; nil = deleted.
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

// Slice sets the current state of an EndpointSlice; nil = deleted.
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

// Replace sets all Services and EndpointSlices. Objects that are not listed are removed.
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

// Settle returns the changes since its last call, in the order of IDs.
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

// labelServiceProxyName is the label that assigns a Service to another proxy than kube-proxy.
const labelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// servedByOther reports whether the labels of a Service or an EndpointSlice assign it to another
// program than the agent.
func servedByOther(labels map[string]string) bool {
	_, named := labels[labelServiceProxyName]
	_, headless := labels[v1.IsHeadlessService]
	return named || headless
}

// settle recomputes one Service and adds the IDs of all affected Ports to touched. These include
// Ports of other Services that claim the same frontend.
func (m *Model) settle(key types.NamespacedName, touched map[string]struct{}) {
	k := m.known[key]
	if k == nil {
		return
	}
	var ports []*Port
	delete(m.health, key)
	if k.service != nil && !agent.ServesDNS(k.service) && !servedByOther(k.service.Labels) { // where agents serve DNS, the DNS Service's address is the node's own
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
