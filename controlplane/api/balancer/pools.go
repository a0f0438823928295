// Package balancer decides which addresses Services of type LoadBalancer may have and which of them
// a Service gets. Everything is a pure function of objects, so that admission, the controller and
// the command line decide alike.
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
	maxRanges = 64       // per pool
	maxText   = 16 << 10 // bytes per pool
)

// document is the YAML form of a pool.
type document struct {
	// Addresses are CIDRs ("192.0.2.0/28", including its first and last address), ranges
	// ("192.0.2.10-192.0.2.20") and single addresses.
	Addresses []string `json:"addresses"`
	// AutoAssign, true by default, also gives addresses to Services that request neither this pool
	// nor an address of it.
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

// Range is the range of addresses from From to To, both included.
type Range struct{ From, To netip.Addr }

// String returns the range in the form of the configuration.
func (r Range) String() string {
	if r.From == r.To {
		return r.From.String()
	}
	return r.From.String() + "-" + r.To.String()
}

// Contains reports whether the range contains an address.
func (r Range) Contains(a netip.Addr) bool {
	return r.From.BitLen() == a.BitLen() && r.From.Compare(a) <= 0 && a.Compare(r.To) <= 0
}

func (r Range) overlaps(o Range) bool { return r.Contains(o.From) || o.Contains(r.From) }

// RangeOf returns the range of all addresses of a prefix.
func RangeOf(p netip.Prefix) Range {
	p = p.Masked()
	raw := p.Addr().AsSlice()
	for i := p.Bits(); i < len(raw)*8; i++ {
		raw[i/8] |= 1 << (7 - i%8)
	}
	last, _ := netip.AddrFromSlice(raw)
	return Range{p.Addr(), last}
}

// Contains reports whether the pool contains an address.
func (p *Pool) Contains(a netip.Addr) bool {
	return slices.ContainsFunc(p.Ranges, func(r Range) bool { return r.Contains(a) })
}

// has reports whether the pool has addresses of a family; six selects IPv6.
func (p *Pool) has(six bool) bool {
	return slices.ContainsFunc(p.Ranges, func(r Range) bool { return r.From.Is6() == six })
}

// Parse parses the data of the ConfigMap and returns the pools sorted by name. An error names the
// pool, the fault and the remedy.
func Parse(data map[string]string) ([]*Pool, error) {
	if len(data) > maxPools {
		return nil, fmt.Errorf("there are %d pools: join some, %d are read", len(data), maxPools)
	}
	var out []*Pool
	for _, name := range slices.Sorted(maps.Keys(data)) {
		p, err := parse(name, data[name])
		if err != nil {
			return nil, fmt.Errorf("pool %s: %w", name, err)
		}
		for _, o := range out {
			for _, r := range p.Ranges {
				if i := slices.IndexFunc(o.Ranges, r.overlaps); i >= 0 {
					return nil, fmt.Errorf("pool %s: %s overlaps %s of pool %s: an address is to be in one pool", name, r, o.Ranges[i], o.Name)
				}
			}
		}
		out = append(out, p)
	}
	return out, nil
}

func parse(name, text string) (*Pool, error) {
	if errs := validation.IsDNS1123Label(name); len(errs) > 0 {
		return nil, fmt.Errorf("its name: %s", strings.Join(errs, "; "))
	}
	if len(text) > maxText {
		return nil, fmt.Errorf("it has %d bytes, and %d are read", len(text), maxText)
	}
	var d document
	if err := yaml.UnmarshalStrict([]byte(text), &d); err != nil {
		return nil, fmt.Errorf("it is no YAML with addresses, autoAssign, namespaceSelector and serviceSelector: %s", oneLine(err))
	}
	p := &Pool{Name: name, AutoAssign: d.AutoAssign == nil || *d.AutoAssign}
	switch {
	case len(d.Addresses) == 0:
		return nil, errors.New("addresses is empty: give CIDRs, ranges or addresses, such as 192.0.2.10-192.0.2.20")
	case len(d.Addresses) > maxRanges:
		return nil, fmt.Errorf("addresses has %d entries, and %d are read: join some", len(d.Addresses), maxRanges)
	}
	for _, s := range d.Addresses {
		r, err := parseRange(s)
		if err != nil {
			return nil, err
		}
		if i := slices.IndexFunc(p.Ranges, r.overlaps); i >= 0 {
			return nil, fmt.Errorf("%s overlaps %s: give each address once", r, p.Ranges[i])
		}
		p.Ranges = append(p.Ranges, r)
	}
	var err error
	if p.namespaces, err = selector("namespaceSelector", d.NamespaceSelector); err != nil {
		return nil, err
	}
	p.services, err = selector("serviceSelector", d.ServiceSelector)
	return p, err
}

// selector returns the selector of a field, or one that selects everything if s is nil. field is
// used in errors.
func selector(field string, s *metav1.LabelSelector) (labels.Selector, error) {
	if s == nil {
		return labels.Everything(), nil
	}
	out, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return nil, fmt.Errorf("%s: %s", field, oneLine(err))
	}
	return out, nil
}

