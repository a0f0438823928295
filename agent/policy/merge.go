package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// The limits of merging.
const (
	fewRules    = 8       // rules for groups; with more rules, ports become part of the set
	fewPorts    = 16      // ports per address in a set; longer lists are matched by rules
	fewSpans    = 8       // address ranges in a rule; more ranges become a set
	mergedLimit = 1 << 18 // elements of all sets with several groups on a node; beyond it, each group has its own rule
)

// merged merges the rules of several policies in one direction and family. Peers with the same
// ports become one set. The number of rules thus grows with the number of port lists, not with the
// number of policies.
type merged struct {
	d       direction
	f       family
	anybody share
	groups  map[string]*share // by address group
	blocks  map[string]*blocks
	named   map[source]map[string]bool // named egress ports: each pod of a group may assign its own number to the name
	within  map[string]*namedWithin    // named egress ports of pods in ipBlocks
}

// namedWithin are the pods in some ipBlocks that have a named port.
type namedWithin struct {
	source source
	spans  []span
	keys   map[string]bool
}

// share is the set of ports that a peer may reach, and the keys of the policies that allow them.
type share struct {
	any   bool
	ports []portRange
	keys  map[string]bool
}

// blocks are address ranges with the same ports.
type blocks struct {
	share
	spans []span
}

func newMerged(d direction, f family) *merged {
	return &merged{d: d, f: f, groups: map[string]*share{}, blocks: map[string]*blocks{}, named: map[source]map[string]bool{},
		within: map[string]*namedWithin{}}
}

func (s *share) add(key string, r rule) {
	if s.keys == nil {
		s.keys = map[string]bool{}
	}
	s.any, s.keys[key] = s.any || r.anyPort, true
	s.ports = append(s.ports, r.ports...)
}

// add adds a rule of the policy with the given key.
func (m *merged) add(key string, r rule) {
	m.addNamed(key, r)
	if len(r.ports) == 0 && !r.anyPort {
		return
	}
	if r.anybody {
		m.anybody.add(key, r)
		return
	}
	spans, all := m.f.spans(r.blocks)
	if all {
		m.anybody.add(key, r)
		return
	}
	for _, g := range r.groups {
		if m.groups[g] == nil {
			m.groups[g] = &share{}
		}
		m.groups[g].add(key, r)
	}
	if len(spans) > 0 {
		same := r.signature()
		if m.blocks[same] == nil {
			m.blocks[same] = &blocks{}
		}
		m.blocks[same].add(key, r)
		m.blocks[same].spans = append(m.blocks[same].spans, spans...)
	}
}

// addNamed adds the named ports of an egress rule.
func (m *merged) addNamed(key string, r rule) {
	spans, all := m.f.spans(r.blocks)
	for _, n := range r.named {
		groups := r.groups
		caller := source{group: r.callers[n], six: m.f.six, named: n}
		switch {
		case caller.group == "":
		case r.anybody || all:
			groups = append(slices.Clone(groups), caller.group)
		case len(spans) > 0:
			same := fmt.Sprint(caller, spans)
			if m.within[same] == nil {
				m.within[same] = &namedWithin{source: caller, spans: spans, keys: map[string]bool{}}
			}
			m.within[same].keys[key] = true
		}
		for _, g := range groups {
			of := source{group: g, six: m.f.six, named: n}
			if m.named[of] == nil {
				m.named[of] = map[string]bool{}
			}
			m.named[of][key] = true
		}
	}
}

// spans returns the ranges of the family. all reports that one of them is the whole family.
func (f family) spans(blocks []span) (of []span, all bool) {
	for _, s := range blocks {
		switch {
		case !f.of(s.from):
		case s.whole():
			return nil, true
		default:
			of = append(of, s)
		}
	}
	return of, false
}

// signature returns the same string for rules with the same ports.
func (r rule) signature() string {
	if r.anyPort {
		return "any"
	}
	return fmt.Sprint(r.ports)
}

// rule returns a rule with the merged ports.
func (s *share) rule() rule {
	if s.any {
		return rule{anyPort: true}
	}
	return rule{ports: joinPorts(s.ports)}
}

// alike are address groups with the same ports.
type alike struct {
	rule   rule
	groups []string
	keys   map[string]bool
}

// namer records a set that is required for some ports, and returns its name.
type namer func(c content, ports string) string

// lines returns the rules. It calls use for each set that they refer to.
func (m *merged) lines(use namer) []line {
	var out []line
	if len(m.anybody.keys) > 0 {
		for _, port := range portMatches(m.anybody.rule()) {
			out = append(out, line{text: words(port, m.d.allow, remark(m.anybody.keys))})
		}
		if m.anybody.any {
			return out
		}
	}
	out = append(out, m.groupLines(use)...)
	for _, same := range slices.Sorted(maps.Keys(m.blocks)) {
		b := m.blocks[same]
		peer := m.blockMatch(join(b.spans), use)
		for _, port := range portMatches(b.rule()) {
			out = append(out, line{text: words(peer, port, m.d.allow, remark(b.keys))})
		}
	}
	for _, same := range slices.Sorted(maps.Keys(m.within)) {
		w := m.within[same]
		one := content{six: m.f.six, ports: true, sources: []source{w.source}}
		out = append(out, line{text: words(m.blockMatch(w.spans, use), m.exactMatch(use(one, "")), m.d.allow, remark(w.keys))})
	}
	return out
}

