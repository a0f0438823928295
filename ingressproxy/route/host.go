package route

import (
	"fmt"
	"net/netip"
	"strings"
)

// Wild says which labels may stand in front of a host's name.
type Wild uint8

const (
	// None: the name itself.
	None Wild = iota
	// OneLabel: exactly one, as Ingress has it.
	OneLabel
	// AnyLabels: one or more, as Gateway API has it.
	AnyLabels
)

// Host is a name in small letters without a port, or all names below it. The zero value is every host.
type Host struct {
	Name string
	Wild Wild
}

// ParseHost reads "", "*", "a.example" or "*.example"; wild says what the asterisk stands for. An asterisk elsewhere is refused.
func ParseHost(s string, wild Wild) (Host, error) {
	name := strings.ToLower(s)
	if name == "" || name == "*" {
		return Host{}, nil
	}
	name = strings.TrimSuffix(name, ".")
	below, isWild := strings.CutPrefix(name, "*.")
	if strings.Contains(below, "*") || below == "" || name == "*" || strings.ContainsAny(below, "/: ") {
		return Host{}, fmt.Errorf("host %q is no DNS name, with or without \"*.\" in front", s)
	}
	if isWild {
		return Host{Name: below, Wild: wild}, nil
	}
	return Host{Name: name}, nil
}

func (h Host) String() string {
	if h.Name == "" {
		return "*"
	}
	if h.Wild != None {
		return "*." + h.Name
	}
	return h.Name
}

// Matches says whether name, as HostOf gives it, is one of this host's.
func (h Host) Matches(name string) bool {
	if h.Name == "" {
		return true
	}
	if h.Wild == None {
		return name == h.Name
	}
	labels, ok := strings.CutSuffix(name, "."+h.Name)
	if !ok || labels == "" {
		return false
	}
	return h.Wild == AnyLabels || !strings.Contains(labels, ".")
}

// Intersect is the hosts that are both h's and other's: a route's host under a listener's. ok is false when there are none.
func (h Host) Intersect(other Host) (both Host, ok bool) {
	switch {
	case other.Name == "":
		return h, true
	case h.Name == "":
		return other, true
	case h.Wild == None:
		return h, other.Matches(h.Name)
	case other.Wild == None:
		return other, h.Matches(other.Name)
	case h.Name == other.Name:
		return Host{Name: h.Name, Wild: min(h.Wild, other.Wild)}, true
	}
	wide, narrow := h, other
	if len(wide.Name) > len(narrow.Name) {
		wide, narrow = narrow, wide
	}
	return narrow, wide.Wild == AnyLabels && strings.HasSuffix(narrow.Name, "."+wide.Name)
}

// HostOf is a request's host, of its Host header or :authority, as rules know it: in small letters, without port or last dot.
func HostOf(authority string) string {
	if !strings.Contains(authority, ":") {
		return strings.TrimSuffix(strings.ToLower(authority), ".")
	}
	if strings.HasPrefix(authority, "[") {
		end := strings.IndexByte(authority, ']')
		if end < 0 {
			return strings.ToLower(authority)
		}
		return strings.ToLower(authority[1:end])
	}
	if _, err := netip.ParseAddr(authority); err == nil {
		return strings.ToLower(authority)
	}
	name := authority[:strings.LastIndexByte(authority, ':')]
	return strings.TrimSuffix(strings.ToLower(name), ".")
}

// byHost finds what was put under hosts that match a name, the most specific first, without looking at the others.
type byHost[T any] struct {
	exact map[string]T
	one   map[string]T
	many  map[string]T
	all   T
	any   bool
}

func newByHost[T any]() *byHost[T] {
	return &byHost[T]{exact: map[string]T{}, one: map[string]T{}, many: map[string]T{}}
}

// update replaces what stands under a host by what change makes of it (the zero value at first).
func (b *byHost[T]) update(h Host, change func(T) T) {
	if h.Name == "" {
		b.all, b.any = change(b.all), true
		return
	}
	m := b.exact
	switch h.Wild {
	case OneLabel:
		m = b.one
	case AnyLabels:
		m = b.many
	}
	m[h.Name] = change(m[h.Name])
}

// each calls yield with what stands under hosts that match name, until it says false.
func (b *byHost[T]) each(name string, yield func(T) bool) {
	if v, ok := b.exact[name]; ok && !yield(v) {
		return
	}
	rest := name
	for first := true; ; first = false {
		label, after, ok := strings.Cut(rest, ".")
		if !ok {
			break
		}
		if rest = after; label == "" && first {
			continue
		}
		if v, ok := b.one[rest]; ok && first && !yield(v) {
			return
		}
		if v, ok := b.many[rest]; ok && !yield(v) {
			return
		}
	}
	if b.any {
		yield(b.all)
	}
}
