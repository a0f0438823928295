package proxy

import (
	"cmp"
	"net/netip"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"
)

// candidate is a backend with what its hints say about this node.
type candidate struct {
	Backend
	hintsNodes, forNode bool // there are hints of nodes; this one is among them
	hintsZones, forZone bool // the same of zones
}

// candidates are the endpoints of one port: those that take traffic, and those that
// terminate but still serve, which take it where there is none of the others.
type candidates struct{ ready, ending []candidate }

// endpointsOf reads the endpoints of a port, in one address family, as the node at a place sees them.
func endpointsOf(portName string, parts map[string]*discoveryv1.EndpointSlice, v6 bool, at Place) candidates {
	var out candidates
	family := discoveryv1.AddressTypeIPv4
	if v6 {
		family = discoveryv1.AddressTypeIPv6
	}
	for _, s := range parts {
		if s.AddressType != family || servedByOther(s.Labels) {
			continue
		}
		port := portOf(portName, s)
		if port < 1 || port > 65535 {
			continue
		}
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			c := candidateOf(e, at)
			for _, a := range e.Addresses {
				ip, err := netip.ParseAddr(a)
				if err != nil || ip.Is6() != v6 || ip.Zone() != "" || special(ip) {
					continue
				}
				c.IP, c.Port = ip, port
				switch is := e.Conditions; {
				case is.Ready == nil || *is.Ready:
					out.ready = append(out.ready, c)
				case is.Serving != nil && *is.Serving && is.Terminating != nil && *is.Terminating:
					out.ending = append(out.ending, c)
				}
			}
		}
	}
	return out
}

// special says that an address means something else on each node, or is nobody's. Who may write EndpointSlices would reach
// by it what listens on the loopback of nodes, or metadata servers beside them.
func special(ip netip.Addr) bool {
	return ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() || ip.IsUnspecified() || ip.Is4In6()
}

// portOf is the number that a slice gives to a port of the Service, 0 for none.
func portOf(name string, s *discoveryv1.EndpointSlice) int32 {
	var port int32
	for _, p := range s.Ports {
		if p.Port != nil && (p.Name == nil && name == "" || p.Name != nil && *p.Name == name) {
			port = *p.Port
		}
	}
	return port
}

func candidateOf(e *discoveryv1.Endpoint, at Place) candidate {
	c := candidate{Backend: Backend{Local: e.NodeName != nil && *e.NodeName == at.Node}}
	if h := e.Hints; h != nil {
		c.hintsNodes, c.hintsZones = len(h.ForNodes) > 0, len(h.ForZones) > 0
		c.forNode = slices.ContainsFunc(h.ForNodes, func(n discoveryv1.ForNode) bool { return n.Name == at.Node })
		c.forZone = slices.ContainsFunc(h.ForZones, func(z discoveryv1.ForZone) bool { return z.Name == at.Zone })
	}
	return c
}

// cluster are the backends of traffic that may go to any node: the ready ones that hints leave to this node, all ready
// ones where hints do not help, those that terminate where none is ready.
func (c candidates) cluster() []Backend {
	if len(c.ready) == 0 {
		return distinct(c.ending)
	}
	return distinct(hinted(c.ready))
}

// local are the backends of traffic that stays on the node. No hint moves it: the policy is stricter than the preference.
func (c candidates) local() []Backend {
	if here := localOnly(c.ready); len(here) > 0 {
		return distinct(here)
	}
	return distinct(localOnly(c.ending))
}

// serving are all that may still answer.
func (c candidates) serving() []Backend { return distinct(slices.Concat(c.ready, c.ending)) }

// hinted are the endpoints that hints leave to this node: those for the node itself, else those for its zone. Hints
// count only where each endpoint has one and one of them is for this node: else all endpoints stay, since a controller
// is in the middle of something, or nobody else would serve.
func hinted(ready []candidate) []candidate {
	for _, mode := range []struct{ has, mine func(candidate) bool }{
		{func(c candidate) bool { return c.hintsNodes }, func(c candidate) bool { return c.forNode }},
		{func(c candidate) bool { return c.hintsZones }, func(c candidate) bool { return c.forZone }},
	} {
		if slices.ContainsFunc(ready, func(c candidate) bool { return !mode.has(c) }) {
			continue
		}
		if mine := keep(ready, mode.mine); len(mine) > 0 {
			return mine
		}
	}
	return ready
}

func localOnly(all []candidate) []candidate {
	return keep(all, func(c candidate) bool { return c.Local })
}

func keep(all []candidate, wanted func(candidate) bool) []candidate {
	var out []candidate
	for _, c := range all {
		if wanted(c) {
			out = append(out, c)
		}
	}
	return out
}

// distinct are the backends in order, each once.
func distinct(all []candidate) []Backend {
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
