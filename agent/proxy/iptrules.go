package proxy

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"keelson.dev/keelson/agent"
)

// The chains that all Ports share. Each Port also has its own chains, named after its ID.
const (
	chainPrefix      = "KEELSON-"
	chainServices    = "KEELSON-SERVICES"
	chainNodePorts   = "KEELSON-NODEPORTS"
	chainFrontDoor   = "KEELSON-DISPATCH"
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

// iptMark is markMasquerade with its mask.
const iptMark = markMasquerade + "/" + markMasquerade

// iptBypass exempts the agent's own connections to replicas from a chain. The source must be local,
// because marks of forwarded packets are not set by the agent.
var iptBypass = fmt.Sprintf("-m mark --mark %#x/%#x -m addrtype --src-type LOCAL -j RETURN", agent.ReplicaMark, agent.ReplicaMark)

// iptRules holds rules by table and chain, in order.
type iptRules map[string]map[string][]string

func (r iptRules) chain(table, name string) {
	if r[table] == nil {
		r[table] = map[string][]string{}
	}
	if r[table][name] == nil {
		r[table][name] = []string{}
	}
}

func (r iptRules) rule(table, name, rule string) {
	r.chain(table, name)
	r[table][name] = append(r[table][name], rule)
}

// flat returns the rules of each chain, by "table chain".
func (r iptRules) flat() map[string][]string {
	out := map[string][]string{}
	for table, chains := range r {
		for name, rules := range chains {
			out[table+" "+name] = rules
		}
	}
	return out
}

func sharedChain(name string) bool {
	return !strings.HasPrefix(name, "KEELSON-SVC-") && !strings.HasPrefix(name, "KEELSON-OUT-") && !strings.HasPrefix(name, "KEELSON-EXT-") &&
		!strings.HasPrefix(name, "KEELSON-LOC-") && !strings.HasPrefix(name, "KEELSON-SEP-") && !strings.HasPrefix(name, "KEELSON-FW-") &&
		!strings.HasPrefix(name, chainAddress)
}

// jump is a jump from a built-in chain to a chain of Keelson.
type jump struct{ table, from, match, to string }

func (f family) jumps() []jump {
	var out []jump
	for _, from := range []string{"PREROUTING", "OUTPUT"} {
		out = append(out, jump{"mangle", from, "-m conntrack --ctstate NEW", chainGuard}, jump{"nat", from, "", chainFrontDoor})
	}
	out = append(out, jump{"nat", "POSTROUTING", "", chainPostrouting})
	for _, from := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		out = append(out, jump{"filter", from, "-m conntrack --ctstate NEW", chainNoBackend})
		if from != "INPUT" {
			out = append(out, jump{"filter", from, "", chainRange})
		}
	}
	return out
}

// iptSkeleton returns the rules that exist without Services. It is pure.
func (f family) iptSkeleton(b Base) iptRules {
	r := iptRules{}
	for _, j := range f.jumps() {
		r.chain(j.table, j.to)
	}
	r.chain("nat", chainServices)
	r.chain("nat", chainNodePorts)
	r.chain("filter", chainRefusals)
	r.chain("filter", chainRefusedNode)
	for table, chain := range map[string]string{"mangle": chainGuard, "nat": chainFrontDoor, "filter": chainNoBackend} {
		r.rule(table, chain, iptBypass)
	}
	r.rule("nat", chainFrontDoor, "-j "+chainServices)
	r.rule("filter", chainNoBackend, "-j "+chainRefusals)
	for _, node := range f.nodeAddresses(b) {
		r.rule("nat", chainFrontDoor, node+" -j "+chainNodePorts)
		r.rule("filter", chainNoBackend, node+" -j "+chainRefusedNode)
	}
	// Departing packets carry no mark: a tunnel copies the mark of the inner packet to the outer
	// packet.
	r.rule("nat", chainMasquerade, "-j MARK --xor-mark "+markMasquerade)
	r.rule("nat", chainMasquerade, "-j MASQUERADE")
	r.rule("nat", chainMark, "-j MARK --or-mark "+markMasquerade)
	r.rule("nat", chainPostrouting, "-m mark --mark "+iptMark+" -j "+chainMasquerade)
	pods := f.of(b.PodCIDRs)
	if len(pods) > 0 {
		for _, p := range pods {
			r.rule("nat", chainPostrouting, fmt.Sprintf("-s %s ! -d %s -j MASQUERADE", p, p))
		}
	}
	r.rule("filter", chainDeny, "-p tcp -j REJECT --reject-with tcp-reset")
	r.rule("filter", chainDeny, "-j REJECT")
	for _, c := range f.of(b.ServiceCIDRs) {
		r.rule("filter", chainRange, fmt.Sprintf("-d %s -m addrtype ! --dst-type LOCAL -j %s", c, chainDeny))
	}
	return r
}

// own returns the destination matches of the addresses at which node ports are served. Each match
// requires its own rule.
func (f family) nodeAddresses(b Base) []string {
	if len(b.NodePorts) == 0 {
		return []string{"! -d " + f.loopback + " -m addrtype --dst-type LOCAL"}
	}
	var out []string
	for _, p := range f.of(b.NodePorts) {
		out = append(out, "-d "+p.String()+" -m addrtype --dst-type LOCAL")
	}
	return out
}

