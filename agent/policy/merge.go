package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Limits for merging rules and sets.
const (
	maxGroupRules   = 8  // rules for address groups; beyond it, ports become part of the set elements
	maxSetPorts     = 16 // ports per address in a set; longer lists are matched by rules
	maxInlineRanges = 8  // address ranges in a rule; beyond it, the ranges become a set
	// elements of all sets with several groups on a node; beyond it, each group has its own rule
	mergedLimit = 1 << 18
)

// mergedRules merges the rules of several policies in one direction and family. Peers with the same
// ports become one set. The number of nftables rules thus grows with the number of port lists, not
// with the number of policies.
type mergedRules struct {
	d       direction
	f       family
	anyPeer peerRule
	groups  map[string]*peerRule // by address group
	blocks  map[string]*blockRule
	// named egress ports: each pod of a group may assign its own number to the name
	named       map[setSource]map[string]bool
	namedBlocks map[string]*namedBlock // named egress ports of pods in ipBlocks
}

// namedBlock is the set of pods that have a given named port, and an address in the ranges spans of
// ipBlocks.
type namedBlock struct {
	source setSource
	spans  []addressRange
	keys   map[string]bool
}

// peerRule contains the ports on which traffic with a peer is allowed, and the keys of the policies
// that allow it.
type peerRule struct {
	any   bool
	ports []portRange
	keys  map[string]bool
}

// blockRule contains the address ranges of ipBlocks that have the same allowed ports, and these
// ports.
type blockRule struct {
	peerRule
	spans []addressRange
}

func newMerged(d direction, f family) *mergedRules {
	return &mergedRules{d: d, f: f, groups: map[string]*peerRule{}, blocks: map[string]*blockRule{},
		named:       map[setSource]map[string]bool{},
		namedBlocks: map[string]*namedBlock{}}
}

func (s *peerRule) addRule(key string, r rule) {
	if s.keys == nil {
		s.keys = map[string]bool{}
	}
	s.any, s.keys[key] = s.any || r.anyPort, true
	s.ports = append(s.ports, r.ports...)
}

// addRule merges the rule r, which belongs to the policy with the given key, into m.
func (m *mergedRules) addRule(key string, r rule) {
	m.addNamed(key, r)
	if len(r.ports) == 0 && !r.anyPort {
		return
	}
	if r.anyPeer {
		m.anyPeer.addRule(key, r)
		return
	}
	spans, all := m.f.familyRanges(r.blocks)
	if all {
		m.anyPeer.addRule(key, r)
		return
	}
	for _, g := range r.groups {
		if m.groups[g] == nil {
			m.groups[g] = &peerRule{}
		}
		m.groups[g].addRule(key, r)
	}
	if len(spans) > 0 {
		same := r.portSignature()
		if m.blocks[same] == nil {
			m.blocks[same] = &blockRule{}
		}
		m.blocks[same].addRule(key, r)
		m.blocks[same].spans = append(m.blocks[same].spans, spans...)
	}
}

// addNamed merges the named ports of r, an egress rule of the policy with the given key, into m.
func (m *mergedRules) addNamed(key string, r rule) {
	spans, all := m.f.familyRanges(r.blocks)
	for _, n := range r.named {
		groups := r.groups
		caller := setSource{group: r.portGroups[n], six: m.f.six, named: n}
		switch {
		case caller.group == "":
		case r.anyPeer || all:
			groups = append(slices.Clone(groups), caller.group)
		case len(spans) > 0:
			same := fmt.Sprint(caller, spans)
			if m.namedBlocks[same] == nil {
				m.namedBlocks[same] = &namedBlock{source: caller, spans: spans, keys: map[string]bool{}}
			}
			m.namedBlocks[same].keys[key] = true
		}
		for _, g := range groups {
			of := setSource{group: g, six: m.f.six, named: n}
			if m.named[of] == nil {
				m.named[of] = map[string]bool{}
			}
			m.named[of][key] = true
		}
	}
}

// familyRanges returns the ranges in blocks that belong to the address family f. wholeFamily
// reports whether one of them contains the whole family; ranges is then nil.
func (f family) familyRanges(blocks []addressRange) (ranges []addressRange, wholeFamily bool) {
	for _, s := range blocks {
		switch {
		case !f.containsAddr(s.from):
		case s.isWholeFamily():
			return nil, true
		default:
			ranges = append(ranges, s)
		}
	}
	return ranges, false
}

