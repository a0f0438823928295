package servicemodel

import (
	"cmp"
	"net/netip"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// candidate is an endpoint of a Service, with its topology hints that concern this node.
type candidate struct {
	Backend
	hintsNodes, forNode bool // there are node hints; they name this node
	hintsZones, forZone bool // there are zone hints; they name this node's zone
}

// candidates are the usable endpoints of one Service port. terminating has endpoints that are
// terminating but still serve. They receive traffic only if no endpoint is ready.
type candidates struct{ ready, terminating []candidate }

// findCandidates returns the usable endpoints of one port of a Service in one address family. parts
// are the Service's EndpointSlices. The node and zone of the Location determine which endpoints are
// local and which hints match.
func findCandidates(portName string, parts map[string]*discoveryv1.EndpointSlice, v6 bool, at Location) candidates {
	var out candidates
	family := discoveryv1.AddressTypeIPv4
	if v6 {
		family = discoveryv1.AddressTypeIPv6
	}
	for _, s := range parts {
		if s.AddressType != family || servedByOther(s.Labels) {
			continue
		}
		port := slicePort(portName, s)
		if port < 1 || port > 65535 {
			continue
		}
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			c := newCandidate(e, at)
			for _, a := range e.Addresses {
				ip, err := netip.ParseAddr(a)
				if err != nil || ip.Is6() != v6 || ip.Zone() != "" || isSpecialAddress(ip) {
					continue
				}
				c.IP, c.Port = ip, port
				switch is := e.Conditions; {
				case is.Ready == nil || *is.Ready:
					out.ready = append(out.ready, c)
				case is.Serving != nil && *is.Serving && is.Terminating != nil && *is.Terminating:
					out.terminating = append(out.terminating, c)
				}
			}
		}
	}
	return out
}

// isSpecialAddress reports whether an address is loopback, link-local, multicast, unspecified or
// IPv4-mapped. Such an endpoint would let the author of an EndpointSlice reach the nodes' loopback
// listeners or a metadata server.
func isSpecialAddress(ip netip.Addr) bool {
	return ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() || ip.IsUnspecified() || ip.Is4In6()
}

// slicePort returns the endpoints' port number in an EndpointSlice for the Service port called
// name. It returns 0 if the slice does not have that port.
func slicePort(name string, s *discoveryv1.EndpointSlice) int32 {
	var port int32
	for _, p := range s.Ports {
		if p.Port != nil && (p.Name == nil && name == "" || p.Name != nil && *p.Name == name) {
			port = *p.Port
		}
	}
	return port
}

func newCandidate(e *discoveryv1.Endpoint, at Location) candidate {
	c := candidate{Backend: Backend{Local: e.NodeName != nil && *e.NodeName == at.Node}}
	if h := e.Hints; h != nil {
		c.hintsNodes, c.hintsZones = len(h.ForNodes) > 0, len(h.ForZones) > 0
		c.forNode = slices.ContainsFunc(h.ForNodes, func(n discoveryv1.ForNode) bool { return n.Name == at.Node })
		c.forZone = slices.ContainsFunc(h.ForZones, func(z discoveryv1.ForZone) bool { return z.Name == at.Zone })
	}
	return c
}

// clusterBackends returns the backends of traffic that may go to any node. These are the ready
// endpoints that topology hints assign to this node, or all ready endpoints if the hints do not
// apply. If no endpoint is ready, it returns the terminating endpoints.
func (c candidates) clusterBackends() []Backend {
	if len(c.ready) == 0 {
		return distinctBackends(c.terminating)
	}
	return distinctBackends(hintedCandidates(c.ready))
}

// localBackends returns the backends of traffic that must stay on this node: the local ready
// endpoints, or the local terminating endpoints if no local endpoint is ready. It ignores topology
// hints, because the traffic policy takes precedence over them.
func (c candidates) localBackends() []Backend {
	if here := localCandidates(c.ready); len(here) > 0 {
		return distinctBackends(here)
	}
	return distinctBackends(localCandidates(c.terminating))
}

// servingBackends returns all endpoints that can serve traffic: the ready and the terminating
// endpoints.
func (c candidates) servingBackends() []Backend {
	return distinctBackends(slices.Concat(c.ready, c.terminating))
}

// hintedCandidates returns the endpoints that topology hints assign to this node. Node hints
// precede zone hints. A kind of hint applies only if every endpoint has it and at least one
// matches. Otherwise all endpoints are returned: the controller may be in the middle of an update,
// or no endpoint would remain.
func hintedCandidates(ready []candidate) []candidate {
	for _, mode := range []struct{ has, mine func(candidate) bool }{
		{func(c candidate) bool { return c.hintsNodes }, func(c candidate) bool { return c.forNode }},
		{func(c candidate) bool { return c.hintsZones }, func(c candidate) bool { return c.forZone }},
	} {
		if slices.ContainsFunc(ready, func(c candidate) bool { return !mode.has(c) }) {
			continue
		}
		if mine := filterCandidates(ready, mode.mine); len(mine) > 0 {
			return mine
		}
	}
	return ready
}

func localCandidates(all []candidate) []candidate {
	return filterCandidates(all, func(c candidate) bool { return c.Local })
}

func filterCandidates(all []candidate, wanted func(candidate) bool) []candidate {
	var out []candidate
	for _, c := range all {
		if wanted(c) {
			out = append(out, c)
		}
	}
	return out
}

// distinctBackends returns the backends of the candidates, sorted and without duplicates.
func distinctBackends(all []candidate) []Backend {
	out := make([]Backend, 0, len(all))
	for _, c := range all {
		out = append(out, c.Backend)
	}
	slices.SortFunc(out, func(a, b Backend) int {
		if c := cmp.Or(a.IP.Compare(b.IP), cmp.Compare(a.Port, b.Port)); c != 0 || a.Local == b.Local {
			return c
		}
		if a.Local {
			return -1
		}
		return 1
	})
	return slices.CompactFunc(out, func(a, b Backend) bool { return a.IP == b.IP && a.Port == b.Port })
}
