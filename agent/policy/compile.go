package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// shape are the rules that depend on pods and policies but not on the contents of the address
// groups.
type shape struct {
	chains map[string][]line
	maps   map[string]map[string]string // map → pod address → verdict
	selves map[string]map[string]bool   // addresses of isolated pods; a pod's traffic to itself is accepted
	owners map[string]map[string]string // dropped name → address of an isolated pod → pod UID
	sets   map[string]content           // sets that the lines refer to, including those of ipBlocks
}

// line is a rule. If the set that it refers to is too large, substitutes replace it: one rule per
// group.
type line struct {
	text    string
	set     string // "" if the line has no substitutes
	instead []substitute
}

// substitute is the rule for one group.
type substitute struct {
	text string
	set  string
	of   content
}

// family holds the names of an address family.
type family struct {
	six   bool
	digit string
	ip    string
}

var families = []family{{false, "4", "ip"}, {true, "6", "ip6"}}

func (f family) of(a netip.Addr) bool { return a.Is6() == f.six }

// direction is one of the two directions in which a pod may be isolated.
type direction struct {
	letter string
	own    string // match on the pod's address
	peer   string // match on the peer's address
	call   string // statement that calls a pod's chain; "jump" returns, so that the destination pod's chain is evaluated after egress is allowed
	allow  string // verdict for allowed packets
	rules  func(*policy) *[]rule
}

var directions = []direction{
	{"i", "daddr", "saddr", "goto", "accept", func(p *policy) *[]rule { return p.ingress }},
	{"e", "saddr", "daddr", "jump", "return", func(p *policy) *[]rule { return p.egress }},
}

// verdicts returns the name of the verdict map of a direction and family. selves returns the name
// of the set of pods' own addresses. dropped returns the name of the set that counts dropped
// packets per address.
func verdicts(d direction, f family) string { return "pods-" + d.letter + f.digit }
func selves(f family) string                { return "self-" + f.digit }
func dropped(d direction, f family) string  { return "dropped-" + d.letter + f.digit }

// exempt matches the ICMPv6 messages by which hosts on a link discover each other. Policies do not
// apply to them.
const exempt = "icmpv6 type { mld-listener-query, mld-listener-report, mld-listener-done, nd-router-solicit, nd-router-advert, " +
	"nd-neighbor-solicit, nd-neighbor-advert, mld2-listener-report } "

// compile computes the rules. It is pure, and its result does not depend on the order of its
// inputs.
func compile(pods []Pod, policies []*policy) shape {
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, func(a, b Pod) int { return slices.CompareFunc(a.Addresses, b.Addresses, netip.Addr.Compare) })
	r := compiler{made: map[made]string{}, named: map[string]string{}, shape: shape{chains: map[string][]line{}, maps: map[string]map[string]string{},
		selves: map[string]map[string]bool{}, owners: map[string]map[string]string{}, sets: map[string]content{}}}
	for _, f := range families {
		r.selves[selves(f)] = map[string]bool{}
		for _, d := range directions {
			r.maps[verdicts(d, f)] = map[string]string{}
			r.owners[dropped(d, f)] = map[string]string{}
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
	return r.shape
}

// compiler builds a shape. Pods with the same policies share a chain, because the pods of a node
// may have a thousand policies in common. A chain and its sets are named after the lowest address
// of these pods. The names stay the same when policies change, so that a change rewrites the rules
// of one policy rather than all.
type compiler struct {
	shape
	made  map[made]string
	named map[string]string // names of sets with several groups, by content
}

// made identifies a chain: the keys of its policies, and the pod's named ports if the policies use
// them.
type made struct{ way, family, policies, ports string }

// pod adds the map entries that direct a pod's traffic to the chain of its policies.
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
			r.maps[verdicts(d, f)][a.String()] = d.call + " " + r.together(d, f, a, mine, pod.Ports)
			r.selves[selves(f)][a.String()+" . "+a.String()] = true
			r.owners[dropped(d, f)][a.String()] = string(pod.UID)
		}
	}
}

func (p *policy) selects(namespace string, set map[string]string) bool {
	return p.namespace == namespace && p.selector.Matches(labelSet(set))
}

// labelSet implements labels.Labels like labels.Set, but without converting a nil map.
type labelSet map[string]string

func (l labelSet) Has(name string) bool                   { _, ok := l[name]; return ok }
func (l labelSet) Get(name string) string                 { return l[name] }
func (l labelSet) Lookup(name string) (v string, ok bool) { v, ok = l[name]; return v, ok }

// together returns the name of the chain of all pods with these policies, and writes the chain if
// it does not exist yet. first is the lowest address of these pods.
func (r *compiler) together(d direction, f family, first netip.Addr, policies []*policy, ports []NamedPort) string {
	keys := make([]string, 0, len(policies))
	named := false
	for _, p := range policies {
		keys = append(keys, p.key)
		named = named || p.named
	}
	of := made{d.letter, f.digit, strings.Join(keys, " "), ""}
	if named && d.letter == "i" {
		of.ports = fmt.Sprintf("%#v", ports)
	}
	if name, ok := r.made[of]; ok {
		return name
	}
	m := newMerged(d, f)
	for _, p := range policies {
		for _, rule := range *d.rules(p) {
			if d.letter == "i" {
				rule = rule.resolved(ports)
			}
			m.add(p.key, rule)
		}
	}
	name := verdicts(d, f) + "-" + id(first.String())
	r.made[of] = name
	lines := []line{{text: fmt.Sprintf("%s saddr . %s daddr @%s %s", f.ip, f.ip, selves(f), d.allow)}}
	if f.six {
		lines = append(lines, line{text: exempt + d.allow})
	}
	lines = append(lines, m.lines(func(c content, ports string) string { return r.use(c, name, ports) })...)
	r.chains[name] = append(lines, line{text: fmt.Sprintf("%s %s @%s drop", f.ip, d.own, dropped(d, f))}, line{text: "drop"})
	return name
}

// use records a set that a chain requires for some ports, and returns the set's name.
func (r *compiler) use(c content, chain, ports string) string {
	same := c.name()
	if len(c.sources) < 2 {
		r.sets[same] = c
		return same
	}
	name, ok := r.named[same]
	if !ok {
		name = c.prefix() + id(chain, ports)
		r.named[same], r.sets[name] = name, c
	}
	return name
}
