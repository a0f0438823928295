package proxy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// Names of the iptables chains that all Ports share. Each Port also has its own chains, with names
// that end in its ID.
const (
	chainPrefix      = "KEELSON-"
	chainServices    = "KEELSON-SERVICES"
	chainNodePorts   = "KEELSON-NODEPORTS"
	chainIPTDispatch = "KEELSON-DISPATCH"
	chainMark        = "KEELSON-MARK"
	chainMasquerade  = "KEELSON-MASQUERADE"
	chainPostrouting = "KEELSON-POSTROUTING"
	chainNoBackend   = "KEELSON-REFUSE"
	chainRefusals    = "KEELSON-REFUSALS"
	chainRefusedNode = "KEELSON-REFUSED-NODEPORTS"
	chainDeny        = "KEELSON-DENY"
	chainRange       = "KEELSON-RANGE"
	chainGuard       = "KEELSON-GUARD"
)

// iptMark is markMasquerade in the form MARK/MASK of iptables.
const iptMark = markMasquerade + "/" + markMasquerade

// iptBypass is a rule that exempts the agent's own connections to replicas, by their packet mark,
// from the rest of a chain. The source must be local, because the agent does not set the marks of
// forwarded packets.
var iptBypass = fmt.Sprintf("-m mark --mark %#x/%#x -m addrtype --src-type LOCAL -j RETURN", agent.ReplicaMark,
	agent.ReplicaMark)

// iptRules is a set of iptables rules: table → chain → rules in order.
type iptRules map[string]map[string][]string

func (r iptRules) addChain(table, name string) {
	if r[table] == nil {
		r[table] = map[string][]string{}
	}
	if r[table][name] == nil {
		r[table][name] = []string{}
	}
}

func (r iptRules) addRule(table, name, rule string) {
	r.addChain(table, name)
	r[table][name] = append(r[table][name], rule)
}

// byTableAndChain returns the rules of each chain. The keys have the form "TABLE CHAIN".
func (r iptRules) byTableAndChain() map[string][]string {
	out := map[string][]string{}
	for table, chains := range r {
		for name, rules := range chains {
			out[table+" "+name] = rules
		}
	}
	return out
}

func isSharedChain(name string) bool {
	return !strings.HasPrefix(name, "KEELSON-SVC-") && !strings.HasPrefix(name, "KEELSON-OUT-") &&
		!strings.HasPrefix(name, "KEELSON-EXT-") &&
		!strings.HasPrefix(name, "KEELSON-LOC-") && !strings.HasPrefix(name, "KEELSON-SEP-") &&
		!strings.HasPrefix(name, "KEELSON-FW-") &&
		!strings.HasPrefix(name, chainAddress)
}

// kernelJump is an iptables rule of a built-in chain that jumps to a chain of Keelson.
type kernelJump struct{ table, from, match, to string }

func (f family) kernelJumps() []kernelJump {
	var out []kernelJump
	for _, from := range []string{"PREROUTING", "OUTPUT"} {
		out = append(out, kernelJump{"mangle", from, "-m conntrack --ctstate NEW", chainGuard},
			kernelJump{"nat", from, "", chainIPTDispatch})
	}
	out = append(out, kernelJump{"nat", "POSTROUTING", "", chainPostrouting})
	for _, from := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		out = append(out, kernelJump{"filter", from, "-m conntrack --ctstate NEW", chainNoBackend})
		if from != "INPUT" {
			out = append(out, kernelJump{"filter", from, "", chainRange})
		}
	}
	return out
}

