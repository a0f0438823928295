package policy

import (
	"fmt"
	"net/netip"
	"slices"
)

// addressRange is a range of addresses of one family, both ends included.
type addressRange struct{ from, to netip.Addr }

func (s addressRange) String() string {
	if s.from == s.to {
		return s.from.String()
	}
	return s.from.String() + "-" + s.to.String()
}

// isWholeFamily reports whether the range contains all addresses of its family.
func (s addressRange) isWholeFamily() bool {
	return s.from.IsUnspecified() && !s.to.Next().IsValid()
}

func parseRange(cidr string) (addressRange, error) {
	p, err := netip.ParsePrefix(cidr)
	if err != nil {
		return addressRange{}, err
	}
	p = p.Masked()
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	to, _ := netip.AddrFromSlice(last)
	return addressRange{p.Addr(), to}, nil
}

// parseIPBlock returns the address ranges of a NetworkPolicy's ipBlock: its CIDR without the
// exceptions. If a part cannot be parsed, it returns no ranges and an error.
func parseIPBlock(cidr string, except []string) ([]addressRange, error) {
	all, err := parseRange(cidr)
	if err != nil {
		return nil, err
	}
	var without []addressRange
	for _, e := range except {
		s, err := parseRange(e)
		if err != nil {
			return nil, fmt.Errorf("except: %w", err)
		}
		if s.from.BitLen() == all.from.BitLen() {
			without = append(without, s)
		}
	}
	var out []addressRange
	at := all.from // all addresses of the range below at have been processed
	for _, w := range mergeRanges(without) {
		if w.to.Less(at) || all.to.Less(w.from) {
			continue
		}
		if at.Less(w.from) {
			out = append(out, addressRange{at, w.from.Prev()})
		}
		if !w.to.Less(all.to) {
			return out, nil
		}
		at = w.to.Next()
	}
	return append(out, addressRange{at, all.to}), nil
}

// mergeRanges sorts ranges and merges those that overlap or adjoin. IPv4 precedes IPv6.
func mergeRanges(in []addressRange) []addressRange {
	slices.SortFunc(in, func(a, b addressRange) int { return a.from.Compare(b.from) })
	var out []addressRange
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
