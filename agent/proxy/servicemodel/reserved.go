package servicemodel

import (
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/agentport"
)

// maxServicePairs bounds the pairs of an external address and a port that a node serves for one
// Service. The API accepts no Service beyond the bound. If an earlier release stored such a
// Service, its last addresses are not served.
const maxServicePairs = 4096

// Reserved is a set of addresses and ports at which no Service may capture external traffic,
// because the cluster itself uses them. It is immutable.
type Reserved struct {
	ranges   []netip.Prefix              // of pods and Services
	machines map[netip.Addr]struct{}     // addresses of machines with an agent
	agents   map[agentport.Port]struct{} // ports on which every agent listens
	replicas map[netip.Addr][]uint16     // addresses of machines with a replica, and the replica's TCP ports
	own      map[netip.Addr]struct{}     // addresses of this machine
	local    map[uint16]struct{}         // TCP ports of a replica on this machine
	detached bool                        // reserve all ports at the replicas' addresses: the node has lost its session
	// reserve all ports at the addresses of other machines, because an IPVS server captures a whole
	// address
	whole bool
}

// equalReserved reports whether r and o reserve the same addresses and ports. Either may be nil.
func (r *Reserved) equalReserved(o *Reserved) bool {
	if r == nil || o == nil {
		return r == o
	}
	return slices.Equal(r.ranges, o.ranges) && maps.Equal(r.machines, o.machines) && maps.Equal(r.agents, o.agents) &&
		maps.EqualFunc(r.replicas, o.replicas, slices.Equal[[]uint16]) && maps.Equal(r.own, o.own) &&
		maps.Equal(r.local, o.local) &&
		r.detached == o.detached && r.whole == o.whole
}

// AllowsFrontend reports whether a Service may capture traffic to the external frontend f, that is,
// whether f is not reserved. A nil Reserved allows all frontends.
func (r *Reserved) AllowsFrontend(f Frontend) bool {
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

// ReservedInputs are the inputs from which Reserved is computed.
type ReservedInputs struct {
	Cluster  agent.Cluster
	Node     *v1.Node // may be nil
	Peers    []*agent.Peer
	Own      []netip.Addr     // addresses of this machine
	Replicas []netip.AddrPort // addresses and ports of replicas
	Listens  []agentport.Port // ports of this node's agent, in addition to the default ports
	Detached bool             // the node has lost its session: reserve all ports at the replicas' addresses
	Whole    bool             // reserve all ports of other machines: an IPVS server captures a whole address
}

// ComputeReserved returns the addresses and ports that belong to the cluster's machines, agents and
// replicas, and the pod and Service ranges. The ports of a replica are reserved at all known
// addresses of its machine. It is pure.
func (x ReservedInputs) ComputeReserved() *Reserved {
	r := &Reserved{machines: map[netip.Addr]struct{}{}, agents: map[agentport.Port]struct{}{},
		replicas: map[netip.Addr][]uint16{},
		own:      map[netip.Addr]struct{}{}, local: map[uint16]struct{}{}, detached: x.Detached, whole: x.Whole}
	for _, p := range slices.Concat(agentport.Default(), x.Listens) {
		r.agents[p] = struct{}{}
	}
	r.ranges = slices.Concat(x.Cluster.ClusterPrefixes(), x.Cluster.ServicePrefixes(), x.Cluster.PodPrefixes())
	given := map[netip.Addr][]uint16{}
	for _, a := range x.Replicas {
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
	for _, p := range x.Peers {
		machine(p.Addresses)
		for _, c := range p.PodCIDRs {
			if !slices.ContainsFunc(r.ranges, func(known netip.Prefix) bool {
				return known.Overlaps(c) && known.Bits() <= c.Bits()
			}) {
				r.ranges = append(r.ranges, c)
			}
		}
	}
	own := slices.Clone(x.Own)
	if x.Node != nil {
		for _, a := range x.Node.Status.Addresses {
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