// iptSkeleton returns the iptables rules that exist even without Services: the shared chains and
// the jumps to them. It is pure.
func (f family) iptSkeleton(b Base) iptRules {
	r := iptRules{}
	for _, j := range f.kernelJumps() {
		r.addChain(j.table, j.to)
	}
	r.addChain("nat", chainServices)
	r.addChain("nat", chainNodePorts)
	r.addChain("filter", chainRefusals)
	r.addChain("filter", chainRefusedNode)
	for table, chain := range map[string]string{"mangle": chainGuard, "nat": chainIPTDispatch,
		"filter": chainNoBackend} {
		r.addRule(table, chain, iptBypass)
	}
	r.addRule("nat", chainIPTDispatch, "-j "+chainServices)
	r.addRule("filter", chainNoBackend, "-j "+chainRefusals)
	for _, node := range f.nodeAddresses(b) {
		r.addRule("nat", chainIPTDispatch, node+" -j "+chainNodePorts)
		r.addRule("filter", chainNoBackend, node+" -j "+chainRefusedNode)
	}
	// Departing packets carry no mark: a tunnel copies the mark of the inner packet to the outer
	// packet.
	r.addRule("nat", chainMasquerade, "-j MARK --xor-mark "+markMasquerade)
	r.addRule("nat", chainMasquerade, "-j MASQUERADE")
	r.addRule("nat", chainMark, "-j MARK --or-mark "+markMasquerade)
	r.addRule("nat", chainPostrouting, "-m mark --mark "+iptMark+" -j "+chainMasquerade)
	pods := f.familyPrefixes(b.PodCIDRs)
	if len(pods) > 0 {
		for _, p := range pods {
			r.addRule("nat", chainPostrouting, fmt.Sprintf("-s %s ! -d %s -j MASQUERADE", p, p))
		}
	}
	r.addRule("filter", chainDeny, "-p tcp -j REJECT --reject-with tcp-reset")
	r.addRule("filter", chainDeny, "-j REJECT")
	for _, c := range f.familyPrefixes(b.ServiceCIDRs) {
		r.addRule("filter", chainRange, fmt.Sprintf("-d %s -m addrtype ! --dst-type LOCAL -j %s", c, chainDeny))
	}
	return r
}

// nodeAddresses returns the iptables matches for the destination addresses at which node ports are
// served. The caller must write one rule per match.
func (f family) nodeAddresses(b Base) []string {
	if len(b.NodePorts) == 0 {
		return []string{"! -d " + f.loopback + " -m addrtype --dst-type LOCAL"}
	}
	var out []string
	for _, p := range f.familyPrefixes(b.NodePorts) {
		out = append(out, "-d "+p.String()+" -m addrtype --dst-type LOCAL")
	}
	return out
}

func (f family) hairpinRule(ip netip.Addr) string {
	return fmt.Sprintf("-s %s -d %s -m conntrack --ctstate DNAT -j MASQUERADE", ip, ip)
}

// matchFrontend returns the iptables match for packets to a frontend.
func matchFrontend(at servicemodel.Frontend) string {
	match := fmt.Sprintf("-p %s -m %s --dport %d", at.Proto, at.Proto, at.Port)
	if !at.IsNodePort() {
		match = "-d " + netip.PrefixFrom(at.IP, at.IP.BitLen()).String() + " " + match
	}
	return match
}

// addPortRules adds to rules the chains and rules of a Port, without the rules for external
// addresses (see addServiceRules). It returns the local pods that are backends and may reach
// themselves through the Port. It changes nothing but rules.
func (t *iptFamily) addPortRules(rules iptRules, p *servicemodel.Port) (local []netip.Addr) {
	inside := t.addBalancingChain(rules, p, "SVC", p.Backends.Cluster)
	for _, at := range p.Internal {
		if inside == "" {
			rules.addRule("filter", chainRefusals, matchFrontend(at)+" -j "+
				iptRefusal(noBackendVerdict(p.StayInside, p)))
		} else {
			rules.addRule("nat", chainServices, matchFrontend(at)+commentMatch(p.Name)+" -j "+inside)
		}
	}
	if len(p.External) > 0 {
		t.addExternalRules(rules, p, inside)
	}
	return distinctAddrs(p.LocalAddresses())
}

