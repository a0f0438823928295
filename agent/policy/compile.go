package policy

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// ruleShape contains the part of the nftables rules that depends on pods and policies only. Address
// groups determine the elements of sets, which withSets adds.
type ruleShape struct {
	chains map[string][]ruleLine
	maps   map[string]map[string]string // map → pod address → verdict
	selves map[string]map[string]bool   // addresses of isolated pods; a pod may send to itself
	owners map[string]map[string]string // droppedSet name → address of an isolated pod → pod UID
	sets   map[string]setContent        // sets that the rules refer to, including sets for ipBlocks
}

// ruleLine is an nftables rule. If the rule's set is too large, the rules in substitutes replace
// the rule: one rule per address group.
type ruleLine struct {
	text        string
	set         string // "" if the line has no substitutes
	substitutes []substitute
}

// substitute is an nftables rule for a single address group, with a set for this group only.
// Several substitutes replace a rule if its set of several groups is too large.
type substitute struct {
	text    string
	set     string
	content setContent
}

// family contains the names by which rules and set names refer to IPv4 or IPv6.
type family struct {
	six   bool
	digit string
	ip    string
}

var families = []family{{false, "4", "ip"}, {true, "6", "ip6"}}

func (f family) containsAddr(a netip.Addr) bool { return a.Is6() == f.six }

// direction is one of the two directions in which a NetworkPolicy may isolate a pod: ingress or
// egress.
type direction struct {
	letter string
	own    string // nft expression for the address field of the pod
	peer   string // nft expression for the peer's address field
	// statement that calls a pod's chain; "jump" returns, so that the destination pod's chain is
	// evaluated after egress is allowed
	call  string
	allow string // verdict for packets that a policy allows
	rules func(*policy) *[]rule
}

var directions = []direction{
	{"i", "daddr", "saddr", "goto", "accept", func(p *policy) *[]rule { return p.ingress }},
	{"e", "saddr", "daddr", "jump", "return", func(p *policy) *[]rule { return p.egress }},
}

// verdictMap returns the name of the verdict map of a direction and family. selfSet returns the
// name of the set of pods' own addresses. droppedSet returns the name of the set that counts
// dropped packets per address.
func verdictMap(d direction, f family) string { return "pods-" + d.letter + f.digit }
func selfSet(f family) string                 { return "self-" + f.digit }
func droppedSet(d direction, f family) string { return "dropped-" + d.letter + f.digit }

// neighborDiscoveryMatch is the nft match for the ICMPv6 messages by which hosts on a link discover
// each other. Policies do not apply to these messages.
const neighborDiscoveryMatch = "icmpv6 type { mld-listener-query, mld-listener-report, mld-listener-done, " +
	"nd-router-solicit, nd-router-advert, nd-neighbor-solicit, nd-neighbor-advert, mld2-listener-report } "