func parseRange(s string) (Range, error) {
	r, err := rangeOf(s)
	if err != nil {
		return Range{}, fmt.Errorf("address %q: give a CIDR, a range such as 192.0.2.10-192.0.2.20 or an address", s)
	}
	if r.From.Is4() != r.To.Is4() || r.To.Less(r.From) {
		return Range{}, fmt.Errorf("addresses %s end before they begin: give the lower one first", s)
	}
	for _, bad := range special {
		if r.overlaps(RangeOf(bad)) {
			return Range{}, fmt.Errorf("addresses %s are not for Services: %s is loopback, link-local, multicast or reserved", s, bad)
		}
	}
	return r, nil
}

// special are the ranges that cannot be in a pool: loopback, link-local, multicast and reserved
// addresses.
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"), netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/4"), netip.MustParsePrefix("240.0.0.0/4"),
	netip.MustParsePrefix("::/96"), netip.MustParsePrefix("::ffff:0:0/96"), netip.MustParsePrefix("fe80::/10"), netip.MustParsePrefix("ff00::/8"),
}

func rangeOf(s string) (Range, error) {
	if from, to, ok := strings.Cut(s, "-"); ok {
		a, err := address(from)
		if err != nil {
			return Range{}, err
		}
		b, err := address(to)
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
		return RangeOf(p), nil
	}
	a, err := address(s)
	return Range{a, a}, err
}

// address parses an IP address. It rejects addresses with a zone.
func address(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(strings.TrimSpace(s))
	if err == nil && a.Zone() != "" {
		err = errors.New("an address of one link only")
	}
	return a, err
}

func oneLine(err error) string {
	return strings.Join(strings.Fields(err.Error()), " ")
}

// Taken is a range that the cluster uses for another purpose, so that no pool may contain it.
type Taken struct {
	Range
	What string // description for errors: "the pods' addresses 10.244.0.0/16"
}

// mostOfMachine is the maximum number of addresses that OfMachine returns for each address type and
// family.
const mostOfMachine = 4

// OfMachine returns the addresses of a node that no Service gets and no pool should contain. A
// machine may be on several networks, so these are the first four internal and external addresses
// of each family. The limit exists because a node reports its own addresses: one that reports all
// addresses of a pool must not exhaust it.
func OfMachine(n *corev1.Node) []netip.Addr {
	type sort struct {
		of  corev1.NodeAddressType
		six bool
	}
	var out []netip.Addr
	seen := map[sort]int{}
	for _, at := range n.Status.Addresses {
		a, err := netip.ParseAddr(at.Address)
		if err != nil || at.Type != corev1.NodeInternalIP && at.Type != corev1.NodeExternalIP {
			continue
		}
		a = a.WithZone("").Unmap()
		if s := (sort{at.Type, a.Is6()}); seen[s] < mostOfMachine {
			seen[s]++
			out = append(out, a)
		}
	}
	return out
}

// Conflict returns an error for a pool that overlaps a range in taken, or nil.
func Conflict(pools []*Pool, taken []Taken) error {
	for _, p := range pools {
		for _, r := range p.Ranges {
			for _, t := range taken {
				if r.overlaps(t.Range) {
					return fmt.Errorf("pool %s: %s overlaps %s: give the pool other addresses", p.Name, r, t.What)
				}
			}
		}
	}
	return nil
}
