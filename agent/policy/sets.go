package policy

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// ruleset is the complete content of the nftables table, except the base chains: rules, verdict
// maps, and sets with their elements.
type ruleset struct {
	ruleShape
	chains       map[string][]string // rules in order
	sets         map[string]*filledSet
	unmergedSets int // number of sets that exceeded the limit and were replaced by one rule per group
}

// filledSet is an nftables set with its elements. It is immutable.
type filledSet struct {
	setContent
	elements       map[string]bool   // parts of an element are joined by " . "
	sourceElements []map[string]bool // elements of each source
}

// setContent describes the contents of a set: either the elements of address groups (sources) or
// address ranges (spans).
type setContent struct {
	six     bool
	ports   bool        // elements contain a protocol and a port in addition to the address
	sources []setSource // in order, without duplicates
	spans   []string
}

// setSource is the part of a set that comes from one address group. Its elements are the group's
// addresses alone, the addresses with their number of a named port, or the addresses with a fixed
// port.
type setSource struct {
	group string
	six   bool
	named NamedPort // a named port, without a number
	port  onePort
}

type onePort struct {
	proto  string
	number uint16
}

func (c *setContent) sortSources() {
	slices.SortFunc(c.sources, func(a, b setSource) int {
		return cmp.Or(cmp.Compare(a.group, b.group), cmp.Compare(a.named.Proto, b.named.Proto),
			cmp.Compare(a.named.Name, b.named.Name),
			cmp.Compare(a.port.proto, b.port.proto), cmp.Compare(a.port.number, b.port.number))
	})
}

// setName returns a name for the set that depends only on its content.
func (c setContent) setName() string {
	if len(c.spans) > 0 {
		return c.namePrefix() + hashID(c.spans...)
	}
	var words []string
	for _, s := range c.sources {
		words = append(words, s.group)
		if c.ports {
			words = append(words, s.named.Proto, s.named.Name, s.port.proto, fmt.Sprint(s.port.number))
		}
	}
	return c.namePrefix() + hashID(words...)
}

// namePrefix returns the first part of the set's name. Sets with different element types have
// different prefixes.
func (c setContent) namePrefix() string {
	f := families[0]
	if c.six {
		f = families[1]
	}
	switch {
	case len(c.spans) > 0:
		return "blocks-" + f.digit + "-"
	case c.ports:
		return "ports-" + f.digit + "-"
	}
	return "group-" + f.digit + "-"
}

// nftType returns the element type of the set in nft syntax.
func (c setContent) nftType() string {
	kind := "ipv4_addr"
	if c.six {
		kind = "ipv6_addr"
	}
	if c.ports {
		kind += " . inet_proto . inet_service"
	}
	return kind
}

// elements returns the elements that the source contributes to a set. group is the current state of
// the source's address group. The result is empty if group is nil.
func (s setSource) elements(group *v1.Endpoints) map[string]bool {
	out := map[string]bool{}
	if group == nil {
		return out
	}
	for i := range group.Subsets {
		part := &group.Subsets[i]
		var suffixes []string
		switch {
		case s.port != onePort{}:
			suffixes = []string{fmt.Sprintf(" . %s . %d", s.port.proto, s.port.number)}
		case s.named == NamedPort{}:
			suffixes = []string{""}
		default:
			for _, p := range part.Ports {
				if p.Name == s.named.Name && protocolName(p.Protocol) == s.named.Proto && p.Port > 0 && p.Port < 1<<16 {
					suffixes = append(suffixes, fmt.Sprintf(" . %s . %d", s.named.Proto, p.Port))
				}
			}
		}
		if len(suffixes) == 0 {
			continue
		}
		for _, list := range [][]v1.EndpointAddress{part.Addresses, part.NotReadyAddresses} {
			for _, a := range list {
				ip, err := netip.ParseAddr(a.IP)
				if ip = ip.Unmap(); err != nil || ip.Is6() != s.six || ip.Zone() != "" {
					continue
				}
				for _, suffix := range suffixes {
					out[ip.String()+suffix] = true
				}
			}
		}
	}
	return out
}

// setFiller computes the elements of sets from the current address groups. It reuses the computed
// elements of groups that have not changed.
type setFiller struct {
	previous       map[string]*filledSet
	changed        func(group string) bool
	group          func(name string) (*v1.Endpoints, bool)
	sourceElements map[setSource]map[string]bool
	limit          int // maximum number of elements of all sets with several sources
}

// withSets returns the ruleset that consists of the rules of r and the elements of all sets.
// previous contains the sets of the previous ruleset. If the groups of a set have not changed, the
// set is reused from previous. group returns an address group by name.
func (r ruleShape) withSets(
	previous map[string]*filledSet, changed func(group string) bool, group func(name string) (*v1.Endpoints, bool),
) ruleset {
	return r.fillSets(&setFiller{previous, changed, group, map[setSource]map[string]bool{}, mergedLimit})
}

