// Package balancer decides which addresses Services of type LoadBalancer may have and which of them
// a Service gets. All its functions are pure functions of API objects, so that admission, the
// controller and the command line come to the same result.
//
// All pools are in one ConfigMap, so that overlapping pools cannot be created concurrently. Each
// key is a pool's name, and each value a YAML document with the fields of the type document.
package balancer

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"
)

// Name and namespace of the ConfigMap with the pools.
const (
	Namespace = "kube-system"
	ConfigMap = "load-balancer-pools"
)

// Limits of the pools' configuration.
const (
	maxPools  = 64
	maxRanges = 64       // address ranges per pool
	maxText   = 16 << 10 // bytes of the YAML document of a pool
)

// document is the YAML document that defines a pool.
type document struct {
	// Addresses are CIDRs ("192.0.2.0/28", including its first and last address), ranges
	// ("192.0.2.10-192.0.2.20") and single addresses.
	Addresses []string `json:"addresses"`
	// AutoAssign, true by default, allows the pool for Services that request neither this pool nor
	// an address of it.
	AutoAssign *bool `json:"autoAssign,omitempty"`
	// NamespaceSelector and ServiceSelector select the Services that may have an address of the
	// pool; nil selects all.
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	ServiceSelector   *metav1.LabelSelector `json:"serviceSelector,omitempty"`
}

// Pool is a named set of addresses.
type Pool struct {
	Name       string
	Ranges     []Range
	AutoAssign bool

	namespaces, services labels.Selector
}

// Range is a range of addresses. It includes both From and To.
type Range struct{ From, To netip.Addr }

// String returns the range in the format of the pool configuration.
func (r Range) String() string {
	if r.From == r.To {
		return r.From.String()
	}
	return r.From.String() + "-" + r.To.String()
}

// Contains reports whether the range contains an address.
func (r Range) Contains(address netip.Addr) bool {
	return r.From.BitLen() == address.BitLen() && r.From.Compare(address) <= 0 && address.Compare(r.To) <= 0
}

func (r Range) overlaps(o Range) bool { return r.Contains(o.From) || o.Contains(r.From) }

// PrefixRange returns the range of all addresses of a prefix.
func PrefixRange(prefix netip.Prefix) Range {
	prefix = prefix.Masked()
	raw := prefix.Addr().AsSlice()
	for i := prefix.Bits(); i < len(raw)*8; i++ {
		raw[i/8] |= 1 << (7 - i%8)
	}
	last, _ := netip.AddrFromSlice(raw)
	return Range{prefix.Addr(), last}
}

// Contains reports whether the pool contains an address.
func (p *Pool) Contains(address netip.Addr) bool {
	return slices.ContainsFunc(p.Ranges, func(r Range) bool { return r.Contains(address) })
}

// hasFamily reports whether the pool has IPv6 addresses, if ipv6 is true, or else IPv4 addresses.
func (p *Pool) hasFamily(ipv6 bool) bool {
	return slices.ContainsFunc(p.Ranges, func(r Range) bool { return r.From.Is6() == ipv6 })
}

// ParsePools parses the data of the ConfigMap and returns the pools sorted by name. An error
// contains the name of the pool, the fault and the remedy.
func ParsePools(data map[string]string) ([]*Pool, error) {
	if len(data) > maxPools {
		return nil, fmt.Errorf("%d pools exceed the maximum of %d: merge some", len(data), maxPools)
	}
	var out []*Pool
	for _, name := range slices.Sorted(maps.Keys(data)) {
		p, err := parsePool(name, data[name])
		if err != nil {
			return nil, fmt.Errorf("pool %s: %w", name, err)
		}
		for _, o := range out {
			for _, r := range p.Ranges {
				if i := slices.IndexFunc(o.Ranges, r.overlaps); i >= 0 {
					return nil, fmt.Errorf("pool %s: %s overlaps %s of pool %s: an address must be in only one pool",
						name, r, o.Ranges[i], o.Name)
				}
			}
		}
		out = append(out, p)
	}
	return out, nil
}

