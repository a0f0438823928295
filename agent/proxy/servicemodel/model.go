// Package servicemodel computes the Service ports that a node serves: their frontends and backends.
// It follows Services and EndpointSlices, one Service at a time. The package is pure: it reads
// objects, and accesses neither the kernel nor the clock.
package servicemodel

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"net/netip"
	"slices"
	"strings"

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

// NodePortFrontend returns the node port frontend (unspecified address) with the protocol and port
// of f.
func (f Frontend) NodePortFrontend() Frontend {
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
	Local bool // the endpoint is on this node
}

// AddrPort returns the backend's address and port in the syntax of nft and iptables.
func (b Backend) AddrPort() string { return netip.AddrPortFrom(b.IP, uint16(b.Port)).String() }

// Backends are the backends of a Port, by the traffic that they receive. Equal lists share their
// memory.
type Backends struct {
	// Cluster are the backends of internal traffic. Outside are the backends of external traffic
	// that may go to any node. Here are the backends on this node, for external traffic that must
	// stay on it (KeepSource).
	Cluster, Outside, Here []Backend
	// Serving are all endpoints that may still answer, including terminating endpoints and those of
	// other nodes.
	Serving []Backend
}

func (b Backends) equalBackends(c Backends) bool {
	return slices.Equal(b.Cluster, c.Cluster) && slices.Equal(b.Outside, c.Outside) && slices.Equal(b.Here, c.Here) &&
		slices.Equal(b.Serving, c.Serving)
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
	Guarded  []Frontend
	Sources  *SourceRanges // shared by all ports of a Service; nil if all clients are allowed
	Backends Backends
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

// EqualPort reports whether p and q are equal.
func (p *Port) EqualPort(q *Port) bool {
	return p.Name == q.Name && p.ID == q.ID && p.Proto == q.Proto && p.V6 == q.V6 && p.StayInside == q.StayInside &&
		p.Wide == q.Wide &&
		p.KeepSource == q.KeepSource && p.Affinity == q.Affinity &&
		slices.Equal(p.Internal, q.Internal) && slices.Equal(p.External, q.External) &&
		slices.Equal(p.Guarded, q.Guarded) &&
		p.Sources.equalSources(q.Sources) && p.Backends.equalBackends(q.Backends)
}

// ServiceName returns the name of a Port's Service: "namespace/service".
func (p *Port) ServiceName() string {
	name, _, _ := strings.Cut(p.Name, ":")
	return name
}

// LocalAddresses returns the addresses of the Port's backends that are pods on this node. Such a
// pod may reach itself through the Service.
func (p *Port) LocalAddresses() (out []netip.Addr) {
	for _, list := range [][]Backend{p.Backends.Cluster, p.Backends.Outside, p.Backends.Here} {
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

// Location is a node and its zone, with which topology hints are compared.
type Location struct{ Node, Zone string }

// ShortHashDigits is the number of digits that ShortHash returns.
const ShortHashDigits = 12

// ShortHash returns a short hexadecimal hash of s, for names in the kernel.
func ShortHash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:ShortHashDigits/2])
}

// Model computes the Ports that this node serves, and updates them one Service at a time. The cost
// of a change does not depend on the number of Services. Model is deterministic: its result does
// not depend on the order in which objects arrive. It is not safe for concurrent use.
type Model struct {
	location     Location
	reserved     *Reserved // nil: nothing is reserved
	services     map[types.NamespacedName]*serviceObjects
	sliceService map[types.NamespacedName]types.NamespacedName // EndpointSlice → Service
	claims       frontendClaims
	wanted       map[string]*Port // Ports as the Services request them, by ID
	ports        map[string]*Port // Ports with the frontends that are granted to them, by ID
	dirty        map[types.NamespacedName]struct{}
	health       map[types.NamespacedName]ServiceHealth
}

// serviceObjects are a Service and its EndpointSlices. Either may arrive first.
type serviceObjects struct {
	service        *v1.Service
	endpointSlices map[string]*discoveryv1.EndpointSlice // by name
	ids            []string
}

// NewModel returns a Model without Services for a node at the given Location.
func NewModel(at Location) *Model {
	return &Model{location: at, services: map[types.NamespacedName]*serviceObjects{},
		sliceService: map[types.NamespacedName]types.NamespacedName{},
		claims:       frontendClaims{}, wanted: map[string]*Port{}, ports: map[string]*Port{},
		dirty:  map[types.NamespacedName]struct{}{},
		health: map[types.NamespacedName]ServiceHealth{}}
}

// Compute returns a Model of the given Services and EndpointSlices for a node at the given
// Location.
func Compute(services []*v1.Service, parts []*discoveryv1.EndpointSlice, at Location) *Model {
	m := NewModel(at)
	m.Replace(services, parts)
	m.UpdatePorts()
	return m
}

// Ports returns the current state of all Service ports, by ID. Callers must not modify the map.
func (m *Model) Ports() map[string]*Port { return m.ports }

// HealthChecks returns the health check responses of the Services that have a health check node
// port, by Service. Callers must not modify the map.
func (m *Model) HealthChecks() map[types.NamespacedName]ServiceHealth { return m.health }

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
		if s := k.service; s != nil && (len(s.Spec.ExternalIPs) > 0 || s.Spec.Type == v1.ServiceTypeNodePort ||
			s.Spec.Type == v1.ServiceTypeLoadBalancer ||
			len(s.Status.LoadBalancer.Ingress) > 0) {
			m.dirty[key] = struct{}{}
		}
	}
}

// HasReserved reports whether r equals the argument of the last SetReserved call.
func (m *Model) HasReserved(r *Reserved) bool { return m.reserved.equalReserved(r) }

// Location returns the node's location.
func (m *Model) Location() Location { return m.location }

// SetService sets the current state of the Service with the given key; nil means that it was
// deleted. The next UpdatePorts returns the resulting changes.
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

// SetSlice sets the current state of the EndpointSlice with the given key; nil means that it was
// deleted. The next UpdatePorts returns the resulting changes.
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

// Replace replaces all Services and EndpointSlices of the model with the arguments. The next
// UpdatePorts returns the resulting changes.
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

// UpdatePorts returns the changes of Ports since its previous call, sorted by ID.
func (m *Model) UpdatePorts() []Change {
	touched := map[string]struct{}{}
	for key := range m.dirty {
		m.updateService(key, touched)
	}
	clear(m.dirty)
	var out []Change
	for _, id := range slices.Sorted(maps.Keys(touched)) {
		old, now := m.ports[id], m.claims.grantedPort(m.wanted[id])
		if old == nil && now == nil || old != nil && now != nil && old.EqualPort(now) {
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

// labelServiceProxyName is the label that assigns a Service to a service proxy other than the
// cluster's default.
const labelServiceProxyName = "service.kubernetes.io/service-proxy-name"

// servedByOther reports whether the agent must ignore a Service or an EndpointSlice with these
// labels: it is assigned to another service proxy, or it is marked as headless.
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
	if k.service != nil && !agent.AgentsServeDNS(k.service) && !servedByOther(k.service.Labels) {
		// where agents serve DNS, the DNS Service's address is the node's own
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
