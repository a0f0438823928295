package servicemodel

import (
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// SourceRanges are the clients that may use the load balancer addresses of a Service in one address
// family. It is immutable. All ports of a Service share one SourceRanges, because a Service may
// have thousands of ports and ranges.
type SourceRanges struct {
	Prefixes []netip.Prefix // sorted, without overlaps; empty: no client is allowed
	DropRule string         // nftables rule that drops the packets of all other clients
	ID       string         // short hash of DropRule: equal ranges have the same ID
}

// newSourceRanges returns the SourceRanges of the prefixes of one address family. It returns nil,
// which allows all clients, if prefixes is nil.
func newSourceRanges(prefixes []netip.Prefix, v6 bool) *SourceRanges {
	if prefixes == nil {
		return nil
	}
	rule := "drop"
	if len(prefixes) > 0 {
		all := make([]string, len(prefixes))
		for i, p := range prefixes {
			all[i] = p.String()
		}
		family := "ip"
		if v6 {
			family = "ip6"
		}
		rule = family + " saddr != { " + strings.Join(all, ", ") + " } drop"
	}
	return &SourceRanges{Prefixes: prefixes, DropRule: rule, ID: ShortHash(rule)}
}

// equalSources reports whether r and o allow the same clients. Either may be nil.
func (r *SourceRanges) equalSources(o *SourceRanges) bool {
	return r == o || r != nil && o != nil && r.ID == o.ID
}

// sourcePrefixes returns the Service's loadBalancerSourceRanges of one address family, sorted. nil
// means that all clients are allowed. If all ranges belong to the other family, it returns an empty
// list: no client is allowed.
func sourcePrefixes(svc *v1.Service, v6 bool) []netip.Prefix {
	if len(svc.Spec.LoadBalancerSourceRanges) == 0 {
		return nil
	}
	out := []netip.Prefix{}
	for _, s := range svc.Spec.LoadBalancerSourceRanges {
		r, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil || r.Addr().Is6() != v6 {
			continue
		}
		if r.Bits() == 0 {
			return nil // all clients
		}
		out = append(out, r.Masked())
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return distinctPrefixes(out)
}

// distinctPrefixes returns sorted without the prefixes that another prefix in the list contains,
// because ranges in an nftables set must not overlap. It reuses the memory of sorted.
func distinctPrefixes(sorted []netip.Prefix) []netip.Prefix {
	out := sorted[:0]
	for _, p := range sorted {
		if n := len(out); n > 0 && out[n-1].Contains(p.Addr()) && out[n-1].Bits() <= p.Bits() {
			continue
		}
		out = append(out, p)
	}
	return out
}