func parsePool(name, text string) (*Pool, error) {
	if errs := validation.IsDNS1123Label(name); len(errs) > 0 {
		return nil, fmt.Errorf("its name: %s", strings.Join(errs, "; "))
	}
	if len(text) > maxText {
		return nil, fmt.Errorf("it has %d bytes, at most %d are allowed", len(text), maxText)
	}
	var d document
	if err := yaml.UnmarshalStrict([]byte(text), &d); err != nil {
		return nil,
			fmt.Errorf("it is not valid YAML with addresses, autoAssign, namespaceSelector and serviceSelector: %s",
				joinLines(err))
	}
	p := &Pool{Name: name, AutoAssign: d.AutoAssign == nil || *d.AutoAssign}
	switch {
	case len(d.Addresses) == 0:
		return nil, errors.New("addresses is empty: specify CIDRs, ranges or addresses, such as 192.0.2.10-192.0.2.20")
	case len(d.Addresses) > maxRanges:
		return nil, fmt.Errorf("addresses has %d entries, at most %d are allowed: merge some",
			len(d.Addresses), maxRanges)
	}
	for _, s := range d.Addresses {
		r, err := parseRange(s)
		if err != nil {
			return nil, err
		}
		if i := slices.IndexFunc(p.Ranges, r.overlaps); i >= 0 {
			return nil, fmt.Errorf("%s overlaps %s: specify each address once", r, p.Ranges[i])
		}
		p.Ranges = append(p.Ranges, r)
	}
	var err error
	if p.namespaces, err = parseSelector("namespaceSelector", d.NamespaceSelector); err != nil {
		return nil, err
	}
	p.services, err = parseSelector("serviceSelector", d.ServiceSelector)
	return p, err
}

// parseSelector converts a label selector. A nil selector selects everything. fieldName is used in
// errors.
func parseSelector(fieldName string, selector *metav1.LabelSelector) (labels.Selector, error) {
	if selector == nil {
		return labels.Everything(), nil
	}
	out, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return nil, fmt.Errorf("%s: %s", fieldName, joinLines(err))
	}
	return out, nil
}

func parseRange(s string) (Range, error) {
	r, err := splitRange(s)
	if err != nil {
		return Range{}, fmt.Errorf("address %q: specify a CIDR, a range such as 192.0.2.10-192.0.2.20 or an address", s)
	}
	if r.From.Is4() != r.To.Is4() || r.To.Less(r.From) {
		return Range{}, fmt.Errorf("the last of addresses %s is lower than the first: specify the lower address first",
			s)
	}
	for _, bad := range specialPrefixes {
		if r.overlaps(PrefixRange(bad)) {
			return Range{},
				fmt.Errorf("addresses %s cannot be used for Services: %s is loopback, link-local, multicast or "+
					"reserved", s, bad)
		}
	}
	return r, nil
}

// specialPrefixes are the ranges that cannot be in a pool: loopback, link-local, multicast and
// reserved addresses.
var specialPrefixes = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("::/96"), netip.MustParsePrefix("::ffff:0:0/96"), netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("ff00::/8"),
}

func splitRange(s string) (Range, error) {
	if from, to, ok := strings.Cut(s, "-"); ok {
		a, err := parseAddress(from)
		if err != nil {
			return Range{}, err
		}
		b, err := parseAddress(to)
		return Range{a, b}, err
	}
	if strings.Contains(s, "/") {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			return Range{}, err
		}
		if p != p.Masked() {
			return Range{}, errors.New("bits are set beyond the prefix")
		}
		return PrefixRange(p), nil
	}
	a, err := parseAddress(s)
	return Range{a, a}, err
}

// parseAddress parses an IP address. It rejects addresses with a zone.
func parseAddress(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(strings.TrimSpace(s))
	if err == nil && a.Zone() != "" {
		err = errors.New("the address has a zone, which is valid on one link only")
	}
	return a, err
}

func joinLines(err error) string {
	return strings.Join(strings.Fields(err.Error()), " ")
}

// UsedRange is a range that the cluster uses for another purpose, so that no pool may contain it.
type UsedRange struct {
	Range
	Description string // description for errors: "the pods' addresses 10.244.0.0/16"
}

// maxNodeAddresses is the maximum number of addresses of each address type and family that
// NodeAddresses returns.
const maxNodeAddresses = 4

// NodeAddresses returns the addresses of a node that no Service gets and no pool should contain. A
// machine may be on several networks, so these are the first four internal and external addresses
// of each family. The limit exists because a node reports its own addresses: a node that reports
// all addresses of a pool must not exhaust the pool.
func NodeAddresses(node *corev1.Node) []netip.Addr {
	type sort struct {
		of  corev1.NodeAddressType
		six bool
	}
	var out []netip.Addr
	seen := map[sort]int{}
	for _, at := range node.Status.Addresses {
		a, err := netip.ParseAddr(at.Address)
		if err != nil || at.Type != corev1.NodeInternalIP && at.Type != corev1.NodeExternalIP {
			continue
		}
		a = a.WithZone("").Unmap()
		if s := (sort{at.Type, a.Is6()}); seen[s] < maxNodeAddresses {
			seen[s]++
			out = append(out, a)
		}
	}
	return out
}

// CheckConflicts returns an error if a pool overlaps a used range.
func CheckConflicts(pools []*Pool, used []UsedRange) error {
	for _, p := range pools {
		for _, r := range p.Ranges {
			for _, t := range used {
				if r.overlaps(t.Range) {
					return fmt.Errorf("pool %s: %s overlaps %s: use other addresses for the pool", p.Name,
						r, t.Description)
				}
			}
		}
	}
	return nil
}
