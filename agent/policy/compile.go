package policy

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// ruleset is what the kernel should hold beyond the base.
type ruleset struct {
	chains map[string][]string          // rules in order
	maps   map[string]map[string]string // pod address → verdict
	selves map[string]map[string]bool   // addresses of pods that are judged: whoever talks with itself is let through
	sets   map[string]*set
}

// set are the addresses of a group in one family, or what they call one of their ports. It is not changed once made.
type set struct {
	content
	elements map[string]bool // concatenations with " . "
}

// content says what a set holds.
type content struct {
	group string
	six   bool
	named NamedPort // without a number; zero: the addresses
}

// family are the words of an address family.
type family struct {
	six   bool
	digit string
	ip    string
}

var families = []family{{false, "4", "ip"}, {true, "6", "ip6"}}

func (f family) of(a netip.Addr) bool { return a.Is6() == f.six }

// direction is one of the two ways in which a pod is judged.
type direction struct {
	letter string
	peer   string // the address that a peer has
	rules  func(*policy) *[]rule
}

var directions = []direction{
	{"i", "saddr", func(p *policy) *[]rule { return p.ingress }},
	{"e", "daddr", func(p *policy) *[]rule { return p.egress }},
}

// verdicts is the name of the map of a direction and family, selves that of the set of pods' own addresses.
func verdicts(d direction, f family) string { return "pods-" + d.letter + f.digit }
func selves(f family) string                { return "self-" + f.digit }

// exempt are the messages by which IPv6 hosts on one link find each other, and no policy speaks of them.
const exempt = "icmpv6 type { mld-listener-query, mld-listener-report, mld-listener-done, nd-router-solicit, nd-router-advert, " +
	"nd-neighbor-solicit, nd-neighbor-advert, mld2-listener-report } accept"

// compile derives the rules. Pure: same input, same output, in whatever order. The sets are named and still empty.
func compile(pods []Pod, policies []*policy) ruleset {
	r := compiler{made: map[made]string{},
		ruleset: ruleset{chains: map[string][]string{}, maps: map[string]map[string]string{}, selves: map[string]map[string]bool{}, sets: map[string]*set{}}}
	for _, f := range families {
		r.selves[selves(f)] = map[string]bool{}
		for _, d := range directions {
			r.maps[verdicts(d, f)] = map[string]string{}
		}
	}
	byNamespace := map[string][]*policy{}
	for _, p := range policies {
		byNamespace[p.namespace] = append(byNamespace[p.namespace], p)
	}
	for _, list := range byNamespace {
		slices.SortFunc(list, func(a, b *policy) int { return cmp.Compare(a.key, b.key) })
	}
	for _, pod := range pods {
		r.pod(pod, byNamespace[pod.Namespace])
	}
	return r.ruleset
}

// compiler writes a ruleset, and each chain of it once: all pods of a node may have a thousand policies in common.
type compiler struct {
	ruleset
	made map[made]string
}

// made is what a chain follows from: policies by their keys, and what the pod calls its ports.
type made struct{ way, family, policies, ports string }

// pod sends what a pod sends and gets to the chains of its policies.
func (r *compiler) pod(pod Pod, policies []*policy) {
	for _, d := range directions {
		var mine []*policy
		for _, p := range policies {
			if d.rules(p) != nil && p.selects(pod.Namespace, pod.Labels) {
				mine = append(mine, p)
			}
		}
		if len(mine) == 0 {
			continue
		}
		for _, a := range pod.Addresses {
			f := families[0]
			if a.Is6() {
				f = families[1]
			}
			r.maps[verdicts(d, f)][a.String()] = "goto " + r.together(d, f, mine, pod.Ports)
			r.selves[selves(f)][a.String()+" . "+a.String()] = true
		}
	}
}

func (p *policy) selects(namespace string, set map[string]string) bool {
	return p.namespace == namespace && p.selector.Matches(labelSet(set))
}

// labelSet is labels.Set without its conversions of a nil map.
type labelSet map[string]string

func (l labelSet) Has(name string) bool                   { _, ok := l[name]; return ok }
func (l labelSet) Get(name string) string                 { return l[name] }
func (l labelSet) Lookup(name string) (v string, ok bool) { v, ok = l[name]; return v, ok }

// together writes the chain of all pods with these policies, unless it is there, and returns its name.
func (r *compiler) together(d direction, f family, policies []*policy, ports []NamedPort) string {
	keys := make([]string, 0, 2*len(policies))
	for _, p := range policies {
		keys = append(keys, p.key)
	}
	of := made{d.letter, f.digit, strings.Join(keys, " "), fmt.Sprintf("%#v", ports)}
	if name, ok := r.made[of]; ok {
		return name
	}
	var parts []string
	for _, p := range policies {
		parts = append(parts, r.part(d, f, p, ports))
	}
	name := "pods-" + d.letter + f.digit + "-" + id(append(keys, parts...)...)
	r.made[of] = name
	if r.chains[name] != nil {
		return name
	}
	rules := []string{fmt.Sprintf("%s saddr . %s daddr @%s accept", f.ip, f.ip, selves(f))}
	if f.six {
		rules = append(rules, exempt)
	}
	for i, part := range parts {
		if part != "" {
			rules = append(rules, fmt.Sprintf("%s comment %q", part, remark(keys[i])))
		}
	}
	r.chains[name] = append(rules, "drop")
	return name
}

// remark is what an operator reads beside a rule.
func remark(key string) string {
	const limit = 120 // nft takes 128 bytes
	key = strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' || c == '"' || c == '\\' {
			return '?'
		}
		return c
	}, key)
	return key[:min(len(key), limit)]
}

