package proxy

import "sigs.k8s.io/knftables"

// The nftables rules of mode ipvs. Traffic to frontends in the map "services" is marked, and
// masqueraded when it leaves the node. Rejects and source ranges are the same as in mode nftables.

const chainMarked = "mark"

// besideIPVSPort returns the nftables elements of a Port in mode ipvs. It is pure.
func besideIPVSPort(f family, p *Port) piece {
	out := piece{elements: map[string][]element{}}
	add := func(m string, at Frontend, value string) {
		m = mapFor(m, at)
		out.elements[m] = append(out.elements[m], element{f.key(at), value, comment(p.Name)})
	}
	if len(p.Cluster) == 0 {
		for _, at := range p.Internal {
			add(mapRefused, at, without(p.StayInside, p))
		}
	}
	for _, at := range p.External {
		switch {
		case len(p.Outside) == 0, p.KeepSource && len(p.Here) == 0:
			add(mapRefused, at, without(p.KeepSource, p))
		case !p.KeepSource:
			add(mapServices, at, "goto "+chainMarked)
		}
	}
	out.guard(p, add)
	out.hairpin = p.local()
	return out
}

// besideIPVS returns the nftables table of mode ipvs without Services. It is pure.
func besideIPVS(f family, b Base) *skeleton {
	full := f.skeletonOf(b)
	s := &skeleton{maps: full.maps, sets: full.sets}
	address := f.ip + " daddr . meta l4proto . th dport"
	local := "fib daddr type local " + f.ip + " daddr != " + f.loopback
	s.chain(chainRefuse)
	s.chain(chainUnserved)
	s.chain(chainSilent)
	s.chain(chainMarked)
	s.rule(chainMarked, markStatement)
	for _, hook := range []knftables.BaseChainHook{knftables.PreroutingHook, knftables.OutputHook} {
		name := "guard-" + string(hook)
		s.hook(name, knftables.FilterType, hook, knftables.DNATPriority+"-10")
		s.bypass(name, hook)
		s.rule(name, "ct state new %s vmap @%s", address, mapFirewall)
		s.rule(name, "%s vmap @%s", address, mapServices)
		s.rule(name, "%s meta l4proto . th dport vmap @%s", local, nodePortPrefix+mapServices)
	}
	const name = "nat-postrouting"
	s.hook(name, knftables.NATType, knftables.PostroutingHook, knftables.SNATPriority)
	s.rule(name, "meta mark and %s != 0 meta mark set meta mark xor %s masquerade", markMasquerade, markMasquerade)
	// IPVS has already changed the destination. Without masquerading, a pod that reached itself
	// would see its own address as the source.
	s.rule(name, "%s saddr . %s daddr @%s masquerade", f.ip, f.ip, setHairpin)
	pods := f.of(b.PodCIDRs)
	for _, p := range pods {
		s.rule(name, "%s saddr %s %s daddr != { %s } masquerade", f.ip, p, f.ip, joined(pods))
	}
	s.refusals(f, address, local, nil)
	return s
}