// portSignature returns a string that identifies the allowed ports of r. It is equal for rules with
// the same allowed ports.
func (r rule) portSignature() string {
	if r.anyPort {
		return "any"
	}
	return fmt.Sprint(r.ports)
}

// mergedRule returns a rule without peers that allows all ports of s.
func (s *peerRule) mergedRule() rule {
	if s.any {
		return rule{anyPort: true}
	}
	return rule{ports: joinPorts(s.ports)}
}

// peerGroups are the address groups that have the same allowed ports.
type peerGroups struct {
	rule   rule
	groups []string
	keys   map[string]bool
}

// setNamer adds a set with content c to the ruleset and returns the set's name. ports is the
// portSignature of the rules that use the set; it may become part of the name (see
// compiler.addSet).
type setNamer func(c setContent, ports string) string

// ruleLines returns the nftables rules that allow all merged traffic. It calls add for each set to
// which the rules refer.
func (m *mergedRules) ruleLines(add setNamer) []ruleLine {
	var out []ruleLine
	if len(m.anyPeer.keys) > 0 {
		for _, port := range portMatches(m.anyPeer.mergedRule()) {
			out = append(out, ruleLine{text: joinWords(port, m.d.allow, ruleComment(m.anyPeer.keys))})
		}
		if m.anyPeer.any {
			return out
		}
	}
	out = append(out, m.groupLines(add)...)
	for _, same := range slices.Sorted(maps.Keys(m.blocks)) {
		b := m.blocks[same]
		peer := m.blockMatch(mergeRanges(b.spans), add)
		for _, port := range portMatches(b.mergedRule()) {
			out = append(out, ruleLine{text: joinWords(peer, port, m.d.allow, ruleComment(b.keys))})
		}
	}
	for _, same := range slices.Sorted(maps.Keys(m.namedBlocks)) {
		w := m.namedBlocks[same]
		one := setContent{six: m.f.six, ports: true, sources: []setSource{w.source}}
		out = append(out, ruleLine{text: joinWords(m.blockMatch(w.spans, add), m.exactMatch(add(one, "")), m.d.allow,
			ruleComment(w.keys))})
	}
	return out
}

func (m *mergedRules) blockMatch(spans []addressRange, use setNamer) string {
	texts := make([]string, 0, len(spans))
	for _, s := range spans {
		texts = append(texts, s.String())
	}
	if len(texts) <= maxInlineRanges {
		return fmt.Sprintf("%s %s { %s }", m.f.ip, m.d.peer, strings.Join(texts, ", "))
	}
	c := setContent{six: m.f.six, spans: texts}
	return fmt.Sprintf("%s %s @%s", m.f.ip, m.d.peer, use(c, ""))
}

// groupLines returns the nftables rules that allow traffic with address groups. It calls addSet for
// each set to which the rules refer.
func (m *mergedRules) groupLines(addSet setNamer) []ruleLine {
	bySignature := map[string]*peerGroups{}
	rules := 0
	for _, g := range slices.Sorted(maps.Keys(m.groups)) {
		s := m.groups[g]
		r := s.mergedRule()
		same := bySignature[r.portSignature()]
		if same == nil {
			same = &peerGroups{rule: r, keys: map[string]bool{}}
			bySignature[r.portSignature()] = same
			rules += len(portMatches(r))
		}
		same.groups = append(same.groups, g)
		maps.Copy(same.keys, s.keys)
	}
	var out []ruleLine
	exact := setContent{six: m.f.six, ports: true}
	var exactInstead []substitute
	exactKeys := map[string]bool{}
	for _, signature := range slices.Sorted(maps.Keys(bySignature)) {
		same := bySignature[signature]
		if list, few := same.rule.singlePorts(); few && rules > maxGroupRules {
			for _, g := range same.groups {
				for _, p := range list {
					exact.sources = append(exact.sources, setSource{group: g, six: m.f.six, port: p})
				}
				exactInstead = append(exactInstead, m.oneGroup(g, same.rule, ruleComment(m.groups[g].keys))...)
			}
			maps.Copy(exactKeys, same.keys)
			continue
		}
		out = append(out, m.peerGroupLines(same, addSet)...)
	}
	for of, keys := range m.named {
		one := setContent{six: m.f.six, ports: true, sources: []setSource{of}}
		exact.sources = append(exact.sources, of)
		exactInstead = append(exactInstead, substitute{joinWords(m.exactMatch(one.setName()), m.d.allow,
			ruleComment(keys)), one.setName(), one})
		maps.Copy(exactKeys, keys)
	}
	if len(exact.sources) == 0 {
		return out
	}
	exact.sortSources()
	slices.SortFunc(exactInstead, func(a, b substitute) int { return strings.Compare(a.text, b.text) })
	name := addSet(exact, "")
	return append(out, ruleLine{joinWords(m.exactMatch(name), m.d.allow, ruleComment(exactKeys)), name, exactInstead})
}