// compileRules computes the nftables rules that enforce the policies for the pods of this node. It
// is pure, and its result does not depend on the order of its inputs.
func compileRules(pods []Pod, policies []*policy) ruleShape {
	pods = slices.Clone(pods)
	slices.SortStableFunc(pods, func(a, b Pod) int {
		return slices.CompareFunc(a.Addresses, b.Addresses, netip.Addr.Compare)
	})
	r := compiler{chainNames: map[chainKey]string{}, setNames: map[string]string{},
		ruleShape: ruleShape{chains: map[string][]ruleLine{}, maps: map[string]map[string]string{},
			selves: map[string]map[string]bool{}, owners: map[string]map[string]string{},
			sets: map[string]setContent{}}}
	for _, f := range families {
		r.selves[selfSet(f)] = map[string]bool{}
		for _, d := range directions {
			r.maps[verdictMap(d, f)] = map[string]string{}
			r.owners[droppedSet(d, f)] = map[string]string{}
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
		r.addPod(pod, byNamespace[pod.Namespace])
	}
	return r.ruleShape
}

// compiler builds a ruleShape. Pods with the same policies share a chain, because the pods of a
// node may have a thousand policies in common. A chain and its sets are named after the lowest
// address of these pods, so that the names stay the same when policies change. A change thus
// rewrites the rules of one policy rather than all rules.
type compiler struct {
	ruleShape
	chainNames map[chainKey]string
	setNames   map[string]string // names of sets with several groups, by content
}

// chainKey identifies the policy chain of a pod in one direction and family: the keys of its
// policies, and the pod's named ports if these policies use them.
type chainKey struct{ way, family, policies, ports string }

// addPod adds the pod's addresses to the verdict maps, which send its traffic to the chain for the
// policies that select it. In a direction in which no policy isolates the pod, it adds nothing.
func (r *compiler) addPod(pod Pod, policies []*policy) {
	for _, d := range directions {
		var mine []*policy
		for _, p := range policies {
			if d.rules(p) != nil && p.selectsPod(pod.Namespace, pod.Labels) {
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
			r.maps[verdictMap(d, f)][a.String()] = d.call + " " + r.podChain(d, f, a, mine, pod.Ports)
			r.selves[selfSet(f)][a.String()+" . "+a.String()] = true
			r.owners[droppedSet(d, f)][a.String()] = string(pod.UID)
		}
	}
}

func (p *policy) selectsPod(namespace string, set map[string]string) bool {
	return p.namespace == namespace && p.selector.Matches(labelSet(set))
}

// labelSet implements labels.Labels for a map, like labels.Set, but without converting a nil map.
type labelSet map[string]string

func (l labelSet) Has(name string) bool                   { _, ok := l[name]; return ok }
func (l labelSet) Get(name string) string                 { return l[name] }
func (l labelSet) Lookup(name string) (v string, ok bool) { v, ok = l[name]; return v, ok }

// podChain returns the name of the chain for pods that are selected by exactly these policies. Such
// pods share a chain, unless the policies use named ports to which the pods assign different
// numbers. If the chain does not exist yet, podChain adds it. lowest is the lowest address of these
// pods.
func (r *compiler) podChain(d direction, f family, lowest netip.Addr, policies []*policy, ports []NamedPort) string {
	keys := make([]string, 0, len(policies))
	named := false
	for _, p := range policies {
		keys = append(keys, p.key)
		named = named || p.named
	}
	of := chainKey{d.letter, f.digit, strings.Join(keys, " "), ""}
	if named && d.letter == "i" {
		of.ports = fmt.Sprintf("%#v", ports)
	}
	if name, ok := r.chainNames[of]; ok {
		return name
	}
	m := newMerged(d, f)
	for _, p := range policies {
		for _, rule := range *d.rules(p) {
			if d.letter == "i" {
				rule = rule.resolvePorts(ports)
			}
			m.addRule(p.key, rule)
		}
	}
	name := verdictMap(d, f) + "-" + hashID(lowest.String())
	r.chainNames[of] = name
	lines := []ruleLine{{text: fmt.Sprintf("%s saddr . %s daddr @%s %s", f.ip, f.ip, selfSet(f), d.allow)}}
	if f.six {
		lines = append(lines, ruleLine{text: neighborDiscoveryMatch + d.allow})
	}
	lines = append(lines, m.ruleLines(func(c setContent, ports string) string { return r.addSet(c, name, ports) })...)
	r.chains[name] = append(lines, ruleLine{text: fmt.Sprintf("%s %s @%s drop", f.ip, d.own, droppedSet(d, f))},
		ruleLine{text: "drop"})
	return name
}

// addSet adds the nftables set with the content c to the ruleset and returns the set's name. The
// name of a set with at most one source depends on its content only. A set with several sources is
// named after chain and ports, the first chain and port list that require it. Its name thus stays
// the same when its content changes.
func (r *compiler) addSet(c setContent, chain, ports string) string {
	same := c.setName()
	if len(c.sources) < 2 {
		r.sets[same] = c
		return same
	}
	name, ok := r.setNames[same]
	if !ok {
		name = c.namePrefix() + hashID(chain, ports)
		r.setNames[same], r.sets[name] = name, c
	}
	return name
}
