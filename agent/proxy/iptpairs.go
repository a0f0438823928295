package proxy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// The external frontends of a Service are the pairs of its external addresses and its ports. The number of rules for them is
// the sum of addresses and ports, not the product: each address has a rule that jumps to a chain of the Service, and this
// chain has a rule for each port.

// chainAddress is the prefix of the chains to which the rules of external addresses jump. The chain with all ports of a
// Service has the hash of the Service as its suffix. A chain of addresses that lack ports has a number after the hash.
const chainAddress = "KEELSON-ADR-"

// serviceName returns the name of a Port's Service: "namespace/service".
func (p *Port) serviceName() string {
	name, _, _ := strings.Cut(p.Name, ":")
	return name
}

// aimed is an external frontend and the end of its rule: comment and target.
type aimed struct {
	at Frontend
	to string
}

// iptService renders the rules that the Ports of a Service share: external addresses and source
// ranges. It is pure.
func iptService(into iptRules, service string, ports []*Port) {
	slices.SortFunc(ports, func(a, b *Port) int { return strings.Compare(a.ID, b.ID) })
	var dispatched, refused, guarded []aimed
	fw := "KEELSON-FW-" + short(service)
	for _, p := range ports {
		to, verdict := p.iptOutside()
		for _, at := range p.External {
			if at.NodePort() {
				continue
			}
			if to != "" {
				dispatched = append(dispatched, aimed{at, commented(p.Name) + " -j " + to})
			}
			if verdict != "" {
				refused = append(refused, aimed{at, " -j " + verdict})
			}
		}
		for _, at := range p.Guarded {
			guarded = append(guarded, aimed{at, " -j " + fw})
		}
		if len(p.Guarded) > 0 && into["mangle"][fw] == nil { // all ports of a Service have the same ranges
			for _, s := range p.Sources {
				into.rule("mangle", fw, "-s "+s.String()+" -j RETURN")
			}
			into.rule("mangle", fw, "-j DROP")
		}
	}
	into.pairs("nat", chainServices, service, dispatched)
	into.pairs("filter", chainRefusals, service, refused)
	into.pairs("mangle", chainGuard, service, guarded)
}

func commented(name string) string { return ` -m comment --comment "` + comment(name) + `"` }

// iptOutside returns the chain that serves external traffic, or "" if no endpoint serves it. It
// also returns the target that rejects traffic that this node does not serve, or "" if this node
// serves all of it.
func (p *Port) iptOutside() (chain, refusal string) {
	chain = "KEELSON-EXT-" + p.ID
	switch {
	case len(p.Outside) == 0:
		return "", iptRefusal(without(p.KeepSource, p))
	case p.KeepSource && len(p.Here) == 0:
		return chain, iptRefusal("goto " + chainSilent)
	}
	return chain, ""
}

// iptRefusal returns the iptables target for a verdict of mode nftables.
func iptRefusal(verdict string) string {
	if verdict == "goto "+chainSilent {
		return "DROP"
	}
	return chainDeny
}

// group is a group of external addresses with the same ports of a Service.
type group struct {
	addresses []netip.Addr
	ports     []aimed // ports of the first address
}

// costs returns the number of rules of a group in each of three forms: a rule for each pair; a
// chain with the group's ports; a chain that excludes the missing ports and jumps to the Service's
// chain with all ports.
func (g *group) costs(ports int) (direct, own, whole int) {
	a, n := len(g.addresses), len(g.ports)
	whole = a
	if lacking := ports - n; lacking > 0 {
		whole += lacking + 1
	}
	return a * n, a + n, whole
}

// pairs adds rules to a shared chain for the frontends of a Service. If all addresses have all
// ports, the number of rules is at most the sum of addresses and ports. Another Service or the
// cluster may hold some pairs. Addresses that lack ports are therefore grouped by their remaining
// ports, and each group takes the form with the fewest rules.
func (r iptRules) pairs(table, shared, service string, all []aimed) {
	groups, ports := grouped(all)
	port := func(chain string, p aimed, to string) {
		r.rule(table, chain, matching(Frontend{netip.IPv4Unspecified(), p.at.Proto, p.at.Port})+to)
	}
	saved := 0
	for _, g := range groups {
		direct, own, whole := g.costs(len(ports))
		saved += max(0, min(direct, own)-whole)
	}
	common, hasCommon := chainAddress+short(service), saved > 0 && saved >= len(ports)
	if hasCommon {
		for _, p := range ports {
			port(common, p, p.to)
		}
	}
	for i, g := range groups {
		chain := common + hexNumber(i)
		direct, own, whole := g.costs(len(ports))
		switch {
		case hasCommon && whole < min(direct, own):
			lacking := missing(ports, g.ports)
			if len(lacking) == 0 {
				chain = common
				break
			}
			for _, p := range lacking {
				port(chain, p, " -j RETURN")
			}
			r.rule(table, chain, "-j "+common)
		case own < direct:
			for _, p := range g.ports {
				port(chain, p, p.to)
			}
		default:
			for _, ip := range g.addresses {
				for _, p := range g.ports {
					r.rule(table, shared, matching(Frontend{ip, p.at.Proto, p.at.Port})+p.to)
				}
			}
			continue
		}
		for _, ip := range g.addresses {
			r.rule(table, shared, "-d "+netip.PrefixFrom(ip, ip.BitLen()).String()+commented(service)+" -j "+chain)
		}
	}
}

// hexNumber returns four hexadecimal digits, because chain names have at most 28 characters.
func hexNumber(i int) string {
	const digits = "0123456789abcdef"
	return string([]byte{digits[i>>12&15], digits[i>>8&15], digits[i>>4&15], digits[i&15]})
}

// grouped groups the addresses of frontends by their ports. It returns the groups in the order of
// their first address, and all ports in order.
func grouped(all []aimed) (groups []*group, ports []aimed) {
	byPort := func(a, b aimed) int {
		return cmp.Or(strings.Compare(a.at.Proto, b.at.Proto), cmp.Compare(a.at.Port, b.at.Port))
	}
	slices.SortFunc(all, byPort)
	has := map[netip.Addr]*group{}
	keys := map[netip.Addr][]byte{}
	for _, p := range all {
		if n := len(ports); n == 0 || byPort(ports[n-1], p) != 0 {
			ports = append(ports, p)
		}
		if has[p.at.IP] == nil {
			has[p.at.IP] = &group{addresses: []netip.Addr{p.at.IP}}
		}
		has[p.at.IP].ports = append(has[p.at.IP].ports, p)
		n := len(ports)
		keys[p.at.IP] = append(keys[p.at.IP], byte(n>>16), byte(n>>8), byte(n))
	}
	same := map[string]*group{}
	for _, ip := range slices.SortedFunc(maps.Keys(has), netip.Addr.Compare) {
		key := string(keys[ip])
		if g := same[key]; g != nil {
			g.addresses = append(g.addresses, ip)
			continue
		}
		same[key] = has[ip]
		groups = append(groups, has[ip])
	}
	return groups, ports
}

// missing returns the ports that a group lacks. Both lists are sorted.
func missing(ports, has []aimed) (out []aimed) {
	for _, p := range ports {
		if len(has) > 0 && has[0].at.Proto == p.at.Proto && has[0].at.Port == p.at.Port {
			has = has[1:]
			continue
		}
		out = append(out, p)
	}
	return out
}
