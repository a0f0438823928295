package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// The bounds of what is merged.
const (
	fewRules    = 8       // so many rules of groups stay as they are; where there would be more, ports go into the set
	fewPorts    = 16      // that a set holds for each address; longer lists are matched by a rule
	fewSpans    = 8       // that stand in the rule; more are a set of their own
	mergedLimit = 1 << 18 // elements of all sets of several groups on a node: beyond, each group is asked by a rule of its own
)

// merged collects what the rules of several policies let through in one direction and family, so that a packet meets a rule
// for each list of ports, and not for each policy: peers with the same ports become one set.
type merged struct {
	d       direction
	f       family
	anybody share
	groups  map[string]*share // by group
	blocks  map[string]*blocks
	named   map[source]map[string]bool // ports by name, of egress: each pod of a group calls its ports as it likes
	within  map[string]*namedWithin    // ports by name of pods in blocks of addresses, by both
}

// namedWithin are the pods in blocks of addresses that name a port.
type namedWithin struct {
	source source
	spans  []span
	keys   map[string]bool
}

// share is what somebody may reach, and the policies that say so.
type share struct {
	any   bool
	ports []portRange
	keys  map[string]bool
}

// blocks are addresses that may reach the same.
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

// add takes a rule of a policy in.
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

// addNamed takes in what a rule of egress allows by the names of ports.
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

// spans are the blocks of the family; all says that one of them is the whole family.
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

// signature is the same for rules with the same ports.
func (r rule) signature() string {
	if r.anyPort {
		return "any"
	}
	return fmt.Sprint(r.ports)
}

// rule is what a share comes to.
func (s *share) rule() rule {
	if s.any {
		return rule{anyPort: true}
	}
	return rule{ports: joinPorts(s.ports)}
}

// alike are groups that may reach the same.
type alike struct {
	rule   rule
	groups []string
	keys   map[string]bool
}

// namer notes a set that is needed for some ports, and returns its name.
type namer func(c content, ports string) string

// lines are the rules. The sets that they name are noted.
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

// groupLines are the rules about groups.
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

// alikeLines are the rules about groups that may reach the same.
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

// oneGroup are the rules about one group.
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

// single are the ports of a rule one by one, where they are few.
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

// remark is what an operator reads beside a rule: whose it is.
func remark(of map[string]bool) string {
	const limit, most = 100, 4 // nft takes 128 bytes
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
