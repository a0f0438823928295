package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// shape are the rules that follow from pods and policies, whatever is in the groups of addresses.
type shape struct {
	chains map[string][]line
	maps   map[string]map[string]string // pod address → verdict
	selves map[string]map[string]bool   // addresses of pods that are judged: whoever talks with itself is let through
	owners map[string]map[string]string // of those, per direction: whose they are, for what is counted of them
	sets   map[string]content           // that the lines name, and those of blocks
}

// line is a rule. Where the set that it names would be too large, others stand in for it, a rule for each of its groups.
type line struct {
	text    string
	set     string // "" where nothing stands in for the line
	instead []substitute
}

// substitute is a rule about one group.
type substitute struct {
	text string
	set  string
	of   content
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
	own    string // the address that the pod has
	peer   string // the address that a peer has
	call   string // how a pod's chain is called: what a pod may send is judged by the chain of the pod that gets it then
	allow  string // the verdict of what may pass
	rules  func(*policy) *[]rule
}

var directions = []direction{
	{"i", "daddr", "saddr", "goto", "accept", func(p *policy) *[]rule { return p.ingress }},
	{"e", "saddr", "daddr", "jump", "return", func(p *policy) *[]rule { return p.egress }},
}

// verdicts is the name of the map of a direction and family, selves that of the set of pods' own addresses, dropped that of
// the set that counts what was not let through for each of them.
func verdicts(d direction, f family) string { return "pods-" + d.letter + f.digit }
func selves(f family) string                { return "self-" + f.digit }
func dropped(d direction, f family) string  { return "dropped-" + d.letter + f.digit }

// exempt are the messages by which IPv6 hosts on one link find each other, and no policy speaks of them.
const exempt = "icmpv6 type { mld-listener-query, mld-listener-report, mld-listener-done, nd-router-solicit, nd-router-advert, " +
	"nd-neighbor-solicit, nd-neighbor-advert, mld2-listener-report } "

// compile derives the rules. Pure: same input, same output, in whatever order.
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

// compiler writes a shape, and each chain of it once: all pods of a node may have a thousand policies in common.
// A chain and its sets are named after the first of their pods: they keep their names when policies come and go, so that
// such a change writes what one policy says and not what all do.
type compiler struct {
	shape
	made  map[made]string
	named map[string]string // sets of several groups, by what they hold
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
			r.maps[verdicts(d, f)][a.String()] = d.call + " " + r.together(d, f, a, mine, pod.Ports)
			r.selves[selves(f)][a.String()+" . "+a.String()] = true
			r.owners[dropped(d, f)][a.String()] = string(pod.UID)
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

// together writes the chain of all pods with these policies, unless it is there, and returns its name. Of those pods, the
// one with the address first comes first.
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

// use notes a set of a chain for some ports, and returns its name.
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