func (m *mergedRules) exactMatch(set string) string {
	return fmt.Sprintf("%s %s . meta l4proto . th dport @%s", m.f.ip, m.d.peer, set)
}

// peerGroupLines returns the nftables rules for address groups with the same ports, one rule per
// protocol. All these rules refer to one set with the groups' addresses, which is added with
// addSet.
func (m *mergedRules) peerGroupLines(same *peerGroups, addSet setNamer) []ruleLine {
	c := setContent{six: m.f.six}
	for _, g := range same.groups {
		c.sources = append(c.sources, setSource{group: g, six: m.f.six})
	}
	c.sortSources()
	name := addSet(c, same.rule.portSignature())
	var out []ruleLine
	for _, port := range portMatches(same.rule) {
		var instead []substitute
		for _, g := range same.groups {
			one := setContent{six: m.f.six, sources: []setSource{{group: g, six: m.f.six}}}
			instead = append(instead, substitute{m.groupRule(one.setName(), port, ruleComment(m.groups[g].keys)),
				one.setName(), one})
		}
		out = append(out, ruleLine{m.groupRule(name, port, ruleComment(same.keys)), name, instead})
	}
	return out
}

// oneGroup returns the nftables rules that allow the ports of r for one address group. They replace
// a rule with a set that is too large. remark is the rules' comment.
func (m *mergedRules) oneGroup(group string, r rule, remark string) (out []substitute) {
	one := setContent{six: m.f.six, sources: []setSource{{group: group, six: m.f.six}}}
	for _, port := range portMatches(r) {
		out = append(out, substitute{m.groupRule(one.setName(), port, remark), one.setName(), one})
	}
	return out
}

func (m *mergedRules) groupRule(set, port, remark string) string {
	return joinWords(fmt.Sprintf("%s %s @%s", m.f.ip, m.d.peer, set), port, m.d.allow, remark)
}

// singlePorts returns the individual port numbers that a rule allows. few is false if the rule
// allows all ports, or more than maxSetPorts.
func (r rule) singlePorts() (out []onePort, few bool) {
	if r.anyPort {
		return nil, false
	}
	for _, p := range r.ports {
		if int(p.to)-int(p.from)+len(out) >= maxSetPorts {
			return nil, false
		}
		for n := int(p.from); n <= int(p.to); n++ {
			out = append(out, onePort{p.proto, uint16(n)})
		}
	}
	return out, len(out) > 0
}

// ruleComment returns the comment of an nftables rule, which names the policies that the rule
// implements. The comment is shortened to the length that nft accepts.
func ruleComment(policies map[string]bool) string {
	const limit, most = 100, 4 // nft accepts at most 128 bytes
	keys := slices.Sorted(maps.Keys(policies))
	text := strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' || c == '"' || c == '\\' {
			return '?'
		}
		return c
	}, strings.Join(keys[:min(len(keys), most)], ", "))
	text = text[:min(len(text), limit)]
	if n := len(keys) - most; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("comment %q", text)
}

func joinWords(in ...string) string {
	return strings.Join(slices.DeleteFunc(in, func(s string) bool { return s == "" }), " ")
}

// portMatches returns nft expressions that match the ports of a rule, one per protocol. A packet to
// an allowed port matches one of them. An empty expression matches all packets.
func portMatches(rule rule) []string {
	if rule.anyPort {
		return []string{""}
	}
	var out []string
	for i := 0; i < len(rule.ports); {
		proto, parts, anyPort := rule.ports[i].proto, []string(nil), false
		for ; i < len(rule.ports) && rule.ports[i].proto == proto; i++ {
			p := rule.ports[i]
			anyPort = anyPort || p.from == 0 && p.to == 1<<16-1
			if p.from == p.to {
				parts = append(parts, fmt.Sprint(p.from))
			} else {
				parts = append(parts, fmt.Sprintf("%d-%d", p.from, p.to))
			}
		}
		if anyPort {
			out = append(out, "meta l4proto "+proto)
		} else {
			out = append(out, fmt.Sprintf("%s dport { %s }", proto, strings.Join(parts, ", ")))
		}
	}
	return out
}