func (r ruleShape) fillSets(f *setFiller) ruleset {
	for _, s := range f.previous {
		for i, of := range s.sources {
			if !f.changed(of.group) {
				f.sourceElements[of] = s.sourceElements[i]
			}
		}
	}
	out := ruleset{ruleShape: r, chains: make(map[string][]string, len(r.chains)),
		sets: make(map[string]*filledSet, len(r.sets))}
	large := f.tooLarge(r.sets)
	for name, c := range r.sets {
		if !large[name] {
			out.sets[name] = f.fillSet(name, c)
		}
	}
	out.unmergedSets = len(large)
	for name, lines := range r.chains {
		texts := make([]string, 0, len(lines))
		for _, l := range lines {
			if !large[l.set] {
				texts = append(texts, l.text)
				continue
			}
			for _, s := range l.substitutes {
				texts = append(texts, s.text)
				if out.sets[s.set] == nil {
					out.sets[s.set] = f.fillSet(s.set, s.content)
				}
			}
		}
		out.chains[name] = texts
	}
	return out
}

func (f *setFiller) elementsOf(of setSource) map[string]bool {
	p, ok := f.sourceElements[of]
	if !ok {
		g, _ := f.group(of.group)
		p = of.elements(g)
		f.sourceElements[of] = p
	}
	return p
}

// tooLarge returns the names of the sets that must be replaced by one set per address group. It
// returns such sets if all sets with several sources together would exceed the limit. The smallest
// sets are admitted first.
func (f *setFiller) tooLarge(sets map[string]setContent) map[string]bool {
	type sized struct {
		name string
		size int
	}
	var all []sized
	sum := 0
	for name, c := range sets {
		if len(c.sources) < 2 {
			continue
		}
		s := sized{name: name}
		for _, of := range c.sources {
			s.size += f.maxSize(of)
		}
		sum += s.size
		all = append(all, s)
	}
	large := map[string]bool{}
	if sum <= f.limit {
		return large
	}
	slices.SortFunc(all, func(a, b sized) int {
		return cmp.Or(cmp.Compare(a.size, b.size), cmp.Compare(a.name, b.name))
	})
	sum = 0
	for _, s := range all {
		if sum += s.size; sum > f.limit {
			large[s.name] = true
		}
	}
	return large
}

// maxSize returns an upper bound for the number of elements of a source. It does not compute
// elements with a fixed port, because there may be too many.
func (f *setFiller) maxSize(source setSource) int {
	if p, ok := f.sourceElements[source]; ok {
		return len(p)
	}
	source.port = onePort{}
	return len(f.elementsOf(source))
}

// fillSet returns a set with this name and the elements of content c. If its address groups have
// not changed, it returns the set of the previous ruleset.
func (f *setFiller) fillSet(name string, c setContent) *filledSet {
	old := f.previous[name]
	if old != nil && slices.Equal(old.sources, c.sources) && !slices.ContainsFunc(c.sources, func(of setSource) bool {
		return f.changed(of.group)
	}) {
		return old
	}
	out := &filledSet{setContent: c}
	if len(c.spans) > 0 {
		out.elements = make(map[string]bool, len(c.spans))
		for _, s := range c.spans {
			out.elements[s] = true
		}
		return out
	}
	for _, of := range c.sources {
		out.sourceElements = append(out.sourceElements, f.elementsOf(of))
	}
	switch {
	case len(out.sourceElements) == 1:
		out.elements = out.sourceElements[0]
	case old != nil:
		out.updateElements(old, f.changed)
	default:
		out.elements = map[string]bool{}
		for _, p := range out.sourceElements {
			maps.Copy(out.elements, p)
		}
	}
	return out
}

// updateElements sets the elements of s. It starts from the elements of the previous set old, and
// updates them for sources that were added, removed or changed.
func (s *filledSet) updateElements(old *filledSet, changed func(group string) bool) {
	s.elements = maps.Clone(old.elements)
	had, stays := make(map[setSource]bool, len(old.sources)), make(map[setSource]bool, len(s.sources))
	for _, of := range old.sources {
		had[of] = true
	}
	for _, of := range s.sources {
		stays[of] = had[of] && !changed(of.group)
	}
	for i, part := range old.sourceElements {
		if stays[old.sources[i]] {
			continue
		}
		for e := range part {
			if !slices.ContainsFunc(s.sourceElements, func(p map[string]bool) bool { return p[e] }) {
				delete(s.elements, e)
			}
		}
	}
	for i, part := range s.sourceElements {
		if !stays[s.sources[i]] {
			maps.Copy(s.elements, part)
		}
	}
}
