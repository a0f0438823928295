package proxy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// The external frontends of a Service are the pairs of its external addresses and its ports. The
// number of rules for them is the sum of addresses and ports, not the product: each address has a
// rule that jumps to a chain of the Service, and this chain has a rule for each port.

// chainAddress is the prefix of the chains to which the rules of external addresses jump. The chain
// with all ports of a Service has the hash of the Service as its suffix. A chain for addresses that
// serve only some of the ports has a number after the hash.
const chainAddress = "KEELSON-ADR-"

// frontendRule is the iptables rule of an external frontend. target is the part of the rule that
// follows the match: a comment and the jump.
type frontendRule struct {
	frontend servicemodel.Frontend
	target   string
}

// addServiceRules adds to rules the rules that all Ports of a Service share: the rules for its
// external addresses and for its source ranges. Besides rules, it changes only the order of ports.
func addServiceRules(rules iptRules, service string, ports []*servicemodel.Port) {
	slices.SortFunc(ports, func(a, b *servicemodel.Port) int { return strings.Compare(a.ID, b.ID) })
	var dispatched, refused, guarded []frontendRule
	fw := "KEELSON-FW-" + servicemodel.ShortHash(service)
	for _, p := range ports {
		to, verdict := iptExternalTargets(p)
		for _, at := range p.External {
			if at.IsNodePort() {
				continue
			}
			if to != "" {
				dispatched = append(dispatched, frontendRule{at, commentMatch(p.Name) + " -j " + to})
			}
			if verdict != "" {
				refused = append(refused, frontendRule{at, " -j " + verdict})
			}
		}
		for _, at := range p.Guarded {
			guarded = append(guarded, frontendRule{at, " -j " + fw})
		}
		if len(p.Guarded) > 0 && rules["mangle"][fw] == nil { // all ports of a Service have the same ranges
			for _, s := range p.Sources.Prefixes {
				rules.addRule("mangle", fw, "-s "+s.String()+" -j RETURN")
			}
			rules.addRule("mangle", fw, "-j DROP")
		}
	}
	rules.addPairRules("nat", chainServices, service, dispatched)
	rules.addPairRules("filter", chainRefusals, service, refused)
	rules.addPairRules("mangle", chainGuard, service, guarded)
}

func commentMatch(name string) string { return ` -m comment --comment "` + sanitizeComment(name) + `"` }

// iptExternalTargets returns the chain that serves external traffic to the Port, or "" if no
// endpoint serves such traffic. refusal is the iptables target for traffic that this node does not
// serve, or "" if this node serves all external traffic.
func iptExternalTargets(p *servicemodel.Port) (chain, refusal string) {
	chain = "KEELSON-EXT-" + p.ID
	switch {
	case len(p.Backends.Outside) == 0:
		return "", iptRefusal(noBackendVerdict(p.KeepSource, p))
	case p.KeepSource && len(p.Backends.Here) == 0:
		return chain, iptRefusal("goto " + chainSilent)
	}
	return chain, ""
}

// iptRefusal returns the iptables target (DROP or the rejecting chain) for traffic without a
// backend. verdict is the equivalent nftables verdict, as noBackendVerdict returns it.
func iptRefusal(verdict string) string {
	if verdict == "goto "+chainSilent {
		return "DROP"
	}
	return chainDeny
}

// addressGroup is a group of external addresses of a Service that serve the same ports.
type addressGroup struct {
	addresses []netip.Addr
	ports     []frontendRule // ports of the first address
}

// ruleCosts returns the number of iptables rules that a group of addresses requires, for each of
// three ways to write them. ports is the number of ports of the Service. direct is the number with
// one rule per pair of address and port. own is the number with a chain that has the group's ports.
// whole is the number with a chain that excludes the ports that the group lacks, and jumps to the
// chain with all ports of the Service.
func (g *addressGroup) ruleCosts(ports int) (direct, own, whole int) {
	a, n := len(g.addresses), len(g.ports)
	whole = a
	if lacking := ports - n; lacking > 0 {
		whole += lacking + 1
	}
	return a * n, a + n, whole
}

