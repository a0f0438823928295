package proxy

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
	"strings"

	"keelson.dev/keelson/agent/proxy/servicemodel"
)

// Mode is the kernel mechanism with which Service rules are programmed: nftables, iptables, IPVS or
// none.
type Mode string

// Values of Mode and of the flag --proxy-mode.
const (
	ModeNFTables Mode = "nftables"
	ModeIPTables Mode = "iptables"
	ModeIPVS     Mode = "ipvs"
	ModeNone     Mode = "none" // another program serves Services
)

// ParseMode parses the name of a Mode. It returns an error for an unknown name.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case ModeNFTables, ModeIPTables, ModeIPVS, ModeNone:
		return m, nil
	}
	return "", fmt.Errorf("%q: want nftables, iptables, ipvs or none", s)
}

// Base contains the node and cluster settings on which the rules depend, besides Services.
type Base struct {
	ServiceCIDRs []netip.Prefix // an unused address in these ranges is rejected
	// PodCIDRs are the cluster's pod ranges. Traffic from them to other networks is masqueraded
	// with the node's address. If empty, a third-party network plugin masquerades.
	PodCIDRs []netip.Prefix
	// NodePorts are the node's addresses at which node ports are served; empty: all except
	// loopback.
	NodePorts []netip.Prefix
}

func (b Base) equalBase(c Base) bool {
	return slices.Equal(b.ServiceCIDRs, c.ServiceCIDRs) && slices.Equal(b.PodCIDRs, c.PodCIDRs) &&
		slices.Equal(b.NodePorts, c.NodePorts)
}

// Writer programs Ports in the kernel. It is not safe for concurrent use.
type Writer interface {
	// Check returns an error if this machine does not support the mode. The error states the reason
	// and the remedy in one sentence.
	Check(ctx context.Context) error
	// Sync replaces all of Keelson's rules in the kernel with those for base and ports. Connections
	// and session affinity are kept. After an error, the kernel has the old rules or a part of the
	// new ones.
	Sync(ctx context.Context, base Base, ports iter.Seq[*servicemodel.Port]) error
	// Apply programs changes relative to the previous calls of Sync and Apply. After an error, the
	// caller must call Sync.
	Apply(ctx context.Context, changes []servicemodel.Change) error
	// Intact reports whether the kernel still has the programmed rules. A firewall that is reloaded
	// may flush rules of other programs.
	Intact(ctx context.Context) (bool, error)
	// Clean removes all of Keelson's rules. It succeeds if the kernel has no rules of Keelson.
	Clean(ctx context.Context) error
	// Counts returns the connection counters since the rules were created.
	Counts(ctx context.Context) (Counts, error)
}

// Counts are the connection counters of this node by frontend.
type Counts struct {
	Connections map[servicemodel.Frontend]uint64 // connections for which a backend was selected
	Unserved    map[servicemodel.Frontend]uint64 // first packets of connections that found no backend
}

func newCounts() Counts {
	return Counts{map[servicemodel.Frontend]uint64{}, map[servicemodel.Frontend]uint64{}}
}

// NewWriter returns the Writer of a mode. It returns an error for ModeNone and for an unknown mode.
func NewWriter(m Mode) (Writer, error) {
	switch m {
	case ModeNFTables:
		return newNFT(), nil
	case ModeIPTables:
		return newIPTables(), nil
	case ModeIPVS:
		return newIPVS(), nil
	}
	return nil, fmt.Errorf("proxy mode %s has no rules", m)
}

// cleanOthers removes the rules that modes other than m left in the kernel. A mode that this
// machine does not support has no rules.
func cleanOthers(ctx context.Context, m Mode) error {
	var errs []error
	for _, other := range []Mode{ModeNFTables, ModeIPTables, ModeIPVS} {
		if other == m {
			continue
		}
		w, err := NewWriter(other)
		if err == nil && w.Check(ctx) == nil {
			err = w.Clean(ctx)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("removing the rules of mode %s: %w", other, err))
		}
	}
	return errors.Join(errs...)
}

// family is an address family, IPv4 or IPv6, with its names in nft and iptables.
type family struct {
	v6       bool
	ip       string // "ip", "ip6"
	addr     string // nft's address type
	loopback string
	bits     int
}

var (
	ipv4 = family{ip: "ip", addr: "ipv4_addr", loopback: "127.0.0.0/8", bits: 32}
	ipv6 = family{v6: true, ip: "ip6", addr: "ipv6_addr", loopback: "::1", bits: 128}
)

// familyPrefixes returns the prefixes that belong to the address family.
func (f family) familyPrefixes(prefixes []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range prefixes {
		if p.Addr().Is6() == f.v6 {
			out = append(out, p)
		}
	}
	return out
}

// isNeeded reports whether the base requires a table of the family even without Ports: always for
// IPv4, and for IPv6 if the pods or Services have IPv6 ranges.
func (f family) isNeeded(b Base) bool {
	return !f.v6 || len(f.familyPrefixes(b.ServiceCIDRs)) > 0 || len(f.familyPrefixes(b.PodCIDRs)) > 0
}

// familyPorts returns the ports that belong to the address family.
func (f family) familyPorts(ports iter.Seq[*servicemodel.Port]) iter.Seq[*servicemodel.Port] {
	return func(yield func(*servicemodel.Port) bool) {
		for p := range ports {
			if p.V6 == f.v6 && !yield(p) {
				return
			}
		}
	}
}

// familyChanges returns the changes of Ports that belong to the address family.
func (f family) familyChanges(changes []servicemodel.Change) []servicemodel.Change {
	var out []servicemodel.Change
	for _, c := range changes {
		if p := c.New; p != nil && p.V6 == f.v6 || p == nil && c.Old.V6 == f.v6 {
			out = append(out, c)
		}
	}
	return out
}

// addedPorts returns the New Port of each change. It omits removed Ports.
func addedPorts(changes []servicemodel.Change) iter.Seq[*servicemodel.Port] {
	return func(yield func(*servicemodel.Port) bool) {
		for _, c := range changes {
			if c.New != nil && !yield(c.New) {
				return
			}
		}
	}
}

// sanitizeComment returns name as the text of a rule's comment. It removes all characters that such
// a comment may not contain, and truncates the result to 120 bytes.
func sanitizeComment(name string) string {
	keep := func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("-./:_", r) {
			return r
		}
		return -1
	}
	name = strings.Map(keep, name)
	return name[:min(len(name), 120)]
}
