package proxy

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/agentport"
)

// disconnectedAfter is how long a node may be without a session before it removes the Service rules
// at addresses of replicas. Such rules could prevent the node from reaching the replicas.
const disconnectedAfter = time.Minute

// maxServicePairs bounds the pairs of an external address and a port that a node serves for one
// Service. The API accepts no Service beyond the bound. If an earlier release stored such a
// Service, its last addresses are not served.
const maxServicePairs = 4096

// Reserved is a set of addresses and ports at which no Service may capture external traffic,
// because the cluster itself uses them. It is immutable.
type Reserved struct {
	ranges   []netip.Prefix              // pod and Service ranges
	machines map[netip.Addr]struct{}     // addresses of machines with an agent
	agents   map[agentport.Port]struct{} // ports on which every agent listens
	replicas map[netip.Addr][]uint16     // addresses of machines with a replica, and the replica's TCP ports
	own      map[netip.Addr]struct{}     // addresses of this machine
	local    map[uint16]struct{}         // TCP ports of a replica on this machine
	detached bool                        // no port at a replica's address is served
	whole    bool                        // a rule for one port captures all ports of an address that is not the node's own
}

// equalReserved reports whether r and o reserve the same addresses and ports. Either may be nil.
func (r *Reserved) equalReserved(o *Reserved) bool {
	if r == nil || o == nil {
		return r == o
	}
	return slices.Equal(r.ranges, o.ranges) && maps.Equal(r.machines, o.machines) && maps.Equal(r.agents, o.agents) &&
		maps.EqualFunc(r.replicas, o.replicas, slices.Equal[[]uint16]) && maps.Equal(r.own, o.own) && maps.Equal(r.local, o.local) &&
		r.detached == o.detached && r.whole == o.whole
}

// allowsFrontend reports whether a Service may capture traffic to the external frontend f, that is,
// whether f is not reserved. A nil Reserved allows all frontends.
func (r *Reserved) allowsFrontend(f Frontend) bool {
	if r == nil {
		return true
	}
	port := agentport.Port{Proto: f.Proto, Number: uint16(f.Port)}
	_, ofAgents := r.agents[port]
	if f.IsNodePort() {
		_, ofReplica := r.local[port.Number]
		return !ofAgents && (!ofReplica || f.Proto != "tcp")
	}
	if slices.ContainsFunc(r.ranges, func(p netip.Prefix) bool { return p.Contains(f.IP) }) {
		return false
	}
	_, own := r.own[f.IP]
	_, machine := r.machines[f.IP]
	if (own || machine) && ofAgents {
		return false
	}
	ports, replica := r.replicas[f.IP]
	if replica && (r.detached || f.Proto == "tcp" && slices.Contains(ports, port.Number)) {
		return false
	}
	return !r.whole || own || !machine && !replica
}

// reservedInputs are the inputs from which Reserved is computed.
type reservedInputs struct {
	cluster  agent.Cluster
	node     *v1.Node // may be nil
	peers    []*agent.Peer
	own      []netip.Addr     // addresses of this machine
	replicas []netip.AddrPort // addresses and ports of replicas
	listens  []agentport.Port // ports of this node's agent, in addition to the default ports
	detached bool
	whole    bool
}

// computeReserved returns the addresses and ports that belong to the cluster's machines, agents and
// replicas. The ports of a replica are reserved at all known addresses of its machine. It is pure.
func (x reservedInputs) computeReserved() *Reserved {
	r := &Reserved{machines: map[netip.Addr]struct{}{}, agents: map[agentport.Port]struct{}{}, replicas: map[netip.Addr][]uint16{},
		own: map[netip.Addr]struct{}{}, local: map[uint16]struct{}{}, detached: x.detached, whole: x.whole}
	for _, p := range slices.Concat(agentport.Default(), x.listens) {
		r.agents[p] = struct{}{}
	}
	r.ranges = slices.Concat(x.cluster.ClusterPrefixes(), x.cluster.ServicePrefixes(), x.cluster.PodPrefixes())
	given := map[netip.Addr][]uint16{}
	for _, a := range x.replicas {
		given[a.Addr()] = append(given[a.Addr()], a.Port())
	}
	machine := func(addresses []netip.Addr) (ports []uint16) {
		for _, ip := range addresses {
			r.machines[ip] = struct{}{}
			ports = append(ports, given[ip]...)
		}
		if len(ports) > 0 {
			for _, ip := range addresses {
				r.replicas[ip] = append(r.replicas[ip], ports...)
			}
		}
		return ports
	}
	for _, p := range x.peers {
		machine(p.Addresses)
		for _, c := range p.PodCIDRs {
			if !slices.ContainsFunc(r.ranges, func(known netip.Prefix) bool { return known.Overlaps(c) && known.Bits() <= c.Bits() }) {
				r.ranges = append(r.ranges, c)
			}
		}
	}
	own := slices.Clone(x.own)
	if x.node != nil {
		for _, a := range x.node.Status.Addresses {
			if ip, err := netip.ParseAddr(a.Address); err == nil {
				own = append(own, ip.Unmap())
			}
		}
	}
	for _, p := range machine(own) {
		r.local[p] = struct{}{}
	}
	for _, ip := range own {
		r.own[ip] = struct{}{}
	}
	for ip, ports := range given {
		r.replicas[ip] = append(r.replicas[ip], ports...)
	}
	for ip, ports := range r.replicas {
		slices.Sort(ports)
		r.replicas[ip] = slices.Compact(ports)
	}
	slices.SortFunc(r.ranges, netip.Prefix.Compare)
	r.ranges = slices.Compact(r.ranges)
	return r
}

// replicaAddresses returns the known addresses and ports on which replicas of the control plane
// listen, or nil if ControlPlane is nil.
func (p *Proxy) replicaAddresses() []netip.AddrPort {
	if p.ControlPlane == nil {
		return nil
	}
	return p.ControlPlane.ReplicaAddresses()
}

// computeReserved returns the addresses and ports that are reserved now, given the node's view,
// this machine's addresses and the known replicas.
func (p *Proxy) computeReserved(objects agent.Objects) *Reserved {
	x := reservedInputs{cluster: objects.Cluster(), peers: objects.Peers(), listens: p.ListenPorts, own: machineAddresses(), whole: p.Mode == ModeIPVS}
	x.node, _ = objects.Node()
	x.replicas = p.replicaAddresses()
	if p.ControlPlane != nil {
		x.detached = p.ControlPlane.Disconnected() >= disconnectedAfter
	}
	return x.computeReserved()
}

// machineAddresses returns the addresses of this machine's network interfaces, for reserving them.
// It omits loopback and link-local addresses, and the interface ipvsLink, which holds addresses of
// Services. It returns nil if the interfaces cannot be read; the caller also reserves the addresses
// of the Node object.
func machineAddresses() []netip.Addr {
	links, err := net.Interfaces()
	if err != nil {
		return nil
	}
	var out []netip.Addr
	for _, l := range links {
		if l.Name == ipvsLink {
			continue
		}
		addrs, err := l.Addrs()
		if err != nil {
			continue // the interface was removed with its pod
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && !p.Addr().IsLoopback() && !p.Addr().IsLinkLocalUnicast() {
				out = append(out, p.Addr().Unmap())
			}
		}
	}
	return out
}
