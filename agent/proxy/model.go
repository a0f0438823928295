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

// IsNodePort reports whether the frontend is a node port, which is served at all addresses of the
// node.
func (f Frontend) IsNodePort() bool { return f.IP.IsUnspecified() }

// nodePortFrontend returns the node port frontend (unspecified address) with the protocol and port
// of f.
func (f Frontend) nodePortFrontend() Frontend {
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
	guard   *nftChain      // nftables chain for Sources, shared by all ports of a Service; nil if all clients are allowed
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

func (p *Port) equalPort(q *Port) bool {
	return p.Name == q.Name && p.ID == q.ID && p.Proto == q.Proto && p.V6 == q.V6 && p.StayInside == q.StayInside && p.Wide == q.Wide &&
		p.KeepSource == q.KeepSource && p.Affinity == q.Affinity &&
		slices.Equal(p.Internal, q.Internal) && slices.Equal(p.External, q.External) && slices.Equal(p.Guarded, q.Guarded) &&
		p.guard.sameChain(q.guard) && slices.Equal(p.Cluster, q.Cluster) && slices.Equal(p.Outside, q.Outside) &&
		slices.Equal(p.Here, q.Here) && slices.Equal(p.Serving, q.Serving)
}

// localAddresses returns the addresses of the Port's backends that are pods on this node. Such a
// pod may reach itself through the Service.
func (p *Port) localAddresses() (out []netip.Addr) {
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

// Location is a node and its zone, which the hints of endpoints name.
type Location struct{ Node, Zone string }

// Model computes the rules of this node and updates them Service by Service: the cost of a change
// does not depend on the number of Services. It is deterministic: its result does not depend on the
// order in which objects arrive. It is not safe for concurrent use.
type Model struct {
	location     Location
	reserved     *Reserved // nil: nothing is reserved
	services     map[types.NamespacedName]*serviceObjects
	sliceService map[types.NamespacedName]types.NamespacedName // EndpointSlice → Service
	claims       frontendClaims
	wanted       map[string]*Port // requested by Services, by ID
	ports        map[string]*Port // granted, by ID
	dirty        map[types.NamespacedName]struct{}
	health       map[types.NamespacedName]serviceHealth
}

// serviceObjects are a Service and its EndpointSlices. Either may arrive first.
type serviceObjects struct {
	service        *v1.Service
	endpointSlices map[string]*discoveryv1.EndpointSlice // by name
	ids            []string
}

// NewModel returns a Model without Services for a node at the given Location.
func NewModel(at Location) *Model {
	return &Model{location: at, services: map[types.NamespacedName]*serviceObjects{}, sliceService: map[types.NamespacedName]types.NamespacedName{},
		claims: frontendClaims{}, wanted: map[string]*Port{}, ports: map[string]*Port{}, dirty: map[types.NamespacedName]struct{}{},
		health: map[types.NamespacedName]serviceHealth{}}
}

// Compute returns a Model of the given Services and EndpointSlices for a node at the given
// Location.
func Compute(services []*v1.Service, parts []*discoveryv1.EndpointSlice, at Location) *Model {
	m := NewModel(at)
	m.Replace(services, parts)
	m.UpdatePorts()
	return m
}

// Ports returns the current state of all Service ports, by ID. Callers must not modify them.
func (m *Model) Ports() map[string]*Port { return m.ports }

// SetLocation sets the node's name and zone. The next UpdatePorts returns the resulting changes.
func (m *Model) SetLocation(at Location) {
	if m.location == at {
		return
	}
	m.location = at
	for key := range m.services {
		m.dirty[key] = struct{}{}
	}
}

// SetReserved sets the addresses and ports at which no Service captures external traffic. The next
// UpdatePorts returns the resulting changes.
func (m *Model) SetReserved(r *Reserved) {
	if m.reserved.equalReserved(r) {
		return
	}
	m.reserved = r
	for key, k := range m.services {
		if s := k.service; s != nil && (len(s.Spec.ExternalIPs) > 0 || s.Spec.Type == v1.ServiceTypeNodePort || s.Spec.Type == v1.ServiceTypeLoadBalancer ||
			len(s.Status.LoadBalancer.Ingress) > 0) {
			m.dirty[key] = struct{}{}
		}
	}
}

// Location returns the node's location.
func (m *Model) Location() Location { return m.location }

// SetService sets the current state of the Service key; nil means that it was deleted. The next
// UpdatePorts returns the resulting changes.
func (m *Model) SetService(key types.NamespacedName, s *v1.Service) {
	k := m.ensureService(key)
	if k.service == s {
		return
	}
	k.service = s
	m.dirty[key] = struct{}{}
}

func (m *Model) ensureService(key types.NamespacedName) *serviceObjects {
	k := m.services[key]
	if k == nil {
		k = &serviceObjects{}
		m.services[key] = k
		m.dirty[key] = struct{}{}
	}
	return k
}

// SetSlice sets the current state of the EndpointSlice key; nil means that it was deleted. The next
// UpdatePorts returns the resulting changes.
func (m *Model) SetSlice(key types.NamespacedName, s *discoveryv1.EndpointSlice) {
	was, had := m.sliceService[key]
	var is types.NamespacedName
	if s != nil {
		is = types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}
	}
	if had && was != is {
		delete(m.services[was].endpointSlices, key.Name)
		delete(m.sliceService, key)
		m.dirty[was] = struct{}{}
	}
	if s == nil || is.Name == "" {
		return
	}
	k := m.ensureService(is)
	if k.endpointSlices[key.Name] == s {
		return
	}
	if k.endpointSlices == nil {
		k.endpointSlices = make(map[string]*discoveryv1.EndpointSlice, 1)
	}
	k.endpointSlices[key.Name] = s
	m.sliceService[key] = is
	m.dirty[is] = struct{}{}
}

// Replace replaces all Services and EndpointSlices of the model. The next UpdatePorts returns the
// resulting changes.
func (m *Model) Replace(services []*v1.Service, parts []*discoveryv1.EndpointSlice) {
	is := make(map[types.NamespacedName]struct{}, len(services))
	for _, s := range services {
		key := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
		is[key] = struct{}{}
		m.SetService(key, s)
	}
	for key, k := range m.services {
		if _, ok := is[key]; !ok && k.service != nil {
			m.SetService(key, nil)
		}
	}
	clear(is)
	for _, s := range parts {
		key := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
		is[key] = struct{}{}
		m.SetSlice(key, s)
	}
	for key := range m.sliceService {
		if _, ok := is[key]; !ok {
			m.SetSlice(key, nil)
		}
	}
}

// UpdatePorts returns the changes of Ports since its previous call, in the order of IDs.
func (m *Model) UpdatePorts() []Change {
	touched := map[string]struct{}{}
	for key := range m.dirty {
		m.updateService(key, touched)
	}
	clear(m.dirty)
	var out []Change
	for _, id := range slices.Sorted(maps.Keys(touched)) {
		old, now := m.ports[id], m.claims.grantedPort(m.wanted[id])
		if old == nil && now == nil || old != nil && now != nil && old.equalPort(now) {
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

// updateService recomputes the Ports of one Service. It adds to touched the IDs of all affected
// Ports, including Ports of other Services that claim the same frontend.
func (m *Model) updateService(key types.NamespacedName, touched map[string]struct{}) {
	k := m.services[key]
	if k == nil {
		return
	}
	var ports []*Port
	delete(m.health, key)
	if k.service != nil && !agent.AgentsServeDNS(k.service) && !servedByOther(k.service.Labels) { // where agents serve DNS, the DNS Service's address is the node's own
		ports = computePorts(k.service, k.endpointSlices, m.location, m.reserved)
		if h, ok := computeHealth(k.service, k.endpointSlices, m.location.Node); ok {
			m.health[key] = h
		}
	}
	ids, kept := make([]string, len(ports)), make(map[string]bool, len(ports))
	for i, p := range ports {
		ids[i], kept[p.ID] = p.ID, true
		touched[p.ID] = struct{}{}
		m.claims.updateClaims(m.wanted[p.ID], p, touched)
		m.wanted[p.ID] = p
	}
	for _, id := range k.ids {
		if !kept[id] {
			touched[id] = struct{}{}
			m.claims.updateClaims(m.wanted[id], nil, touched)
			delete(m.wanted, id)
		}
	}
	k.ids = ids
	if k.service == nil && len(k.endpointSlices) == 0 {
		delete(m.services, key)
	}
}