func (m *merged) blockMatch(spans []span, use namer) string {
	texts := make([]string, 0, len(spans))
	for _, s := range spans {
		texts = append(texts, s.String())
	}
	if len(texts) <= fewSpans {
		return fmt.Sprintf("%s %s { %s }", m.f.ip, m.d.peer, strings.Join(texts, ", "))
	}
	c := content{six: m.f.six, spans: texts}
	return fmt.Sprintf("%s %s @%s", m.f.ip, m.d.peer, use(c, ""))
}

// groupLines returns the rules about address groups.
func (m *merged) groupLines(use namer) []line {
	bySignature := map[string]*alike{}
	rules := 0
	for _, g := range slices.Sorted(maps.Keys(m.groups)) {
		s := m.groups[g]
		r := s.rule()
		same := bySignature[r.signature()]
		if same == nil {
			same = &alike{rule: r, keys: map[string]bool{}}
			bySignature[r.signature()] = same
			rules += len(portMatches(r))
		}
		same.groups = append(same.groups, g)
		maps.Copy(same.keys, s.keys)
	}
	var out []line
	exact := content{six: m.f.six, ports: true}
	var exactInstead []substitute
	exactKeys := map[string]bool{}
	for _, signature := range slices.Sorted(maps.Keys(bySignature)) {
		same := bySignature[signature]
		if list, few := same.rule.single(); few && rules > fewRules {
			for _, g := range same.groups {
				for _, p := range list {
					exact.sources = append(exact.sources, source{group: g, six: m.f.six, port: p})
				}
				exactInstead = append(exactInstead, m.oneGroup(g, same.rule, remark(m.groups[g].keys))...)
			}
			maps.Copy(exactKeys, same.keys)
			continue
		}
		out = append(out, m.alikeLines(same, use)...)
	}
	for of, keys := range m.named {
		one := content{six: m.f.six, ports: true, sources: []source{of}}
		exact.sources = append(exact.sources, of)
		exactInstead = append(exactInstead, substitute{words(m.exactMatch(one.name()), m.d.allow, remark(keys)), one.name(), one})
		maps.Copy(exactKeys, keys)
	}
	if len(exact.sources) == 0 {
		return out
	}
	exact.sort()
	slices.SortFunc(exactInstead, func(a, b substitute) int { return strings.Compare(a.text, b.text) })
	name := use(exact, "")
	return append(out, line{words(m.exactMatch(name), m.d.allow, remark(exactKeys)), name, exactInstead})
}

func (m *merged) exactMatch(set string) string {
	return fmt.Sprintf("%s %s . meta l4proto . th dport @%s", m.f.ip, m.d.peer, set)
}

// alikeLines returns the rules about address groups with the same ports.
func (m *merged) alikeLines(same *alike, use namer) []line {
	c := content{six: m.f.six}
	for _, g := range same.groups {
		c.sources = append(c.sources, source{group: g, six: m.f.six})
	}
	c.sort()
	name := use(c, same.rule.signature())
	var out []line
	for _, port := range portMatches(same.rule) {
		var instead []substitute
		for _, g := range same.groups {
			one := content{six: m.f.six, sources: []source{{group: g, six: m.f.six}}}
			instead = append(instead, substitute{m.text(one.name(), port, remark(m.groups[g].keys)), one.name(), one})
		}
		out = append(out, line{m.text(name, port, remark(same.keys)), name, instead})
	}
	return out
}

// oneGroup returns the rules about one address group.
func (m *merged) oneGroup(group string, r rule, remark string) (out []substitute) {
	one := content{six: m.f.six, sources: []source{{group: group, six: m.f.six}}}
	for _, port := range portMatches(r) {
		out = append(out, substitute{m.text(one.name(), port, remark), one.name(), one})
	}
	return out
}

func (m *merged) text(set, port, remark string) string {
	return words(fmt.Sprintf("%s %s @%s", m.f.ip, m.d.peer, set), port, m.d.allow, remark)
}

// single returns the individual ports of a rule. few is false if the rule has more than fewPorts
// ports, or none.
func (r rule) single() (out []onePort, few bool) {
	if r.anyPort {
		return nil, false
	}
	for _, p := range r.ports {
		if int(p.to)-int(p.from)+len(out) >= fewPorts {
			return nil, false
		}
		for n := int(p.from); n <= int(p.to); n++ {
			out = append(out, onePort{p.proto, uint16(n)})
		}
	}
	return out, len(out) > 0
}

// remark returns the comment of a rule: the policies that it implements.
func remark(of map[string]bool) string {
	const limit, most = 100, 4 // nft accepts at most 128 bytes
	keys := slices.Sorted(maps.Keys(of))
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

func words(in ...string) string {
	return strings.Join(slices.DeleteFunc(in, func(s string) bool { return s == "" }), " ")
}

// portMatches returns the port matches of a rule, one per protocol. A packet must satisfy one of
// them.
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