// part is the rule by which the chain of pods asks one policy: what it lets through where that is one rule, which is the
// cheapest, a jump to a chain of its own otherwise, which pods that call their ports alike share; "" when it lets nothing through.
func (r *compiler) part(d direction, f family, p *policy, ports []NamedPort) string {
	var called []string // what the names of ports mean here
	var lines []string
	for i, rule := range *d.rules(p) {
		if d.letter == "i" {
			names := len(rule.named)
			if rule = rule.resolved(ports); names > 0 {
				called = append(called, fmt.Sprint(i, rule.ports))
			}
		}
		lines = append(lines, r.lines(d, f, rule)...)
	}
	switch len(lines) {
	case 0:
		return ""
	case 1:
		return lines[0]
	}
	name := "policy-" + d.letter + f.digit + "-" + id(append([]string{p.key}, called...)...)
	r.chains[name] = lines
	return "jump " + name
}

// lines are the nft rules of a rule, in one family.
func (r *ruleset) lines(d direction, f family, rule rule) []string {
	peers := r.peers(d, f, rule)
	ports := portMatches(rule)
	var out []string
	for _, peer := range peers {
		for _, port := range ports {
			out = append(out, words(peer, port, "accept"))
		}
	}
	for _, n := range rule.named { // of egress: each pod of a group calls its ports as it likes
		for _, g := range rule.groups {
			name := r.use(content{g, f.six, n})
			out = append(out, fmt.Sprintf("%s %s . meta l4proto . th dport @%s accept", f.ip, d.peer, name))
		}
	}
	return out
}

func words(in ...string) string {
	return strings.Join(slices.DeleteFunc(in, func(s string) bool { return s == "" }), " ")
}

// peers are the matches of which one has to hold; "" holds always.
func (r *ruleset) peers(d direction, f family, rule rule) []string {
	if rule.anybody {
		return []string{""}
	}
	var out, spans []string
	for _, s := range rule.blocks {
		if !f.of(s.from) {
			continue
		}
		if s.whole() {
			return []string{""}
		}
		spans = append(spans, s.String())
	}
	if len(rule.ports) > 0 || rule.anyPort {
		for _, g := range rule.groups {
			out = append(out, fmt.Sprintf("%s %s @%s", f.ip, d.peer, r.use(content{group: g, six: f.six})))
		}
	}
	if len(spans) > 0 {
		out = append(out, fmt.Sprintf("%s %s { %s }", f.ip, d.peer, strings.Join(spans, ", ")))
	}
	return out
}

// portMatches are the matches of which one has to hold, one per protocol.
func portMatches(rule rule) []string {
	if rule.anyPort {
		return []string{""}
	}
	var out []string
	for i := 0; i < len(rule.ports); {
		proto, parts, any := rule.ports[i].proto, []string(nil), false
		for ; i < len(rule.ports) && rule.ports[i].proto == proto; i++ {
			p := rule.ports[i]
			any = any || p.from == 0 && p.to == 1<<16-1
			if p.from == p.to {
				parts = append(parts, fmt.Sprint(p.from))
			} else {
				parts = append(parts, fmt.Sprintf("%d-%d", p.from, p.to))
			}
		}
		if any {
			out = append(out, "meta l4proto "+proto)
		} else {
			out = append(out, fmt.Sprintf("%s dport { %s }", proto, strings.Join(parts, ", ")))
		}
	}
	return out
}

// use names the set of a content, which is filled later.
func (r *ruleset) use(c content) string {
	f := families[0]
	if c.six {
		f = families[1]
	}
	name := "group-" + f.digit + "-" + id(c.group)
	if c.named != (NamedPort{}) {
		name = "ports-" + f.digit + "-" + id(c.group, c.named.Proto, c.named.Name)
	}
	r.sets[name] = &set{content: c}
	return name
}

// kind is the nft type of the set.
func (c content) kind() string {
	kind := "ipv4_addr"
	if c.six {
		kind = "ipv6_addr"
	}
	if c.named != (NamedPort{}) {
		kind += " . inet_proto . inet_service"
	}
	return kind
}

// fill returns the set with what a group holds now; nil is a group that is not there, of which nobody is.
func (c content) fill(group *v1.Endpoints) *set {
	out := &set{content: c, elements: map[string]bool{}}
	if group == nil {
		return out
	}
	for i := range group.Subsets {
		part := &group.Subsets[i]
		var suffixes []string
		if c.named == (NamedPort{}) {
			suffixes = []string{""}
		}
		for _, p := range part.Ports {
			if c.named != (NamedPort{}) && p.Name == c.named.Name && protocol(p.Protocol) == c.named.Proto && p.Port > 0 && p.Port < 1<<16 {
				suffixes = append(suffixes, fmt.Sprintf(" . %s . %d", c.named.Proto, p.Port))
			}
		}
		if len(suffixes) == 0 {
			continue
		}
		for _, list := range [][]v1.EndpointAddress{part.Addresses, part.NotReadyAddresses} {
			for _, a := range list {
				ip, err := netip.ParseAddr(a.IP)
				if ip = ip.Unmap(); err != nil || ip.Is6() != c.six || ip.Zone() != "" {
					continue
				}
				for _, s := range suffixes {
					out.elements[ip.String()+s] = true
				}
			}
		}
	}
	return out
}

// withSets returns the ruleset with all sets filled; those of before whose group has not changed are taken over.
func (r ruleset) withSets(before map[string]*set, changed func(group string) bool, group func(name string) (*v1.Endpoints, bool)) ruleset {
	filled := make(map[string]*set, len(r.sets))
	for _, name := range slices.Sorted(maps.Keys(r.sets)) {
		s := r.sets[name]
		if old := before[name]; old != nil && !changed(s.group) {
			filled[name] = old
			continue
		}
		g, _ := group(s.group)
		filled[name] = s.fill(g)
	}
	r.sets = filled
	return r
}