func (f family) hairpinRule(ip netip.Addr) string {
	return fmt.Sprintf("-s %s -d %s -m conntrack --ctstate DNAT -j MASQUERADE", ip, ip)
}

// matching returns the rule's match for packets to a frontend.
func matching(at Frontend) string {
	match := fmt.Sprintf("-p %s -m %s --dport %d", at.Proto, at.Proto, at.Port)
	if !at.NodePort() {
		match = "-d " + netip.PrefixFrom(at.IP, at.IP.BitLen()).String() + " " + match
	}
	return match
}

// ipt renders a Port into chains, without the rules for external addresses (iptService). It returns
// the local pods, which may reach themselves through the Port. It is pure.
func (t *iptFamily) ipt(into iptRules, p *Port) (local []netip.Addr) {
	inside := t.choose(into, p, "SVC", p.Cluster)
	for _, at := range p.Internal {
		if inside == "" {
			into.rule("filter", chainRefusals, matching(at)+" -j "+iptRefusal(without(p.StayInside, p)))
		} else {
			into.rule("nat", chainServices, matching(at)+commented(p.Name)+" -j "+inside)
		}
	}
	if len(p.External) > 0 {
		t.outside(into, p, inside)
	}
	return distinctAddrs(p.local())
}

// outside renders the chains of external traffic and the rules for node ports.
func (t *iptFamily) outside(into iptRules, p *Port, all string) {
	if !slices.Equal(p.Outside, p.Cluster) {
		all = t.choose(into, p, "OUT", p.Outside)
	}
	ext, refusal := p.iptOutside()
	for _, at := range p.External {
		if !at.NodePort() {
			continue
		}
		if ext != "" {
			into.rule("nat", chainNodePorts, matching(at)+commented(p.Name)+" -j "+ext)
		}
		if refusal != "" {
			into.rule("filter", chainRefusedNode, matching(at)+" -j "+refusal)
		}
	}
	if ext == "" {
		return
	}
	if !p.KeepSource {
		into.rule("nat", ext, "-j "+chainMark)
		into.rule("nat", ext, "-j "+all)
		return
	}
	for _, pods := range t.of(t.base.PodCIDRs) {
		into.rule("nat", ext, "-s "+pods.String()+" -j "+all)
	}
	into.rule("nat", ext, "-m addrtype --src-type LOCAL -j "+chainMark)
	into.rule("nat", ext, "-m addrtype --src-type LOCAL -j "+all)
	if here := t.choose(into, p, "LOC", p.Here); here != "" {
		into.rule("nat", ext, "-j "+here)
	}
}

// choose adds the chain that selects one of the backends and returns its name. It returns "" if
// there are no backends.
func (t *iptFamily) choose(into iptRules, p *Port, kind string, to []Backend) string {
	if len(to) == 0 {
		return ""
	}
	name := "KEELSON-" + kind + "-" + p.ID
	if into["nat"][name] != nil {
		return name
	}
	into.chain("nat", name)
	own := func(b Backend) string { return "KEELSON-SEP-" + short(fmt.Sprint(p.ID, b.target())) }
	if p.Affinity > 0 {
		for _, b := range to {
			into.rule("nat", name, fmt.Sprintf("-m recent --name %s --rcheck --seconds %d --reap -j %s", own(b), p.Affinity, own(b)))
		}
	}
	for i, b := range to {
		chance := ""
		if left := len(to) - i; left > 1 {
			chance = " -m statistic --mode random --probability " + strconv.FormatFloat(1/float64(left), 'f', 10, 64)
		}
		if p.Affinity == 0 {
			into.rule("nat", name, fmt.Sprintf("-p %s%s -j DNAT --to-destination %s", p.Proto, chance, b.target()))
			continue
		}
		into.rule("nat", name, strings.TrimSpace(chance+" -j "+own(b)))
		if into["nat"][own(b)] == nil {
			into.rule("nat", own(b), fmt.Sprintf("-p %s -m recent --name %s --set -j DNAT --to-destination %s", p.Proto, own(b), b.target()))
		}
	}
	return name
}

// write writes one table's part of the input for iptables-restore. It replaces all current rules of
// Keelson.
func (r iptRules) write(b *strings.Builder, table string, there map[string][]string) {
	b.WriteString("*" + table + "\n")
	names := slices.Sorted(maps.Keys(r[table]))
	var gone []string
	for _, key := range slices.Sorted(maps.Keys(there)) {
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
	for _, j := range (family{}).jumps() {
		if j.table != table {
			continue
		}
		has := func(rule string) bool { return strings.HasSuffix(rule, "-j "+j.to) }
		if !slices.ContainsFunc(there[table+" "+j.from], has) {
			b.WriteString(strings.Join(strings.Fields("-I "+j.from+" "+j.match+" -j "+j.to), " ") + "\n")
		}
	}
	b.WriteString("COMMIT\n")
}
