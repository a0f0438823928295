package proxy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
)

// The external frontends of a Service are the pairs of its external addresses and its ports. The
// number of rules for them is the sum of addresses and ports, not the product: each address has a
// rule that jumps to a chain of the Service, and this chain has a rule for each port.

// chainAddress is the prefix of the chains to which the rules of external addresses jump. The chain
// with all ports of a Service has the hash of the Service as its suffix. A chain of addresses that
// lack ports has a number after the hash.
const chainAddress = "KEELSON-ADR-"

// serviceName returns the name of a Port's Service: "namespace/service".
func (p *Port) serviceName() string {
	name, _, _ := strings.Cut(p.Name, ":")
	return name
}

// frontendRule is an external frontend with the part of its iptables rule that follows the match:
// comment and target.
type frontendRule struct {
	frontend Frontend
	target   string
}

// addServiceRules adds the rules that all Ports of a Service share to a rule set: rules for its
// external addresses and its source ranges. It is pure.
func addServiceRules(into iptRules, service string, ports []*Port) {
	slices.SortFunc(ports, func(a, b *Port) int { return strings.Compare(a.ID, b.ID) })
	var dispatched, refused, guarded []frontendRule
	fw := "KEELSON-FW-" + shortHash(service)
	for _, p := range ports {
		to, verdict := p.iptExternalTargets()
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
		if len(p.Guarded) > 0 && into["mangle"][fw] == nil { // all ports of a Service have the same ranges
			for _, s := range p.Sources {
				into.addRule("mangle", fw, "-s "+s.String()+" -j RETURN")
			}
			into.addRule("mangle", fw, "-j DROP")
		}
	}
	into.addPairRules("nat", chainServices, service, dispatched)
	into.addPairRules("filter", chainRefusals, service, refused)
	into.addPairRules("mangle", chainGuard, service, guarded)
}

func commentMatch(name string) string { return ` -m comment --comment "` + sanitizeComment(name) + `"` }

// iptExternalTargets returns the chain that serves external traffic to the Port, or "" if no
// endpoint serves it. refusal is the iptables target for traffic that this node does not serve, or
// "" if this node serves all of it.
func (p *Port) iptExternalTargets() (chain, refusal string) {
	chain = "KEELSON-EXT-" + p.ID
	switch {
	case len(p.Outside) == 0:
		return "", iptRefusal(noBackendVerdict(p.KeepSource, p))
	case p.KeepSource && len(p.Here) == 0:
		return chain, iptRefusal("goto " + chainSilent)
	}
	return chain, ""
}

// iptRefusal returns the iptables target for traffic without a backend. verdict is the equivalent
// nftables verdict.
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

// ruleCosts returns the number of iptables rules that a group of addresses requires in each of
// three forms. direct is for a rule per pair of address and port. own is for a chain with the
// group's ports. whole is for a chain that excludes the ports that the group lacks, and jumps to
// the chain with all ports of the Service.
func (g *addressGroup) ruleCosts(ports int) (direct, own, whole int) {
	a, n := len(g.addresses), len(g.ports)
	whole = a
	if lacking := ports - n; lacking > 0 {
		whole += lacking + 1
	}
	return a * n, a + n, whole
}

// addPairRules adds rules to the chain shared of a table for the external frontends all of a
// Service. If all addresses have all ports, the number of rules is at most the sum of addresses and
// ports.
//
// Other Services or the cluster may hold some pairs of address and port. Addresses that lack ports
// are therefore grouped by their remaining ports. Each group takes the form with the fewest rules.
func (r iptRules) addPairRules(table, shared, service string, all []frontendRule) {
	groups, ports := groupAddresses(all)
	port := func(chain string, p frontendRule, to string) {
		r.addRule(table, chain, matchFrontend(Frontend{netip.IPv4Unspecified(), p.frontend.Proto, p.frontend.Port})+to)
	}
	saved := 0
	for _, g := range groups {
		direct, own, whole := g.ruleCosts(len(ports))
		saved += max(0, min(direct, own)-whole)
	}
	common, hasCommon := chainAddress+shortHash(service), saved > 0 && saved >= len(ports)
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
					r.addRule(table, shared, matchFrontend(Frontend{ip, p.frontend.Proto, p.frontend.Port})+p.target)
				}
			}
			continue
		}
		for _, ip := range g.addresses {
			r.addRule(table, shared, "-d "+netip.PrefixFrom(ip, ip.BitLen()).String()+commentMatch(service)+" -j "+chain)
		}
	}
}

// hexNumber returns four hexadecimal digits, because chain names have at most 28 characters.
func hexNumber(i int) string {
	const digits = "0123456789abcdef"
	return string([]byte{digits[i>>12&15], digits[i>>8&15], digits[i>>4&15], digits[i&15]})
}

// groupAddresses groups the external addresses of frontends by their ports. It returns the groups
// in the order of their first address, and all ports in order.
func groupAddresses(all []frontendRule) (groups []*addressGroup, ports []frontendRule) {
	byPort := func(a, b frontendRule) int {
		return cmp.Or(strings.Compare(a.frontend.Proto, b.frontend.Proto), cmp.Compare(a.frontend.Port, b.frontend.Port))
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

// missingPorts returns the elements of ports that are not in has. Both lists are sorted.
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