// addExternalRules adds to rules the chains for external traffic to a Port, and the Port's rules
// for node ports. balancingChain is the chain that balances over all endpoints.
func (t *iptFamily) addExternalRules(rules iptRules, p *servicemodel.Port, balancingChain string) {
	if !slices.Equal(p.Backends.Outside, p.Backends.Cluster) {
		balancingChain = t.addBalancingChain(rules, p, "OUT", p.Backends.Outside)
	}
	ext, refusal := iptExternalTargets(p)
	for _, at := range p.External {
		if !at.IsNodePort() {
			continue
		}
		if ext != "" {
			rules.addRule("nat", chainNodePorts, matchFrontend(at)+commentMatch(p.Name)+" -j "+ext)
		}
		if refusal != "" {
			rules.addRule("filter", chainRefusedNode, matchFrontend(at)+" -j "+refusal)
		}
	}
	if ext == "" {
		return
	}
	if !p.KeepSource {
		rules.addRule("nat", ext, "-j "+chainMark)
		rules.addRule("nat", ext, "-j "+balancingChain)
		return
	}
	for _, pods := range t.familyPrefixes(t.base.PodCIDRs) {
		rules.addRule("nat", ext, "-s "+pods.String()+" -j "+balancingChain)
	}
	rules.addRule("nat", ext, "-m addrtype --src-type LOCAL -j "+chainMark)
	rules.addRule("nat", ext, "-m addrtype --src-type LOCAL -j "+balancingChain)
	if here := t.addBalancingChain(rules, p, "LOC", p.Backends.Here); here != "" {
		rules.addRule("nat", ext, "-j "+here)
	}
}

// addBalancingChain adds to rules a chain that selects one of the backends, at random or by session
// affinity. It returns the chain's name, which contains kind, or "" if there are no backends.
func (t *iptFamily) addBalancingChain(
	rules iptRules, p *servicemodel.Port, kind string, backends []servicemodel.Backend,
) string {
	if len(backends) == 0 {
		return ""
	}
	name := "KEELSON-" + kind + "-" + p.ID
	if rules["nat"][name] != nil {
		return name
	}
	rules.addChain("nat", name)
	own := func(b servicemodel.Backend) string {
		return "KEELSON-SEP-" + servicemodel.ShortHash(fmt.Sprint(p.ID, b.AddrPort()))
	}
	if p.Affinity > 0 {
		for _, b := range backends {
			rules.addRule("nat", name, fmt.Sprintf("-m recent --name %s --rcheck --seconds %d --reap -j %s", own(b),
				p.Affinity, own(b)))
		}
	}
	for i, b := range backends {
		chance := ""
		if left := len(backends) - i; left > 1 {
			chance = " -m statistic --mode random --probability " + strconv.FormatFloat(1/float64(left), 'f', 10, 64)
		}
		if p.Affinity == 0 {
			rules.addRule("nat", name, fmt.Sprintf("-p %s%s -j DNAT --to-destination %s", p.Proto, chance,
				b.AddrPort()))
			continue
		}
		rules.addRule("nat", name, strings.TrimSpace(chance+" -j "+own(b)))
		if rules["nat"][own(b)] == nil {
			rules.addRule("nat", own(b), fmt.Sprintf("-p %s -m recent --name %s --set -j DNAT --to-destination %s",
				p.Proto, own(b), b.AddrPort()))
		}
	}
	return name
}

// writeTable writes to b the input for iptables-restore that replaces all of Keelson's rules in one
// table. current contains the kernel's current rules, with keys of the form "TABLE CHAIN".
func (r iptRules) writeTable(b *strings.Builder, table string, current map[string][]string) {
	b.WriteString("*" + table + "\n")
	names := slices.Sorted(maps.Keys(r[table]))
	var gone []string
	for _, key := range slices.Sorted(maps.Keys(current)) {
		in, name, _ := strings.Cut(key, " ")
		if _, ok := r[table][name]; in == table && strings.HasPrefix(name, chainPrefix) && !ok {
			gone = append(gone, name)
		}
	}
	for _, name := range slices.Concat(names, gone) {
		b.WriteString(":" + name + " - [0:0]\n")
	}
	for _, name := range names {
		for _, rule := range r[table][name] {
			b.WriteString("-A " + name + " " + rule + "\n")
		}
	}
	for _, name := range gone {
		b.WriteString("-X " + name + "\n")
	}
	for _, j := range (family{}).kernelJumps() {
		if j.table != table {
			continue
		}
		has := func(rule string) bool { return strings.HasSuffix(rule, "-j "+j.to) }
		if !slices.ContainsFunc(current[table+" "+j.from], has) {
			b.WriteString(strings.Join(strings.Fields("-I "+j.from+" "+j.match+" -j "+j.to), " ") + "\n")
		}
	}
	b.WriteString("COMMIT\n")
}