// addPairRules adds rules for the external frontends of a Service to the chain sharedChain of a
// table. If all addresses have all ports, the number of rules is at most the sum of addresses and
// ports.
//
// Other Services or the cluster may own some pairs of address and port. Addresses that lack ports
// are therefore grouped by their remaining ports. For each group, the variant with the fewest rules
// is written (see ruleCosts).
func (r iptRules) addPairRules(table, sharedChain, service string, frontendRules []frontendRule) {
	groups, ports := groupAddresses(frontendRules)
	port := func(chain string, p frontendRule, to string) {
		r.addRule(table, chain,
			matchFrontend(servicemodel.Frontend{IP: netip.IPv4Unspecified(), Proto: p.frontend.Proto,
				Port: p.frontend.Port})+to)
	}
	saved := 0
	for _, g := range groups {
		direct, own, whole := g.ruleCosts(len(ports))
		saved += max(0, min(direct, own)-whole)
	}
	common, hasCommon := chainAddress+servicemodel.ShortHash(service), saved > 0 && saved >= len(ports)
	if hasCommon {
		for _, p := range ports {
			port(common, p, p.target)
		}
	}
	for i, g := range groups {
		chain := common + hexNumber(i)
		direct, own, whole := g.ruleCosts(len(ports))
		switch {
		case hasCommon && whole < min(direct, own):
			lacking := missingPorts(ports, g.ports)
			if len(lacking) == 0 {
				chain = common
				break
			}
			for _, p := range lacking {
				port(chain, p, " -j RETURN")
			}
			r.addRule(table, chain, "-j "+common)
		case own < direct:
			for _, p := range g.ports {
				port(chain, p, p.target)
			}
		default:
			for _, ip := range g.addresses {
				for _, p := range g.ports {
					r.addRule(table, sharedChain,
						matchFrontend(servicemodel.Frontend{IP: ip, Proto: p.frontend.Proto, Port: p.frontend.Port})+
							p.target)
				}
			}
			continue
		}
		for _, ip := range g.addresses {
			r.addRule(table, sharedChain, "-d "+netip.PrefixFrom(ip, ip.BitLen()).String()+
				commentMatch(service)+" -j "+chain)
		}
	}
}

// hexNumber returns the lowest 16 bits of i as four hexadecimal digits. Chain names have at most 28
// characters.
func hexNumber(i int) string {
	const digits = "0123456789abcdef"
	return string([]byte{digits[i>>12&15], digits[i>>8&15], digits[i>>4&15], digits[i&15]})
}

// groupAddresses groups the external addresses of frontends by the ports that they serve. It
// returns the groups, sorted by their first address, and the distinct ports of all frontends,
// sorted by protocol and number. It sorts all.
func groupAddresses(all []frontendRule) (groups []*addressGroup, ports []frontendRule) {
	byPort := func(a, b frontendRule) int {
		return cmp.Or(strings.Compare(a.frontend.Proto, b.frontend.Proto),
			cmp.Compare(a.frontend.Port, b.frontend.Port))
	}
	slices.SortFunc(all, byPort)
	has := map[netip.Addr]*addressGroup{}
	keys := map[netip.Addr][]byte{}
	for _, p := range all {
		if n := len(ports); n == 0 || byPort(ports[n-1], p) != 0 {
			ports = append(ports, p)
		}
		if has[p.frontend.IP] == nil {
			has[p.frontend.IP] = &addressGroup{addresses: []netip.Addr{p.frontend.IP}}
		}
		has[p.frontend.IP].ports = append(has[p.frontend.IP].ports, p)
		n := len(ports)
		keys[p.frontend.IP] = append(keys[p.frontend.IP], byte(n>>16), byte(n>>8), byte(n))
	}
	same := map[string]*addressGroup{}
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

// missingPorts returns the elements of ports with a protocol and port that are not in has. Both
// lists are sorted.
func missingPorts(ports, has []frontendRule) (out []frontendRule) {
	for _, p := range ports {
		if len(has) > 0 && has[0].frontend.Proto == p.frontend.Proto && has[0].frontend.Port == p.frontend.Port {
			has = has[1:]
			continue
		}
		out = append(out, p)
	}
	return out
}
