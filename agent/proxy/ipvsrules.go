package proxy

import (
	"net/netip"

	"sigs.k8s.io/knftables"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// The nftables rules of mode ipvs. Traffic to frontends in the map "services" is marked, and
// masqueraded when it leaves the node. Rejects and source ranges are the same as in mode nftables.

const chainMarkSource = "mark"

// renderForIPVS returns the nftables map elements and chains that a Port requires in mode ipvs,
// where IPVS selects the backend. It is pure.
func renderForIPVS(f family, p *servicemodel.Port) portRules {
	out := portRules{elements: map[string][]mapElement{}}
	add := func(m string, at servicemodel.Frontend, value string) {
		m = mapName(m, at)
		out.elements[m] = append(out.elements[m], mapElement{f.elementKey(at), value, sanitizeComment(p.Name)})
	}
	if len(p.Backends.Cluster) == 0 {
		for _, at := range p.Internal {
			add(mapRefused, at, noBackendVerdict(p.StayInside, p))
		}
	}
	for _, at := range p.External {
		switch {
		case len(p.Backends.Outside) == 0, p.KeepSource && len(p.Backends.Here) == 0:
			add(mapRefused, at, noBackendVerdict(p.KeepSource, p))
		case !p.KeepSource:
			add(mapServices, at, "goto "+chainMarkSource)
		}
	}
	out.addGuard(p, add)
	out.hairpin = p.LocalAddresses()
	return out
}

// ipvsSkeleton returns the nftables table of mode ipvs for one address family, as it is without any
// Service. It contains the empty maps and sets, and the chains that mark, masquerade and reject
// traffic. b contains the pod ranges and other node settings. It is pure.
func ipvsSkeleton(f family, b Base) *tableSkeleton {
	full := f.fullSkeleton(b)
	s := &tableSkeleton{maps: full.maps, sets: full.sets}
	address := f.ip + " daddr . meta l4proto . th dport"
	local := "fib daddr type local " + f.ip + " daddr != " + f.loopback
	s.addChain(chainRefuse)
	s.addChain(chainUnserved)
	s.addChain(chainSilent)
	s.addChain(chainMarkSource)
	s.addRule(chainMarkSource, markStatement)
	for _, hook := range []knftables.BaseChainHook{knftables.PreroutingHook, knftables.OutputHook} {
		name := "guard-" + string(hook)
		s.addHookChain(name, knftables.FilterType, hook, knftables.DNATPriority+"-10")
		s.addBypass(name, hook)
		s.addRule(name, "ct state new %s vmap @%s", address, mapFirewall)
		s.addRule(name, "%s vmap @%s", address, mapServices)
		s.addRule(name, "%s meta l4proto . th dport vmap @%s", local, nodePortPrefix+mapServices)
	}
	const name = "nat-postrouting"
	s.addHookChain(name, knftables.NATType, knftables.PostroutingHook, knftables.SNATPriority)
	s.addRule(name, "meta mark and %s != 0 meta mark set meta mark xor %s masquerade", markMasquerade, markMasquerade)
	// IPVS has already changed the destination. Without masquerading, a pod that reached itself
	// would see its own address as the source.
	s.addRule(name, "%s saddr . %s daddr @%s masquerade", f.ip, f.ip, setHairpin)
	pods := f.familyPrefixes(b.PodCIDRs)
	for _, p := range pods {
		s.addRule(name, "%s saddr %s %s daddr != { %s } masquerade", f.ip, p, f.ip, joinPrefixes(pods))
	}
	s.addRefusalRules(f, address, local, nil)
	return s
}

// virtualServers returns the IPVS virtual servers of a Port with their real servers. nodeAddresses
// are the addresses at which node ports are served. It is pure.
func virtualServers(p *servicemodel.Port, nodeAddresses []netip.Addr) map[virtualServer]realServers {
	out := map[virtualServer]realServers{}
	add := func(at servicemodel.Frontend, to []servicemodel.Backend) {
		if len(to) == 0 {
			return // nftables rejects or drops this traffic
		}
		servers := realServers{}
		for _, b := range p.Backends.Serving {
			servers[netip.AddrPortFrom(b.IP, uint16(b.Port))] = 0
		}
		for _, b := range to {
			servers[netip.AddrPortFrom(b.IP, uint16(b.Port))] = 1
		}
		out[virtualServer{at, p.Affinity}] = servers
	}
	for _, at := range p.Internal {
		add(at, p.Backends.Cluster)
	}
	outside := p.Backends.Outside
	if p.KeepSource {
		outside = p.Backends.Here
	}
	for _, at := range p.External {
		if !at.IsNodePort() {
			add(at, outside)
			continue
		}
		for _, ip := range nodeAddresses {
			if ip.Is6() == p.V6 {
				add(servicemodel.Frontend{IP: ip, Proto: at.Proto, Port: at.Port}, outside)
			}
		}
	}
	return out
}
