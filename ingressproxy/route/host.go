package route

import (
	"fmt"
	"net/netip"
	"strings"
)

// Wildcard defines whether a Host is its name or the names below it.
type Wildcard uint8

const (
	// NoWildcard includes only the name itself.
	NoWildcard Wildcard = iota
	// OneLabel includes only names with exactly one more label, as a wildcard in an Ingress does.
	OneLabel
	// AnyLabels includes names with one or more additional labels, as a wildcard in the Gateway API
	// does.
	AnyLabels
)

// Host is a lower-case host name without a port. With a Wildcard it includes not Name itself, but
// the names below it, with as many labels as the Wildcard allows. The zero value matches every
// host.
type Host struct {
	Name     string
	Wildcard Wildcard
}

// ParseHost parses a host such as "", "*", "a.example", or "*.example". wild is the Wildcard of the
// result if s starts with "*.". It returns an error if an asterisk is anywhere else.
func ParseHost(s string, wild Wildcard) (Host, error) {
	name := strings.ToLower(s)
	if name == "" || name == "*" {
		return Host{}, nil
	}
	name = strings.TrimSuffix(name, ".")
	below, isWild := strings.CutPrefix(name, "*.")
	if strings.Contains(below, "*") || below == "" || name == "*" || strings.ContainsAny(below, "/: ") {
		return Host{}, fmt.Errorf("host %q is not a DNS name, with or without \"*.\" in front", s)
	}
	if isWild {
		return Host{Name: below, Wildcard: wild}, nil
	}
	return Host{Name: name}, nil
}

func (h Host) String() string {
	if h.Name == "" {
		return "*"
	}
	if h.Wildcard != NoWildcard {
		return "*." + h.Name
	}
	return h.Name
}

// Matches reports whether host h includes name. name must be a result of NormalizeHost.
func (h Host) Matches(name string) bool {
	if h.Name == "" {
		return true
	}
	if h.Wildcard == NoWildcard {
		return name == h.Name
	}
	labels, ok := strings.CutSuffix(name, "."+h.Name)
	if !ok || labels == "" {
		return false
	}
	return h.Wildcard == AnyLabels || !strings.Contains(labels, ".")
}

// Intersect returns the host names that both h and other include. ok is false if no host name is in
// both.
func (h Host) Intersect(other Host) (both Host, ok bool) {
	switch {
	case other.Name == "":
		return h, true
	case h.Name == "":
		return other, true
	case h.Wildcard == NoWildcard:
		return h, other.Matches(h.Name)
	case other.Wildcard == NoWildcard:
		return other, h.Matches(other.Name)
	case h.Name == other.Name:
		return Host{Name: h.Name, Wildcard: min(h.Wildcard, other.Wildcard)}, true
	}
	wide, narrow := h, other
	if len(wide.Name) > len(narrow.Name) {
		wide, narrow = narrow, wide
	}
	return narrow, wide.Wildcard == AnyLabels && strings.HasSuffix(narrow.Name, "."+wide.Name)
}

// NormalizeHost returns the host of a Host header or :authority in the form that Host.Matches
// requires: lower case, without port and trailing dot.
func NormalizeHost(authority string) string {
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

// hostMap maps hosts, including wildcards, to values. A lookup by name visits only the matching
// hosts, most specific first.
type hostMap[T any] struct {
	exact        map[string]T
	oneLabel     map[string]T
	anyLabels    map[string]T
	everyHost    T
	hasEveryHost bool
}

func newHostMap[T any]() *hostMap[T] {
	return &hostMap[T]{exact: map[string]T{}, oneLabel: map[string]T{}, anyLabels: map[string]T{}}
}

// updateHost replaces the value of host h by the result of change. change receives the current
// value, or the zero value if h has none.
func (b *hostMap[T]) updateHost(h Host, change func(T) T) {
	if h.Name == "" {
		b.everyHost, b.hasEveryHost = change(b.everyHost), true
		return
	}
	m := b.exact
	switch h.Wildcard {
	case OneLabel:
		m = b.oneLabel
	case AnyLabels:
		m = b.anyLabels
	}
	m[h.Name] = change(m[h.Name])
}

// eachMatch calls yield with the value of each host that matches name, most specific first, until
// yield returns false.
func (b *hostMap[T]) eachMatch(name string, yield func(T) bool) {
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
		if v, ok := b.oneLabel[rest]; ok && first && !yield(v) {
			return
		}
		if v, ok := b.anyLabels[rest]; ok && !yield(v) {
			return
		}
	}
	if b.hasEveryHost {
		yield(b.everyHost)
	}
}
