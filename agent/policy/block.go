package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// span is a range of addresses of one family, both ends included.
type span struct{ from, to netip.Addr }

func (s span) String() string {
	if s.from == s.to {
		return s.from.String()
	}
	return s.from.String() + "-" + s.to.String()
}

// whole reports whether the range contains all addresses of its family.
func (s span) whole() bool {
	return s.from.IsUnspecified() && !s.to.Next().IsValid()
}

func spanOf(cidr string) (span, error) {
	p, err := netip.ParsePrefix(cidr)
	if err != nil {
		return span{}, err
	}
	p = p.Masked()
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	to, _ := netip.AddrFromSlice(last)
	return span{p.Addr(), to}, nil
}

// block returns the addresses of an ipBlock: its CIDR without the exceptions. If a part cannot be
// parsed, it returns no addresses and an error.
func block(cidr string, except []string) ([]span, error) {
	all, err := spanOf(cidr)
	if err != nil {
		return nil, err
	}
	var without []span
	for _, e := range except {
		s, err := spanOf(e)
		if err != nil {
			return nil, fmt.Errorf("except: %w", err)
		}
		if s.from.BitLen() == all.from.BitLen() {
			without = append(without, s)
		}
	}
	var out []span
	at := all.from // all addresses of the range below at have been processed
	for _, w := range join(without) {
		if w.to.Less(at) || all.to.Less(w.from) {
			continue
		}
		if at.Less(w.from) {
			out = append(out, span{at, w.from.Prev()})
		}
		if !w.to.Less(all.to) {
			return out, nil
		}
		at = w.to.Next()
	}
	return append(out, span{at, all.to}), nil
}

// join sorts ranges and merges those that overlap or adjoin. IPv4 precedes IPv6.
func join(in []span) []span {
	slices.SortFunc(in, func(a, b span) int { return a.from.Compare(b.from) })
	var out []span
	for _, s := range in {
		if n := len(out) - 1; n >= 0 && out[n].from.BitLen() == s.from.BitLen() &&
			(!out[n].to.Less(s.from) || out[n].to.Next() == s.from) {
			if out[n].to.Less(s.to) {
				out[n].to = s.to
			}
			continue
		}
		out = append(out, s)
	}
	return out
}
